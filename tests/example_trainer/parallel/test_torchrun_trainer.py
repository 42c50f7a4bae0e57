"""The trainer as processes of two ranks, with the real rollout service and no inference server.

Where torchrun has a part in what happens it starts the ranks, which `tests.forked_torchrun` forks;
where they settle it between them, `tests.forked_ranks` does.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.torch import load_file

from example_trainer.child_processes.processes import ManagedProcess
from tests.conftest import ROOT, Processes
from tests.example_trainer.test_grpo import Run, small_flags

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

TORCHRUN = ("tests.forked_torchrun", "--standalone", "--nproc-per-node", "2")
STEPS = 4
OPTIONS = [
    "--training-steps",
    str(STEPS),
    "--batch-size",
    "1",
    "--gradient-accumulation-steps",
    "4",
    "--rank-timeout",
    "60",
]


class ParallelRun(Run):
    """One rollout service, and a trainer of one process or of two."""

    def two_ranks(
        self,
        *options: str,
        script: Sequence[str] = (str(ROOT / "example_trainer" / "grpo.py"),),
        launcher: Sequence[str] = ("tests.forked_ranks",),
    ) -> ManagedProcess:
        command = [sys.executable, "-m", *launcher, *script]
        command += small_flags(self.model, self.url, self.folder, lr_schedule="linear")
        return self.processes.start(
            "trainer of two ranks",
            [*command, *OPTIONS, *options],
            {"PYTHONPATH": str(ROOT)},
            directory=self.folder,
            grace=30,
            may_finish=True,
        )

    def all_given_back(self) -> str | None:
        """A probe: whether the trainer has acknowledged all that was posted."""
        held = (
            httpx.get(f"{self.url}/stats", timeout=60)
            .raise_for_status()
            .json()["queue"]["held_groups"]
        )
        return f"the service holds {held} groups" if held else None

    def file(self, step: int, file: str) -> Path:
        return self.folder / "checkpoints" / f"step_{step}" / file


def worker(trainer: ManagedProcess, rank: int) -> psutil.Process:
    """The process of a rank: torchrun starts them in their order."""
    children = sorted(
        psutil.Process(trainer.command_pid()).children(),
        key=lambda child: (child.create_time(), child.pid),
    )
    assert len(children) == 2, f"{children}; the trainer last wrote: {trainer.tail(3)}"
    return children[rank]


@pytest.fixture
def make_run(
    processes: Processes,
    free_port: Callable[[], int],
    model: Path,
    tmp_path: Path,
) -> Callable[[str], ParallelRun]:
    def make(name: str) -> ParallelRun:
        (tmp_path / name).mkdir()
        return ParallelRun(processes, free_port(), model, tmp_path / name)

    return make


def test_a_killed_rank_ends_the_others_and_one_process_goes_on(
    make_run: Callable[[str], ParallelRun],
) -> None:
    run = make_run("parts")
    run.post(0, 1)
    trainer = run.two_ranks("--checkpoint-interval", "1", launcher=TORCHRUN)
    run.processes.wait_for_text(trainer, f"Saved checkpoint {run.file(2, '')}", seconds=120)
    run.processes.wait_until("both batches are given back", run.all_given_back, seconds=180)
    os.kill(worker(trainer, 1).pid, signal.SIGKILL)
    assert trainer.guard.wait(timeout=60) != 0
    text = trainer.log_path.read_text()
    # Rank 1 may not know yet that the service has the acknowledgement.
    assert re.search(
        "rank 0 of 2 lost another rank while (waiting for a batch|acknowledging batches)", text
    )
    assert "Step 3/" not in text
    run.processes.stop(trainer)
    run.post(2, 3)
    assert "Resuming from" in run.train(*OPTIONS, "--resume", "auto")

    whole = make_run("whole")
    whole.post(*range(STEPS))
    whole.train(*OPTIONS)
    for file in ("model.safetensors", "trainer_state/optimizer.safetensors"):
        one, two = (load_file(which.file(STEPS, file)) for which in (whole, run))
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            difference = float((tensor - two[name]).abs().max())
            assert difference <= 2e-5 * max(1.0, float(tensor.abs().max())), (
                f"{file}: {name} differs by {difference}"
            )
    assert [row["weight_version"] for row in run.rows()] == list(range(1, STEPS + 1))
    for row, other in zip(run.rows(), whole.rows(), strict=True):
        for name in (
            "loss",
            "kl",
            "entropy",
            "grad_norm",
            "clip_fraction",
            "reward_mean",
            "tokens",
        ):
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


def test_sigterm_ends_every_rank_at_the_same_step_and_keeps_it(
    make_run: Callable[[str], ParallelRun],
) -> None:
    run = make_run("run")
    run.post(0, 1)
    trainer = run.two_ranks("--checkpoint-interval", "0", launcher=TORCHRUN)
    run.processes.wait_for_text(trainer, f"Step 2/{STEPS}", seconds=120)
    os.kill(trainer.command_pid(), signal.SIGTERM)
    assert trainer.guard.wait(timeout=60) != 0
    lines = trainer.log_path.read_text().splitlines()
    assert sum(line.endswith("Stopped by SIGTERM") for line in lines) == 1, (
        "rank 0 says so; the others log no information"
    )
    assert not any(line.startswith("ERROR ") for line in lines)
    assert run.saved() == ["step_2"]
    assert run.file(2, "trainer_state/optimizer.safetensors").is_file()


def test_what_rank_0_finds_wrong_ends_every_rank_with_one_line(
    make_run: Callable[[str], ParallelRun],
) -> None:
    run = make_run("run")
    run.post(0)
    trainer = run.two_ranks("--checkpoint-interval", "0", "--service-timeout", "2")
    run.processes.wait_for_text(trainer, f"Step 1/{STEPS}", seconds=120)
    run.processes.kill(run.service)
    assert trainer.guard.wait(timeout=60) == 1
    errors = [
        line for line in trainer.log_path.read_text().splitlines() if line.startswith("ERROR ")
    ]
    assert len(errors) == 2
    # On a slow machine the trainer may still be reporting its step when the service ends.
    silence = re.compile(r"(GET|POST) /[a-z/-]+: .* for \d+ s, giving up; .*--service-timeout")
    assert [line for line in errors if not silence.search(line)] == []
    assert (
        sum(
            re.search(r"\[rank 1\] [a-z ]+ failed on rank 0: ", line) is not None for line in errors
        )
        == 1
    )
    assert run.saved() == ["step_1"]


def test_a_checkpoint_that_cannot_be_written_ends_every_rank_with_one_line(
    make_run: Callable[[str], ParallelRun],
) -> None:
    run = make_run("run")
    run.post(0)
    (run.folder / "checkpoints").mkdir()
    run.file(1, "").write_text("in the way")
    trainer = run.two_ranks("--checkpoint-interval", "1")
    assert trainer.guard.wait(timeout=120) == 1
    errors = [
        line for line in trainer.log_path.read_text().splitlines() if line.startswith("ERROR ")
    ]
    assert len(errors) == 2
    assert all(
        "could not write checkpoint" in line and "Not a directory" in line for line in errors
    )


ONE_BY_ONE = ["--tokens-per-microbatch", "1"]
FAULTY = str(ROOT / "tests" / "example_trainer" / "parallel" / "faulty_trainer.py")


def test_ranks_that_all_run_out_of_memory_keep_what_was_learned_and_go_on_behind_the_batch(
    make_run: Callable[[str], ParallelRun],
) -> None:
    run = make_run("run")
    run.post(*range(STEPS + 1))
    # Two passes of one sequence for each rank in a step: the fifth is of the third step.
    trainer = run.two_ranks("--checkpoint-interval", "0", *ONE_BY_ONE, script=[FAULTY, "0,1", "5"])
    assert trainer.guard.wait(timeout=120) == 1
    text = trainer.log_path.read_text()
    errors = [line for line in text.splitlines() if line.startswith("ERROR ")]
    assert len(errors) == 2
    assert all(
        "out of memory at optimizer step 2, in a pass over up to " in line for line in errors
    )
    assert all("(on rank 0: " in line for line in errors)
    assert "Skipping a batch (1 of 3 in a row, --max-skipped-batches)" in text
    assert run.saved() == ["step_2"]
    run.processes.stop(trainer)
    text = run.train(*OPTIONS, "--resume", "auto")
    assert f"Step 3/{STEPS} " in text
    assert httpx.get(f"{run.url}/status", timeout=120).json()["queue_size"] == 0, (
        "five batches for four steps"
    )


def test_ranks_that_run_out_behind_the_first_update_of_a_batch_keep_that(
    make_run: Callable[[str], ParallelRun],
) -> None:
    run = make_run("run")
    run.post(*range(STEPS))
    # Four passes of one sequence for each rank in a step of two updates: the seventh is of the
    # second update of the second.
    updates = ["--ppo-epochs", "2", "--checkpoint-interval", "0"]
    trainer = run.two_ranks(*updates, *ONE_BY_ONE, script=[FAULTY, "0,1", "7"])
    assert trainer.guard.wait(timeout=120) == 1
    text = trainer.log_path.read_text()
    errors = [line for line in text.splitlines() if line.startswith("ERROR ")]
    assert len(errors) == 2
    assert all(
        "this was update 2 of 2 of its batch, and those before are kept. Several ranks" in line
        for line in errors
    )
    assert "Skipping a batch" not in text
    assert run.saved() == ["step_2"]
    metrics = (run.folder / "logs" / "metrics.jsonl").read_text().splitlines()
    rows = [
        (row["step"], row["updates"], row["updates_skipped"]) for row in map(json.loads, metrics)
    ]
    assert rows == [(1, 2, 0), (2, 1, 1)]
    run.processes.stop(trainer)
    text = run.train(*OPTIONS, "--resume", "auto")
    assert f"Step 3/{STEPS} " in text
    assert httpx.get(f"{run.url}/status", timeout=120).json()["queue_size"] == 0, (
        "four batches for four steps"
    )


LOSS = """
import os
seen = 0

def shorter(inputs, settings):
    global seen
    seen += inputs.sequences == 1  # a made-up batch has more
    losses = -inputs.log_ratio.exp() * inputs.advantages
    return losses[1:] if seen == 3 and os.environ.get("RANK") == "1" else losses
"""


def test_a_loss_that_fails_on_one_rank_ends_the_others_with_its_reason(
    make_run: Callable[[str], ParallelRun],
) -> None:
    """Nothing is saved then: that takes all of them, and the others are in the pass of that bin."""
    run = make_run("run")
    (run.folder / "my_losses.py").write_text(LOSS)
    run.post(*range(STEPS))
    trainer = run.two_ranks(
        "--checkpoint-interval", "2", *ONE_BY_ONE, "--loss", "my_losses:shorter"
    )
    assert trainer.guard.wait(timeout=120) == 1
    text = trainer.log_path.read_text()
    errors = [line for line in text.splitlines() if line.startswith("ERROR ")]
    told = "rank 1: --loss my_losses:shorter: it returned losses of shape ["
    assert any(
        f"[rank 1] {told}" in line and "others wait for it in a transfer" in line for line in errors
    )
    assert any(
        "[rank 1]" not in line and f"rank 1 failed: RankError: {told}" in line for line in errors
    )
    assert len(errors) == 2, "and none of a checkpoint"
    assert f"Step 1/{STEPS}" in text
    assert run.saved() == []


def test_one_rank_that_runs_out_of_memory_ends_the_others_with_its_reason(
    make_run: Callable[[str], ParallelRun],
) -> None:
    run = make_run("run")
    run.post(*range(STEPS))
    trainer = run.two_ranks("--checkpoint-interval", "1", *ONE_BY_ONE, script=[FAULTY, "1", "5"])
    assert trainer.guard.wait(timeout=120) == 1
    errors = [
        line for line in trainer.log_path.read_text().splitlines() if line.startswith("ERROR ")
    ]
    assert any(
        "[rank 1] rank 1 ran out of memory in a step (" in line and "--resume auto" in line
        for line in errors
    )
    assert any(
        "[rank 1]" not in line and "rank 1 failed: RankError: rank 1 ran out of memory" in line
        for line in errors
    )
    assert run.saved() == ["step_1", "step_2"]
