"""From the groups of a batch to its bins: parsing, what had to be left out said aloud, packing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.utils.lives import Life
from example_trainer.batch.bins import PackedBin
from example_trainer.batch.figures import BatchFigures, figures_of
from example_trainer.batch.groups import Batch, parse_batch
from example_trainer.batch.packing import pack_batch
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError

logger = logging.getLogger(__name__)

CPU_TOKENS_PER_MICROBATCH = 4096
"""Without a GPU whose memory decides: enough for products to be large, few enough for a laptop's memory."""


@dataclass(frozen=True)
class PackedBatch:
    """A batch in bins, on the host.

    Attributes:
        minibatches: of each, the bins of each data-parallel rank.
    """

    batch: Batch
    minibatches: list[list[list[PackedBin]]]
    lives: Sequence[Life]

    def figures(self, version: int) -> BatchFigures:
        """Its figures when it is trained on at `version`."""
        return figures_of(self.batch, self.minibatches, version, self.lives)


@dataclass(frozen=True)
class BatchReader:
    """Reads the batches of a run.

    Attributes:
        config: how long sequences may be, how advantages and weights are made, whether beginnings are shared.
        vocab_size: token ids lie below it.
        tokens_per_bin: see pack_batch.
        data_ranks: ranks that work on bins of their own. Ranks that split each layer between them all work on the same ones,
            and count as one.
        lives: of the trainer's run; see ages.
    """

    config: TrainerConfig
    vocab_size: int
    tokens_per_bin: int
    data_ranks: int = 1
    lives: Sequence[Life] = ()

    def read(self, groups: Sequence[Mapping[str, Any]], version: int) -> PackedBatch:
        """Parse and pack a batch. Says what it had to leave out or cut.

        Args:
            groups: as `/batch` returns them.
            version: the highest that the trainer can have when it trains on the batch.

        Raises:
            BatchError: nothing in the batch can be trained on.
        """
        config = self.config
        batch = parse_batch(groups, config.seq_len, self.vocab_size, config.method.advantage_std, version, self.lives)
        for problem in batch.invalid:
            logger.warning("Left out of the batch: %s", problem)
        if batch.truncated:
            logger.warning("%d sequences were longer than --seq-len %d and were cut", batch.truncated, config.seq_len)
        if batch.ignored_overrides:
            logger.warning("Overrides that this trainer does not know: %s", ", ".join(sorted(batch.ignored_overrides)))
        if batch.unusable_spans:
            logger.warning(
                "%d sequences do not say which weights sampled which token, and count as sampled by their oldest; first: %s",
                len(batch.unusable_spans),
                batch.unusable_spans[0],
            )
        if not batch.trained_tokens:
            reason = batch.invalid[0] if batch.invalid else "every token is masked with -100"
            raise BatchError(
                f"the batch from {config.atropos_url} holds nothing to train on: {reason}; look at the environment"
            )
        minibatches = pack_batch(
            batch,
            tokens_per_bin=self.tokens_per_bin,
            ranks=self.data_ranks,
            normalisation=config.method.loss_normalisation,
            max_tokens=config.seq_len,
            share_prefixes=config.shares_prefixes,
            minibatches=config.minibatches,
            temperature=config.temperature,
        )
        return PackedBatch(batch, minibatches, self.lives)
