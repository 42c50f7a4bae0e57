"""`kill -9` of each process of a running training in turn: the run heals, or names the fault and
the remedy in one line, and its page shows it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.launcher import roles
from tests.conftest import ROOT, Processes
from tests.e2e.conftest import start_vllm, trainer_command
from tests.headless_browser import LIVE, UNANSWERED, Visit, missing
from tests.still_running import json_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(540)]

STARTER = ROOT / "assets" / "starter_model"
STEPS = 18
"""Sockets that are waited for, and sockets that are taken in between."""


def watcher(origin: str, request: pytest.FixtureRequest) -> Visit | None:
    """A person's browser on the run's page from here on; None on a machine without a browser."""
    if missing():
        return None
    seen: Visit = request.getfixturevalue("visit")(origin)
    seen.expect(UNANSWERED)
    seen.open("/ui")
    seen.until(LIVE)
    return seen


def table_at(url: str) -> bool:
    """Report if the trainer has registered its servers at this service."""
    return bool(httpx.get(f"{url}/fleet", timeout=60).json()["published"])


def test_the_run_survives_the_death_of_each_process(
    processes: Processes,
    free_port: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    port = free_port()
    url = f"http://localhost:{port}"
    vllm = start_vllm(processes, free_port, STARTER, tmp_path, flags=("--bridge-timeout", "60"))
    metrics = tmp_path / "trainer" / "metrics.jsonl"

    def start_service() -> ManagedProcess:
        # A trainer reports its servers every five seconds.
        options = {"store": tmp_path / "rollouts.db", "run_folder": tmp_path, "silent_after": 8}
        return processes.start("service", roles.service("127.0.0.1", port, **options))

    def start_environment() -> ManagedProcess:
        settings = {"max_token_length": 32}
        command = roles.environment("arithmetic", url, [vllm.url], settings=settings)
        return processes.start("environment", command, may_finish=True)

    def start_trainer(*flags: str) -> ManagedProcess:
        command = trainer_command(
            STARTER,
            url,
            tmp_path,
            *flags,
            bridge="broadcast",
            lr=1e-4,
            vllm_port=vllm.port,
            batch_size=16,
            gradient_accumulation_steps=2,
            training_steps=STEPS,
            bridge_timeout=60,
            checkpoint_interval=1,
            num_threads=1,
        )
        return processes.start("trainer", command, may_finish=True)

    def steps() -> list[int]:
        return [row["step"] for row in json_rows(metrics)]

    def wait_for_step(step: int) -> None:
        processes.wait_until(
            f"step {step}", lambda: None if step in steps() else f"steps so far: {steps()}", 120
        )

    service = start_service()
    processes.wait_for_http(url, 180)
    environment = start_environment()
    trainer = start_trainer()
    wait_for_step(1)
    seen = watcher(f"http://127.0.0.1:{port}", request)

    processes.kill(environment)
    environment = start_environment()
    wait_for_step(max(steps()) + 2)

    processes.kill(service)
    time.sleep(1)
    service = start_service()
    wait_for_step(max(steps()) + 2)
    # A trainer that has not reported its servers to this service may never do so, and such a one
    # may be long at a batch.
    processes.wait_until(
        "the trainer's table of servers", lambda: None if table_at(url) else "none yet", 120
    )

    processes.kill(trainer)
    at = max(steps())
    if seen:
        mute = seen.page.get_by_role("alert").filter(has_text="The trainer has sent nothing for ")
        mute.wait_for()
        assert "scripts/start.sh --resume trainer" in mute.inner_text()
    trainer = start_trainer("--resume", "auto")
    wait_for_step(at + 1)
    assert re.search(r"Resuming from .*step_\d+ at step \d+", trainer.log_path.read_text())
    assert vllm.state()["epoch"] == 2

    # Without vLLM there is nothing to train with: the trainer waits for it, and brings it up to
    # date before it serves.
    processes.kill(vllm.process)
    at = max(steps())
    if seen:
        silent = seen.page.get_by_role("alert").filter(
            has_text=f"{vllm.url} does not answer: connection refused. Since "
        )
        silent.wait_for()
    again = start_vllm(
        processes, lambda: vllm.port, STARTER, tmp_path, flags=("--bridge-timeout", "60")
    )
    assert "waiting for its weights" in again.log
    wait_for_step(at + 2)
    if seen:
        silent.wait_for(state="detached")
        mute.wait_for(state="detached")
        seen.until(LIVE)
    assert trainer.poll() is None
    assert re.search(r"\[Fleet\] \S+ is back: serves version \d+", trainer.log_path.read_text())
    assert "ERROR" not in trainer.log_path.read_text()

    processes.finish(trainer, 180)
    assert sorted(set(steps())) == list(range(1, STEPS + 1))
    state = again.state()
    assert (state["weight_version"], state["state"]) == (STEPS, "serving")
    assert service.poll() is None
    assert environment.poll() in (None, 0), "it ends by itself, and well, once training is complete"
