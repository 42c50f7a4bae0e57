"""`kill -9` of each process of a running training in turn: the run heals, or says in one line what is wrong and what to do."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.quickstart.processes import ManagedProcess
from tests.conftest import ROOT, Processes
from tests.e2e.conftest import start_vllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(540)]

STARTER = ROOT / "assets" / "starter_model"


def test_the_run_survives_the_death_of_each_process(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    port = free_port()
    url = f"http://localhost:{port}"
    vllm = start_vllm(processes, free_port, STARTER, tmp_path, flags=("--bridge-timeout", "15"))
    metrics = tmp_path / "trainer" / "metrics.jsonl"

    def start_service() -> ManagedProcess:
        command = [sys.executable, "-m", "atroposlib.cli.run_api", "--port", str(port), "--store", tmp_path / "rollouts.db"]
        return processes.start("service", command)

    def start_environment() -> ManagedProcess:
        flags = ["--env.rollout_server_url", url, "--openai.base_url", vllm.url, "--env.max_token_length", "32"]
        command = [sys.executable, ROOT / "environments/arithmetic_server.py", "serve", *flags]
        return processes.start("environment", command, may_finish=True)

    def start_trainer(*flags: str) -> ManagedProcess:
        command = [
            *(sys.executable, "-u", ROOT / "example_trainer/grpo.py", "--model-name", STARTER, "--lr", "1e-4"),
            *("--weight-bridge-mode", "shared_vllm", "--use-shared-memory", "--vllm-port", str(vllm.port)),
            *("--atropos-url", url, "--batch-size", "16", "--gradient-accumulation-steps", "2", "--training-steps", "10"),
            *("--bridge-timeout", "15", "--checkpoint-interval", "1", "--num-threads", "1"),
            *("--save-path", tmp_path / "checkpoints", "--log-dir", tmp_path / "trainer", *flags),
        ]
        return processes.start("trainer", command, may_finish=True)

    def steps() -> list[int]:
        return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def wait_for_step(step: int) -> None:
        processes.wait_until(f"step {step}", lambda: None if step in steps() else f"steps so far: {steps()}", 120)

    service = start_service()
    processes.wait_for_http(url, 60)
    environment = start_environment()
    trainer = start_trainer()
    wait_for_step(1)

    processes.kill(environment)
    environment = start_environment()
    wait_for_step(max(steps()) + 2)

    processes.kill(service)
    time.sleep(1)
    service = start_service()
    wait_for_step(max(steps()) + 2)

    processes.kill(trainer)
    at = max(steps())
    trainer = start_trainer("--resume", "auto")
    wait_for_step(at + 1)
    assert re.search(r"Resuming from .*step_\d+ at step \d+", trainer.log_path.read_text())
    assert vllm.state()["epoch"] == 2

    # Without vLLM there is nothing to train with: the trainer says so and keeps what it has; the environment waits.
    processes.kill(vllm.process)
    deadline = time.monotonic() + 90
    while trainer.poll() is None:
        assert time.monotonic() < deadline, trainer.tail(5)
        time.sleep(0.2)
    assert trainer.poll() == 1
    errors = [line for line in trainer.log_path.read_text().splitlines() if "ERROR" in line]
    assert len(errors) == 1, errors
    assert f"localhost:{vllm.port}" in errors[0]
    assert "--resume auto" in errors[0]
    assert "Traceback" not in trainer.log_path.read_text()
    assert environment.poll() is None
    processes.stop(trainer)

    again = start_vllm(processes, lambda: vllm.port, STARTER, tmp_path, flags=("--bridge-timeout", "15"))
    finished = start_trainer("--resume", "auto")
    processes.finish(finished, 180)
    assert max(steps()) == 10
    # The step that vLLM's death cut short was taken and kept, but it was never served and has no line.
    assert len(set(range(1, 11)) - set(steps())) <= 1
    state = again.state()
    assert (state["weight_version"], state["state"]) == (10, "serving")
    assert service.poll() is None
