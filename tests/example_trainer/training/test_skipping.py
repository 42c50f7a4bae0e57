"""A batch that cannot be trained on is reported, acknowledged and left out; too many in a row end
the run with nothing lost.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch

from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError, NonFiniteError, OutOfMemoryError
from example_trainer.out_of_memory import ran_out_of_memory
from example_trainer.training import optimizer as optimizing
from example_trainer.training.step import SkippedBatches
from example_trainer.weight_bridge.base import NoBridge
from tests.example_trainer.in_process import STEPS, Trainers
from tests.example_trainer.test_grpo import made_up_group

pytestmark = pytest.mark.timeout(240)


def nothing_left(logprobs: torch.Tensor) -> torch.Tensor:
    """Ask for more memory than there is."""
    return logprobs + torch.empty(1 << 52)


def not_a_number(logprobs: torch.Tensor) -> torch.Tensor:
    """Make the gradient NaN, the loss too."""
    return logprobs * torch.nan


@dataclass
class InPasses:
    """A fault of the passes with these numbers, counted from 1."""

    fault: Callable[[torch.Tensor], torch.Tensor]
    numbers: Container[int]
    passes: int = 0

    def __call__(self, logprobs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.fault(logprobs) if self.passes in self.numbers else logprobs


def post_of_another_tokenizer(trainers: Trainers, number: int) -> None:
    group = made_up_group(number)
    group["tokens"][0][-1] = group["masks"][0][-1] = 61
    httpx.post(f"{trainers.url}/scored_data", json=group, timeout=120).raise_for_status()


def test_a_batch_without_anything_to_train_on_is_left_out(
    trainers: Trainers, caplog: pytest.LogCaptureFixture
) -> None:
    trainers.post(0)
    post_of_another_tokenizer(trainers, 20)
    post_of_another_tokenizer(trainers, 21)
    trainers.post(1, 2, 3)
    assert trainers.train()
    assert trainers.line == list(range(STEPS))
    assert len(trainers.skipped) == 2
    assert all(
        "holds nothing to train on: group 0: tokens[0] holds 61" in reason
        for reason in trainers.skipped
    )
    assert "Skipping a batch (2 of 3 in a row, --max-skipped-batches): " in caplog.text
    assert [row["batches_skipped"] for row in trainers.rows()] == [0, 2, 0, 0]
    assert trainers.stats()["batches_skipped"] == 2


def test_too_many_in_a_row_end_the_run_with_what_was_learned(trainers: Trainers) -> None:
    trainers.post(0, 1)
    for number in (20, 21, 22):
        post_of_another_tokenizer(trainers, number)
    with pytest.raises(
        BatchError,
        match=r"^3 batches in a row could not be trained on \(--max-skipped-batches 2\); the last",
    ):
        trainers.train("--checkpoint-interval", "0", "--max-skipped-batches", "2")
    assert trainers.saved().keys() == {2}
    assert len(trainers.skipped) == 2, (
        "the last one waits for a trainer that can make something of it"
    )
    trainers.post(2, 3)
    assert trainers.train("--resume", "auto", "--max-skipped-batches", "1")
    assert trainers.line == list(range(STEPS))


def test_a_batch_that_is_too_large_for_the_memory_is_left_out(
    trainers: Trainers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainers.post(*range(STEPS + 1))
    trainers.faults[1] = nothing_left
    assert trainers.train()
    assert trainers.line == [0, 2, 3, 4]
    (reason,) = trainers.skipped
    assert reason.startswith("out of memory at optimizer step 1, in a pass over up to ")
    assert "allocate" in reason
    assert "Lower --tokens-per-microbatch" in reason


def test_what_a_left_out_batch_left_behind_is_in_no_gradient(trainers: Trainers) -> None:
    """The third of four passes runs out of memory, when the gradients of two are summed already."""
    parts = ["--tokens-per-microbatch", "1"]
    trainers.post(*range(STEPS))
    assert trainers.train(*parts)
    whole = trainers.weights()
    httpx.get(f"{trainers.url}/reset_data", timeout=120).raise_for_status()
    trainers.post(0, 9, 1, 2, 3)
    trainers.faults[9] = third = InPasses(nothing_left, [3])
    assert trainers.train(*parts)
    assert third.passes == 3
    assert all(torch.equal(tensor, whole[name]) for name, tensor in trainers.weights().items())


def test_a_gradient_that_is_not_finite_ends_the_run_with_the_last_sound_step(
    trainers: Trainers,
) -> None:
    trainers.post(*range(STEPS + 1))
    trainers.faults[2] = not_a_number
    with pytest.raises(
        NonFiniteError,
        match=r"^the gradient of .* at optimizer step 2; .*--skip-nonfinite N leaves out",
    ):
        trainers.train("--checkpoint-interval", "0")
    assert trainers.saved().keys() == {2}
    assert trainers.skipped == []
    assert trainers.train("--checkpoint-interval", "0", "--resume", "auto", "--skip-nonfinite", "1")
    assert trainers.line == [0, 1, 3, 4]
    assert trainers.skipped[0].startswith("the gradient of ")


def test_a_step_that_was_cut_short_once_too_often_is_saved_and_has_its_row(
    trainers: Trainers,
) -> None:
    """Its first update taught something, so the trainer that goes on begins behind it."""
    options = ["--checkpoint-interval", "0", "--ppo-epochs", "2"]
    trainers.post(*range(STEPS))
    trainers.faults[1] = InPasses(not_a_number, [2])
    with pytest.raises(NonFiniteError, match=r"this was update 2 of 2 of its batch, and those"):
        trainers.train(*options)
    assert trainers.saved().keys() == {2}
    rows = [(row["step"], row["updates"], row["updates_skipped"]) for row in trainers.rows()]
    assert rows == [(1, 2, 0), (2, 1, 1)]
    assert trainers.train(*options, "--resume", "auto")
    assert [row["step"] for row in trainers.rows()] == list(range(1, STEPS + 1))


def test_both_limits_count_by_themselves_and_begin_anew_with_a_step(trainers: Trainers) -> None:
    trainers.post(*range(8))
    trainers.faults = {0: not_a_number, 1: nothing_left, 3: nothing_left, 4: not_a_number}
    assert trainers.train("--skip-nonfinite", "1", "--max-skipped-batches", "1")
    assert trainers.line == [2, 5, 6, 7]


def test_weights_that_are_not_finite_are_never_saved(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers.post(*range(STEPS))
    real = optimizing.adamw

    def spoil(masters: list[torch.Tensor], *rest: Any, **options: Any) -> None:
        real(masters, *rest, **options)
        if rest[4][0] == 2:
            masters[0].view(-1)[0] = torch.inf

    monkeypatch.setattr(optimizing, "adamw", spoil)
    with pytest.raises(
        NonFiniteError, match=r"^the weight .* go on from the newest checkpoint \(--resume auto\)"
    ):
        trainers.train("--checkpoint-interval", "1", "--skip-nonfinite", "5")
    assert trainers.saved().keys() == {1}


def test_memory_that_runs_out_elsewhere_ends_the_run_with_what_was_learned(
    trainers: Trainers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainers.post(*range(STEPS))
    sync = NoBridge.sync

    def fail(bridge: NoBridge, version: int, *rest: object) -> object:
        if version == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return sync(bridge, version, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(NoBridge, "sync", fail)
    with pytest.raises(torch.OutOfMemoryError):
        trainers.train("--checkpoint-interval", "0")
    assert trainers.saved().keys() == {2}


def test_batches_that_taught_in_part_are_in_the_row_of_those_that_taught_nothing() -> None:
    skipped = SkippedBatches(TrainerConfig(model_name="m", skip_nonfinite=2, max_skipped_batches=1))
    nan, memory = NonFiniteError("the gradient of w is NaN"), OutOfMemoryError("out of memory")
    skipped.skip(nan)
    skipped.cut_short(nan, step=1, first=2, last=4)
    assert skipped.stepped() == 1, "one was left out, the other trained on"
    with pytest.raises(
        NonFiniteError,
        match=r"^3 batches in a row could .*\(--skip-nonfinite 2\); the last: the gradient of w",
    ):
        skipped.skip(nan)
    skipped.cut_short(memory, step=2, first=2, last=4)
    assert skipped.stepped() == 0
    skipped.skip(nan)
    skipped.refuse()
    skipped.cut_short(memory, step=3, first=2, last=4)
    with pytest.raises(
        OutOfMemoryError,
        match=r"^2 batches in a row .* \(--max-skipped-batches 1\); the last: out of memory",
    ):
        skipped.refuse()
    assert skipped.stepped() == 1
    for _ in range(2):
        skipped.skip(nan)
    assert skipped.stepped() == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("no gradient reached 2 of 3 parameters"), False),
        (OutOfMemoryError("one of ours"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert ran_out_of_memory(error) is expected
