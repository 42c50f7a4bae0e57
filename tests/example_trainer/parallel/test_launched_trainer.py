"""The trainer that starts its own ranks, as processes: with the real rollout service and without an
inference server.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.models import load_model
from studies.starter_model import mixture
from tests.conftest import ROOT, Processes
from tests.example_trainer.test_grpo import Run, small_flags
from tests.http_server import HttpServer

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

STEPS = 4
SIZES = ["--batch-size", "1", "--gradient-accumulation-steps", "4", "--rank-timeout", "60"]
TWO_RANKS = ["--vllm-restart-interval", "0", "--ranks", "2"]


class LaunchedRun(Run):
    """One rollout service, and a trainer that is started by its path alone."""

    def launched(self, *options: str) -> ManagedProcess:
        command = [sys.executable, "-u", str(ROOT / "example_trainer" / "grpo.py")]
        own = {"log_dir": self.folder / "figures", "vllm_restart_interval": None}
        command += small_flags(self.model, self.url, self.folder, training_steps=STEPS, **own)
        return self.processes.start(
            "trainer",
            [*command, *SIZES, *options],
            directory=self.folder,
            grace=60,
            may_finish=True,
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
        "--use-shared-memory (broadcast), for any number of ranks"
    )
    assert [path.name for path in metrics.parent.iterdir()] == ["metrics.jsonl"]
    assert metrics.read_text() == '{"step": 1}\n'
    assert not (run.folder / "checkpoints").exists()


def test_a_mixture_is_trained_with_its_experts_on_two_ranks(
    processes: Processes, free_port: Callable[[], int], model: Path, tmp_path: Path
) -> None:
    """And goes on with FSDP2 alone: its checkpoints are whole."""
    mixture.main(["--model", str(model), "--output", str(tmp_path / "mixture")])
    run = LaunchedRun(processes, free_port(), tmp_path / "mixture", tmp_path)
    run.post(0, 1)
    spread = [*TWO_RANKS, "--expert-parallel", "2", "--router-balance-coef", "0.01"]
    trainer = run.launched(*spread, "--router-z-coef", "0.001", "--training-steps", "2")
    assert trainer.guard.wait(timeout=180) == 0, trainer.tail(5)
    rows = [json.loads(line) for line in (tmp_path / "figures/metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(1 <= row["expert_load"] <= row["expert_load_max"] <= 4 for row in rows)
    assert all(0 < row["router_entropy"] < math.log(4) for row in rows)
    lines = trainer.log_path.read_text().splitlines()
    assert sum("  expert load " in line for line in lines) == 2, "rank 0 logs for all"
    saved, before = (
        load_model(str(folder), torch.float32)
        for folder in (tmp_path / "checkpoints" / "step_2", tmp_path / "mixture")
    )
    for name, parameter in saved.named_parameters():
        assert not torch.equal(parameter, before.get_parameter(name)), f"{name} was not trained"
    run.post(2, 3)
    trainer = run.launched(*TWO_RANKS, "--training-steps", "4", "--resume", "auto")
    assert trainer.guard.wait(timeout=180) == 0, trainer.tail(5)
    assert run.saved() == ["step_2", "step_4"]


def test_a_number_that_does_not_divide_is_one_line(
    processes: Processes, free_port: Callable[[], int], model: Path, tmp_path: Path
) -> None:
    mixture.main(["--model", str(model), "--output", str(tmp_path / "mixture")])
    run = LaunchedRun(processes, free_port(), tmp_path / "mixture", tmp_path)
    trainer = run.launched(*TWO_RANKS, "--expert-parallel", "3")
    assert trainer.guard.wait(timeout=120) == 2
    (line,) = trainer.log_path.read_text().splitlines()
    assert line.startswith("ERROR ")
    assert line.endswith("--expert-parallel 3 does not divide the 2 trainer rank(s); give 1 or 2")
    assert not (run.folder / "checkpoints").exists()
