"""A batch in numbers: what stands of it in the trainer's log before anything is computed.

Pure: no I/O, no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atroposlib.wire import TrainerSession
from example_trainer.batch.bins import PackedBin
from example_trainer.batch.environment_names import safe_names
from example_trainer.batch.groups import Batch, TrainedSequence
from example_trainer.batch.lengths import LENGTH


@dataclass(frozen=True)
class BatchFigures:
    """A batch in numbers, as they stand in the trainer's log. Of several ranks, those of the whole
    batch.

    Attributes:
        reward_mean, reward_std: of the rollouts' scores, as the environments gave them.
        success_rate: share of solved items among the rollouts that have a success; None if none has
            one.
        tokens: trained ones, forwarded or not.
        sequences: rollouts.
        response_length_mean, response_length_p50, response_length_p95, response_length_max: sampled
            tokens of a rollout.
        truncated_share: of the rollouts that say why their sampling ended, those that ran into
            their limit; None if none says.
        sequences_too_long: how many were longer than the length limit, and so not trained on.
        zero_advantage_share: of the rollouts that are trained on, those whose advantages are all 0.
        groups_invalid: groups that were left out.
        age_mean, age_max: weight versions since the rollouts were begun; None if no environment
            says.
        uses_mean: batches in which a group of the batch had been trained on before; None if each is
            used once.
        forwarded_tokens: those of all bins.
        forwarded_targets: trained tokens of all bins: all of them, but for those of advantage 0
            where these are not forwarded.
        targets_with_logprobs: those of them that came with the logprob that they were sampled with.
        targets_with_reference: those of them that came with the logprob under the reference, where
            one is wanted.
        sequence_tokens: those of all rollouts in bins, what they share counted for each.
        attended_pairs: pairs of a forwarded token and one that it attends to.
        bins: forward and backward passes with work in them, over all ranks.
        rewards: mean score of each environment's rollouts, by a name that is safe as a key; none of
            an environment that the rollouts do not name.
        success_rates: success_rate of each environment, by the same names.
    """

    reward_mean: float
    reward_std: float
    tokens: int
    sequences: int
    response_length_mean: float
    response_length_p50: float
    response_length_p95: float
    response_length_max: int
    truncated_share: float | None
    sequences_too_long: int
    zero_advantage_share: float
    groups_invalid: int
    age_mean: float | None
    age_max: int | None
    forwarded_tokens: int
    forwarded_targets: int
    targets_with_logprobs: int
    targets_with_reference: int
    sequence_tokens: int
    attended_pairs: int
    bins: int
    rewards: dict[str, float] = field(default_factory=dict)
    uses_mean: float | None = None
    success_rate: float | None = None
    success_rates: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The figures by name; those of one environment as `reward/<its name>` and
        `success/<its name>`.
        """
        figures = dict(vars(self))
        rewards, successes = figures.pop("rewards"), figures.pop("success_rates")
        by_environment = {f"reward/{name}": value for name, value in rewards.items()}
        return (
            figures
            | by_environment
            | {f"success/{name}": value for name, value in successes.items()}
        )


def figures_of(
    batch: Batch,
    minibatches: Sequence[Sequence[Sequence[PackedBin]]],
    version: int,
    lives: Sequence[TrainerSession] = (),
    environments: Mapping[str, Any] | None = None,
    uses: Sequence[int] = (),
) -> BatchFigures:
    """The figures of a batch.

    Args:
        minibatches: its bins, by minibatch and rank.
        version: the trainer's when it trains on the batch.
        lives: of its run; see ages.
        environments: their names by id, as `/batch` says them.
        uses: how often each group was trained on before; empty where each is used once.
    """
    bins = [one for shares in minibatches for share in shares for one in share if not one.empty]
    forwarded = {(group, number) for one in bins for group, number in one.orders.tolist()}
    scores = np.array([sequence.score for sequence in batch.sequences])
    lengths = np.array([sequence.response_length for sequence in batch.sequences])
    reasons = [
        sequence.finish_reason for sequence in batch.sequences if sequence.finish_reason is not None
    ]
    trained = [sequence for sequence in batch.sequences if len(sequence.positions)]
    successes = [sequence.success for sequence in batch.sequences if sequence.success is not None]
    ages = batch.ages(version, lives)
    return BatchFigures(
        reward_mean=float(scores.mean()),
        reward_std=float(scores.std()),
        tokens=batch.trained_tokens,
        sequences=len(batch.sequences),
        response_length_mean=float(lengths.mean()),
        response_length_p50=float(np.percentile(lengths, 50)),
        response_length_p95=float(np.percentile(lengths, 95)),
        response_length_max=int(lengths.max()),
        truncated_share=_mean([reason == LENGTH for reason in reasons]),
        sequences_too_long=batch.too_long,
        zero_advantage_share=sum(not sequence["advantages"].any() for sequence in trained)
        / len(trained),
        groups_invalid=len(batch.invalid),
        age_mean=_mean(ages),
        age_max=max(ages, default=None),
        forwarded_tokens=sum(len(one.tokens) for one in bins),
        forwarded_targets=sum(len(one.targets) for one in bins),
        targets_with_logprobs=sum(int(one["rollout_logprobs"].isfinite().sum()) for one in bins),
        targets_with_reference=sum(int(one["reference_logprobs"].isfinite().sum()) for one in bins),
        sequence_tokens=sum(len(s.tokens) for s in batch.sequences if s.order in forwarded),
        attended_pairs=sum(one.packing().attended_pairs for one in bins),
        bins=len(bins),
        rewards=_means(batch, environments or {}, lambda sequence: sequence.score),
        uses_mean=_mean(uses),
        success_rate=_mean(successes),
        success_rates=_means(batch, environments or {}, lambda sequence: sequence.success),
    )


def _mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return float(np.mean(values))


def _means(
    batch: Batch, environments: Mapping[str, Any], figure: Callable[[TrainedSequence], float | None]
) -> dict[str, float]:
    """The mean of a figure over each environment's rollouts, without those for which it is None."""
    names = safe_names({s.env_id for s in batch.sequences if s.env_id is not None}, environments)
    found: dict[str, list[float]] = {}
    for sequence in batch.sequences:
        value = figure(sequence)
        if sequence.env_id is not None and value is not None:
            found.setdefault(names[sequence.env_id], []).append(float(value))
    return {name: float(np.mean(of_name)) for name, of_name in found.items()}
