"""Which batches are left out because they cannot be trained on, and how many of them in a row are too many."""

from __future__ import annotations

import logging
from collections import Counter

from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError, NonFiniteError

logger = logging.getLogger(__name__)


class SkippedBatches:
    """Counts the batches since the last step that were left out, by reason: a gradient that is not finite, or anything else."""

    def __init__(self, config: TrainerConfig) -> None:
        self._limits = {True: config.skip_nonfinite, False: config.max_skipped_batches}
        self._counts: Counter[bool] = Counter()

    def skip(self, error: BatchError) -> None:
        """Leave a batch out.

        Raises:
            BatchError: `error`, if there have been too many in a row; the batch is then not to be acknowledged.
        """
        kind = isinstance(error, NonFiniteError)
        flag, limit = ("--skip-nonfinite" if kind else "--max-skipped-batches"), self._limits[kind]
        if self._counts[kind] >= limit:
            if not limit:
                raise error
            raise type(error)(f"{limit + 1} batches in a row could not be trained on ({flag} {limit}); the last: {error}")
        self._counts[kind] += 1
        logger.warning("Skipping a batch (%d of %d in a row, %s): %s", self._counts[kind], limit, flag, error)

    def stepped(self) -> int:
        """A step was taken: how many batches were left out before it. Counting begins anew."""
        skipped = self._counts.total()
        self._counts.clear()
        return skipped
