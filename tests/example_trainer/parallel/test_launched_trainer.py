"""The trainer that starts its own ranks, as processes: with the real rollout service and without an
inference server.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from example_trainer.child_processes.processes import ManagedProcess
from tests.conftest import ROOT, Processes
from tests.example_trainer.test_grpo import Run
from tests.http_server import HttpServer

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

STEPS = 4
SIZES = ["--batch-size", "1", "--gradient-accumulation-steps", "4", "--rank-timeout", "60"]
TWO_RANKS = ["--vllm-restart-interval", "0", "--ranks", "2"]


class LaunchedRun(Run):
    """One rollout service, and a trainer that is started by its path alone."""

    def launched(self, *options: str) -> ManagedProcess:
        command = [
            sys.executable,
            "-u",
            str(ROOT / "example_trainer" / "grpo.py"),
            "--model-name",
            str(self.model),
        ]
        command += [
            "--atropos-url",
            self.url,
            "--training-steps",
            str(STEPS),
            "--lr",
            "1e-2",
            "--seq-len",
            "64",
        ]
        command += [
            "--num-threads",
            "1",
            "--save-path",
            str(self.folder / "checkpoints"),
            *SIZES,
            *options,
        ]
        command += ["--log-dir", str(self.folder / "figures")]
        return self.processes.start(
            "trainer", command, directory=self.folder, grace=60, may_finish=True
        )


@pytest.fixture
def run(
    processes: Processes, free_port: Callable[[], int], model: Path, tmp_path: Path
) -> LaunchedRun:
    return LaunchedRun(processes, free_port(), model, tmp_path)


def ranks_of(trainer: ManagedProcess) -> list[psutil.Process]:
    children = psutil.Process(trainer.command_pid()).children()
    assert len(children) == 2, f"{children}; the trainer last wrote: {trainer.tail(3)}"
    return children


def test_sigterm_saves_and_a_killed_launcher_leaves_nothing(run: LaunchedRun) -> None:
    run.post(0, 1)
    trainer = run.launched(*TWO_RANKS, "--checkpoint-interval", "0")
    run.processes.wait_for_text(trainer, f"Step 2/{STEPS}", seconds=180)
    os.kill(trainer.command_pid(), signal.SIGTERM)
    assert trainer.guard.wait(timeout=120) == 128 + signal.SIGTERM
    lines = trainer.log_path.read_text().splitlines()
    assert sum("[Ranks] Starting 2 ranks with FSDP2: --ranks 2" in line for line in lines) == 1
    assert sum(line.endswith("Stopped by SIGTERM") for line in lines) == 1, "rank 0 logs for all"
    assert not any(line.startswith("ERROR ") for line in lines)
    assert run.saved() == ["step_2"]
    run.processes.stop(trainer)

    run.post(2)
    trainer = run.launched(*TWO_RANKS, "--checkpoint-interval", "1", "--resume", "auto")
    run.processes.wait_for_text(trainer, f"Step 3/{STEPS}", seconds=180)
    ranks = ranks_of(trainer)
    os.kill(trainer.command_pid(), signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    assert trainer.guard.wait(timeout=60) == 128 + signal.SIGKILL


@pytest.fixture
def other_server() -> Iterator[HttpServer]:
    """Answers /bridge/info for a vLLM of two ranks on this machine's CPU."""
    places = {"replicas": 1, "device": "cpu", "gpu_uuids": ["", ""]}
    with HttpServer(lambda _: (200, {"instance": "one", "tp_degree": 2, **places})) as server:
        yield server


def test_what_is_refused_moves_no_file_of_the_run_before(
    run: LaunchedRun, other_server: HttpServer
) -> None:
    metrics = run.folder / "figures" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 1}\n')
    port = str(other_server.port)
    shared = ["--weight-bridge-mode", "shared_vllm", "--single-copy", "--vllm-port", port]
    trainer = run.launched(*shared, "--ranks", "1")
    assert trainer.guard.wait(timeout=120) == 1
    (line,) = trainer.log_path.read_text().splitlines()
    assert line.startswith("ERROR ")
    assert line.endswith(
        "single copy needs one trainer rank for each of vLLM's 2 ranks, and --ranks is 1: leave --ranks out, or train with "
        "--use-shared-memory (broadcast)"
    )
    assert [path.name for path in metrics.parent.iterdir()] == ["metrics.jsonl"]
    assert metrics.read_text() == '{"step": 1}\n'
    assert not (run.folder / "checkpoints").exists()
