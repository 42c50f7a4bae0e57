"""The report of a trainer that ends with a batch in hand: whether training on the batch is the
cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from example_trainer.batch.client import TrainedBatch
from example_trainer.deterministic.parity import ParityError
from example_trainer.errors import (
    BatchError,
    ConfigError,
    RankError,
    RolloutServiceError,
    TrainerError,
)
from example_trainer.training.batch_source import BatchSource

ERROR_SECONDS, SIGNAL_SECONDS = 10.0, 2.0
"""How long the rollout service may be away for the report."""


class BatchFailures:
    """Remembers which error came from reading a batch or from training on it, and reports how the
    run ends.

    Args:
        batches: whose last batch is reported.
    """

    def __init__(self, batches: BatchSource) -> None:
        self._batches = batches
        self._cause: Exception | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note an error of this block as one of the batch."""
        try:
            yield
        except Exception as error:
            self._cause = error
            raise

    def report(
        self,
        error: BaseException,
        trained: TrainedBatch | None,
        figures: dict[str, Any] | None = None,
    ) -> None:
        """Report the end of the run to the rollout service. Not collective.

        A batch that was the cause is counted, and set aside if it ends trainers again and again.
        Where the cause is unclear (an error of another rank, or of a loss function of one's own),
        nothing is reported. The service then counts the end like a kill.

        Args:
            error: that ends the run.
            trained: the last batch in the weights.
            figures: computed for the tokens of the batch.
        """
        if isinstance(error, RolloutServiceError):
            return
        in_hand = self._batches.in_hand
        learned = in_hand is not None and in_hand == trained
        of_batch = isinstance(error, BatchError) or (error is self._cause and not learned)
        if of_batch and isinstance(error, RankError | ConfigError):
            return
        of_batch = of_batch and (
            isinstance(error, BatchError | ParityError) or not isinstance(error, TrainerError)
        )
        text, seconds = None, SIGNAL_SECONDS
        if of_batch and not learned:
            text = f"{type(error).__name__}: {error}"
        if isinstance(error, Exception):
            seconds = ERROR_SECONDS
        self._batches.last_report(figures, text, seconds)
