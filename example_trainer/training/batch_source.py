"""The interface of the object that the training loop takes its batches from."""

from __future__ import annotations

from typing import Any, Protocol

from example_trainer.batch.client import TrainedBatch
from example_trainer.batch.prefetch import Upkeep
from example_trainer.batch.reader import ReadyBatch


class BatchSource(Protocol):
    """Where batches come from: prefetch.Batches, or local_sampler.SampledBatches."""

    def begin(self, version: int) -> None:
        """Let the first batch be made; `next` is about to be called."""

    def next(self, version: int, upkeep: Upkeep | None = None) -> ReadyBatch:
        """The next batch, to be trained on with the weights of `version`.

        Raises BatchError for one that cannot be.
        """

    def acknowledge(
        self,
        version: int,
        skipped: str | None = None,
        hold: bool = False,
        report: dict[str, Any] | None = None,
    ) -> None:
        """The batch of the last `next` is in the weights of `version`, or for the reason given in
        none. `report` is what was computed for its tokens."""

    def last_report(
        self, report: dict[str, Any] | None, error: str | None, patience: float
    ) -> None:
        """Report that the run ends with the batch of the last `next`; `error` is what training on
        it raised. Not collective.
        """

    @property
    def in_hand(self) -> TrainedBatch | None:
        """The name of the batch of the last `next`, until it is acknowledged; None if it has none."""

    def release(self) -> None:
        """Say of the batches that were held what `acknowledge` was told."""

    @property
    def held(self) -> tuple[TrainedBatch, ...]:
        """Those among them that are in the weights."""

    @property
    def owes(self) -> bool:
        """Whether there are any, skipped ones included."""

    def end_run(self) -> None:
        """Report that the run has taken all its steps."""
