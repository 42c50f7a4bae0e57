"""The interfaces of the objects that the training loop is given: where batches come from, and where
checkpoints go.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from example_trainer.batch.client import TrainedBatch
from example_trainer.batch.prefetch import Upkeep
from example_trainer.batch.reader import ReadyBatch
from example_trainer.models import Decoder
from example_trainer.training.optimizer import MasterAdamW


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


class CheckpointStore(Protocol):
    """Where what was learned is kept: checkpoints.Checkpoints, or nowhere."""

    last: int | None
    """The step of the newest one."""

    @property
    def writing(self) -> bool:
        """Whether this rank is still busy with it."""

    def begin(
        self,
        model: Decoder,
        optimizer: MasterAdamW,
        config: dict[str, Any],
        batch: TrainedBatch | None = None,
        unacknowledged: Sequence[TrainedBatch] = (),
    ) -> Any:
        """Start to write the checkpoint of the present step."""

    def save_weights(
        self,
        model: Decoder,
        optimizer: MasterAdamW,
        config: dict[str, Any],
        batch: TrainedBatch | None = None,
        unacknowledged: Sequence[TrainedBatch] = (),
    ) -> Any:
        """Write the weights of the present step, and return when they are on the disk."""

    def written(self) -> bool:
        """Whether the one that was begun last is complete."""

    def wait(self) -> None:
        """Return when it is."""

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
