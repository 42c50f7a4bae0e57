"""A batch in numbers: what stands of it in the trainer's log before anything is computed. Pure: no I/O, no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atroposlib.utils.lives import Life
from example_trainer.batch.bins import PackedBin
from example_trainer.batch.groups import Batch


@dataclass(frozen=True)
class BatchFigures:
    """A batch in numbers, as they stand in the trainer's log. Of several ranks, those of the whole batch.

    Attributes:
        reward_mean, reward_std: of the rollouts' scores.
        tokens: trained ones.
        sequences: rollouts.
        response_length_mean: trained tokens of a rollout.
        groups_invalid: groups that were left out.
        sequences_truncated: how many were cut to the length limit.
        age_mean, age_max: weight versions since the rollouts were begun; None if no environment says.
        forwarded_tokens: those of all bins.
        sequence_tokens: those of all rollouts that are trained on, what they share counted for each.
        attended_pairs: pairs of a forwarded token and one that it attends to.
        bins: forward and backward passes with work in them, over all ranks.
    """

    reward_mean: float
    reward_std: float
    tokens: int
    sequences: int
    response_length_mean: float
    groups_invalid: int
    sequences_truncated: int
    age_mean: float | None
    age_max: int | None
    forwarded_tokens: int
    sequence_tokens: int
    attended_pairs: int
    bins: int


def figures_of(
    batch: Batch, minibatches: Sequence[Sequence[Sequence[PackedBin]]], version: int, lives: Sequence[Life] = ()
) -> BatchFigures:
    """The figures of a batch.

    Args:
        minibatches: its bins, by minibatch and rank.
        version: the trainer's when it trains on the batch.
        lives: of its run; see ages.
    """
    bins = [one for shares in minibatches for share in shares for one in share if not one.empty]
    scores = np.array([sequence.score for sequence in batch.sequences])
    ages = batch.ages(version, lives)
    return BatchFigures(
        reward_mean=float(scores.mean()),
        reward_std=float(scores.std()),
        tokens=batch.trained_tokens,
        sequences=len(batch.sequences),
        response_length_mean=batch.trained_tokens / len(batch.sequences),
        groups_invalid=len(batch.invalid),
        sequences_truncated=batch.truncated,
        age_mean=float(np.mean(ages)) if ages else None,
        age_max=max(ages) if ages else None,
        forwarded_tokens=sum(len(one.tokens) for one in bins),
        sequence_tokens=sum(len(s.tokens) for s in batch.sequences if len(s.positions)),
        attended_pairs=sum(one.packing().attended_pairs for one in bins),
        bins=len(bins),
    )
