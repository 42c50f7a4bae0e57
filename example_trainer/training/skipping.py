"""How many batches in a row may fail before the run ends."""

from __future__ import annotations

import logging
from collections import Counter

from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError, NonFiniteError

logger = logging.getLogger(__name__)


class SkippedBatches:
    """Counts the batches in a row that were left out, or of which later updates were, by reason:
    what is not finite, or anything else. With several ranks each counts alike.

    Only a step that lost no update to a reason ends the row of that reason: a run whose second
    updates all fail is as ill as one whose first do, and must not go on for ever on a part of what
    it is given.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._limits = {
            True: ("--skip-nonfinite", config.skip_nonfinite),
            False: ("--max-skipped-batches", config.max_skipped_batches),
        }
        self._in_a_row: Counter[bool] = Counter()
        self._cut_short: set[bool] = set()
        self._left_out = 0

    def skip(self, error: BatchError) -> None:
        """Leave a batch out.

        Raises:
            BatchError: `error`, if there have been too many in a row; the batch is then not to be
                acknowledged.
        """
        logger.warning("Skipping a batch (%s): %s", self._count(error), error)
        self._left_out += 1

    def cut_short(self, error: BatchError, step: int, first: int, last: int) -> None:
        """Leave out updates of a batch that taught something in those before.

        Args:
            step: that the batch is for, counted from 1; first, last: of the updates, counted from
                1.

        Raises:
            BatchError: `error`, if there have been too many in a row; what the batch taught stays.
        """
        kept = type(error)(
            f"{error}; this was update {first} of {last} of its batch, and those before are kept"
        )
        told = self._count(kept)
        self._cut_short.add(isinstance(error, NonFiniteError))
        logger.warning(
            "Step %d: updates %d to %d of its batch are left out, what it learned in those before stays: %s (%s)",
            step, first, last, error, told,
        )  # fmt: skip

    def _count(self, error: BatchError) -> str:
        kind = isinstance(error, NonFiniteError)
        flag, limit = self._limits[kind]
        if self._in_a_row[kind] >= limit:
            if not limit:
                raise error
            raise type(error)(
                f"{limit + 1} batches in a row could not be trained on ({flag} {limit}); the last: {error}"
            )
        self._in_a_row[kind] += 1
        return f"{self._in_a_row[kind]} of {limit} in a row, {flag}"

    def stepped(self) -> int:
        """A step was taken: how many batches were left out before it. Counting begins anew."""
        for kind in self._limits.keys() - self._cut_short:
            del self._in_a_row[kind]
        self._cut_short.clear()
        skipped, self._left_out = self._left_out, 0
        return skipped
