"""`kill -9` of each process of a running training in turn. The run heals, or names the fault and
the remedy in one line, and its page shows it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.launcher import roles
from tests.conftest import ROOT, Processes
from tests.e2e.conftest import VllmServer, start_vllm, trainer_command
from tests.headless_browser import LIVE, UNANSWERED, Visit, missing
from tests.still_running import json_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(540)]

STARTER = ROOT / "assets" / "starter_model"
STEPS_AT_FIRST = 1000
"""More than the first trainer can do before it is killed."""
STEPS_LEFT = 10
"""As many as keep the second trainer busy until vLLM is killed, on a busy machine too."""


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


class Run:
    """The processes of a run. Each process can be started again."""

    def __init__(self, processes: Processes, free_port: Callable[[], int], folder: Path) -> None:
        self.processes, self.folder, self.port = processes, folder, free_port()
        self.url = f"http://localhost:{self.port}"
        self.training_steps = STEPS_AT_FIRST
        self.vllm = self.start_vllm(free_port)

    def start_vllm(self, port: Callable[[], int]) -> VllmServer:
        flags = ("--bridge-timeout", "60")
        return start_vllm(self.processes, port, STARTER, self.folder, flags=flags)

    def start_service(self) -> ManagedProcess:
        # A trainer reports its servers every five seconds.
        options = {"store": self.folder / "rollouts.db", "run_folder": self.folder}
        words = roles.service("127.0.0.1", self.port, silent_after=8, **options)
        return self.processes.start("service", words)

    def start_environment(self) -> ManagedProcess:
        settings = {"max_token_length": 32}
        command = roles.environment("arithmetic", self.url, [self.vllm.url], settings=settings)
        return self.processes.start("environment", command, may_finish=True)

    def start_trainer(self, *flags: str) -> ManagedProcess:
        command = trainer_command(
            STARTER,
            self.url,
            self.folder,
            *flags,
            bridge="broadcast",
            lr=1e-4,
            vllm_port=self.vllm.port,
            batch_size=16,
            gradient_accumulation_steps=2,
            training_steps=self.training_steps,
            bridge_timeout=60,
            checkpoint_interval=1,
            num_threads=1,
        )
        return self.processes.start("trainer", command, may_finish=True)

    def steps(self) -> list[int]:
        return [row["step"] for row in json_rows(self.folder / "trainer" / "metrics.jsonl")]

    def wait_for_step(self, step: int) -> None:
        self.processes.wait_until(
            f"step {step}",
            lambda: None if step in self.steps() else f"steps so far: {self.steps()}",
            120,
        )


def kill_vllm(run: Run, seen: Visit | None) -> tuple[VllmServer, Any]:
    """Without vLLM there is nothing to train with: the trainer waits for it, and brings it up to
    date before it serves. Returns the next server, and the page's alert.
    """
    run.processes.kill(run.vllm.process)
    at = max(run.steps())
    silent = None
    if seen:
        silent = seen.page.get_by_role("alert").filter(
            has_text=f"{run.vllm.url} does not answer: connection refused. Since "
        )
        silent.wait_for()
    again = run.start_vllm(lambda: run.vllm.port)
    assert "waiting for its weights" in again.log
    run.wait_for_step(at + 2)
    return again, silent


def test_the_run_survives_the_death_of_each_process(
    processes: Processes,
    free_port: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    run = Run(processes, free_port, tmp_path)
    service = run.start_service()
    processes.wait_for_http(run.url, 180)
    environment = run.start_environment()
    trainer = run.start_trainer()
    run.wait_for_step(1)
    seen = watcher(f"http://127.0.0.1:{run.port}", request)

    processes.kill(environment)
    environment = run.start_environment()
    run.wait_for_step(max(run.steps()) + 2)

    processes.kill(service)
    time.sleep(1)
    service = run.start_service()
    run.wait_for_step(max(run.steps()) + 2)
    # A trainer that has not reported its servers to this service may never do so, and such a one
    # may be long at a batch.
    processes.wait_until(
        "the trainer's table of servers", lambda: None if table_at(run.url) else "none yet", 120
    )

    processes.kill(trainer)
    at = max(run.steps())
    if seen:
        mute = seen.page.get_by_role("alert").filter(has_text="The trainer has sent nothing for ")
        mute.wait_for()
        assert "scripts/start.sh --resume trainer" in mute.inner_text()
    run.training_steps = at + STEPS_LEFT
    trainer = run.start_trainer("--resume", "auto")
    run.wait_for_step(at + 1)
    assert re.search(r"Resuming from .*step_\d+ at step \d+", trainer.log_path.read_text())
    assert run.vllm.state()["epoch"] == 2

    again, silent = kill_vllm(run, seen)
    if seen and silent:
        silent.wait_for(state="detached")
        mute.wait_for(state="detached")
        seen.until(LIVE)
    assert trainer.poll() is None
    assert re.search(r"\[Fleet\] \S+ is back: serves version \d+", trainer.log_path.read_text())
    assert "ERROR" not in trainer.log_path.read_text()

    processes.finish(trainer, 180)
    assert sorted(set(run.steps())) == list(range(1, run.training_steps + 1))
    state = again.state()
    assert (state["weight_version"], state["state"]) == (run.training_steps, "serving")
    assert service.poll() is None
    assert environment.poll() in (None, 0), "it ends by itself, and well, once training is complete"
