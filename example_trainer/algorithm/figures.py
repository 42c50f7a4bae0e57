"""What a step's passes tell of themselves: sums on the device, one row of numbers at the end.

All is summed in float64, and nothing is read on the host before `StepFigures.row`, so that no pass
waits for figures of the one before. Everything that is kept is a sum over tokens. So it does not
matter which bin or rank a token was in, and one sum over the ranks makes the figures of the whole
batch: percentiles and the largest ratio come from a histogram, whose counts are sums.

The effective sample size is that of L. Kish, "Survey Sampling" (1965), for given weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from example_trainer.algorithm.losses import MAX_LOG_RATIO, clamped_log_ratio, k3

AGES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16)
"""The least age of each class in which the KL is told apart, in weight versions; the last class has
no end."""
PERCENTILES = (1, 50, 95, 99)
"""Of the ratio trainer ÷ sampler."""

_FINEST = 1e-4
"""Log ratios well below this are told apart in even steps, those above in steps that grow with
them."""
_STEP = 0.0099  # a class ends e^(_STEP / 2) - 1 from its middle: just below 0.5 %
_LARGEST_EXPONENT = 700.0
_LAST_CLASS = math.ceil(math.asinh(MAX_LOG_RATIO / _FINEST) / _STEP)

_SUMS = (
    "tokens", "loss", "kl", "reference_kl", "entropy", "clipped_low", "clipped_high", "known", "rollout_logprobs",
    "drifted", "log_ratio", "ratio", "ratio_squared", "weight", "weight_squared", "masked", "bounded", "sequences",
    "masked_sequences", "teacher_kl", "teacher_tokens", "expected",
)  # fmt: skip


@dataclass(frozen=True)
class BinOutcome:
    """What a pass over a bin came to, all of it detached. n counts the bin's trained tokens.

    Attributes:
        logprobs: [n] float32, under the present weights.
        rollout_logprobs: [n] float32, under the weights and by the arithmetic that sampled; NaN
            where unknown.
        versions: [n] int64, the weight version that each was sampled under, negative where nobody
            said.
        entropy: [n] float32, in nats.
        weights: [n] float32, what the correction multiplies each token's policy loss with.
        masked: [n] bool, tokens that the correction leaves out.
        bounded: [n] bool, tokens whose weight is the correction's bound instead of the ratio.
        clipped_low, clipped_high: [n] bool, tokens whose gradient the loss's clip stops, because
            the ratio fell or rose.
        sequence: [n] int64, which of the bin's sequences each is of.
        sequences: how many there are.
        loss: scalar, of the bin's share in the batch's loss.
        reference_kl: scalar, sum over the tokens of k3 to the reference, in nats; 0 without one.
        teacher_kl: scalar, sum of the divergence from the teacher, in nats, over the tokens that
            have its logprob.
        teacher_tokens: scalar, how many these are; not given: none.
        proximal_logprobs: [n] float32, under the weights that the batch began with, by which drift
            is measured: ratios, KL by age, perplexities. In a batch's first update they are
            `logprobs`. None where nobody worked them out, as in later updates that do not need
            them: nothing of these counts as drift.
    """

    logprobs: Tensor
    rollout_logprobs: Tensor
    versions: Tensor
    entropy: Tensor
    weights: Tensor
    masked: Tensor
    bounded: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    sequence: Tensor
    sequences: int
    loss: Tensor
    reference_kl: Tensor
    teacher_kl: Tensor
    proximal_logprobs: Tensor | None
    teacher_tokens: Tensor | None = None


class StepFigures:
    """Adds up the outcomes of a batch's bins, and says what they come to.

    Args:
        device: of the outcomes.
        version: the weight version that the batch is trained on with; ages count from it.

    Example:
        figures = StepFigures(device, optimizer.steps)
        figures.expect(sum(len(bin.targets) for bin in bins))
        for bin in bins:
            ...
            figures.add(outcome)
        row = figures.row(model.shards.sum_figures)
    """

    def __init__(self, device: torch.device, version: int) -> None:
        self._version = version
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._kl_by_age = torch.zeros(
            len(AGES) + 1, dtype=torch.float64, device=device
        )  # the last: of unknown age
        self._tokens_by_age = torch.zeros_like(self._kl_by_age)
        self._histogram = torch.zeros(2 * _LAST_CLASS + 1, dtype=torch.float64, device=device)
        self._edges = _edges(device)

    def expect(self, tokens: int) -> None:
        """So many tokens of this rank's are in the batch."""
        self._sums[_SUMS.index("expected")] += tokens

    @torch.no_grad()
    def add(self, outcome: BinOutcome) -> None:
        """Count the outcome of one bin. Waits for nothing that the device still does."""
        logprobs, rollout = outcome.logprobs.double(), outcome.rollout_logprobs.double()
        known = ~rollout.isnan()
        began = (
            logprobs if outcome.proximal_logprobs is None else outcome.proximal_logprobs.double()
        )
        drifted = torch.zeros_like(known) if outcome.proximal_logprobs is None else known
        # The two perplexities come from one sum of the sampler's logprobs and one of the
        # differences, not from a sum each: differences that are all 0 make them equal to the bit,
        # in whatever order blocks and ranks are added.
        log_ratio = torch.where(drifted, began - rollout, 0.0)
        clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = torch.where(drifted, clamped.exp(), 0.0)
        weights = torch.where(outcome.masked, 0.0, outcome.weights.double())
        present = torch.where(known, clamped_log_ratio(logprobs, rollout), 0.0)
        kept = torch.zeros(outcome.sequences, dtype=torch.int64, device=logprobs.device)
        kept.scatter_add_(0, outcome.sequence, (~outcome.masked).long())
        zero = self._sums.new_zeros(())
        sums = {
            "tokens": torch.full_like(zero, logprobs.numel()),
            "loss": outcome.loss,
            "kl": k3(present).sum(),
            "reference_kl": outcome.reference_kl,
            "entropy": outcome.entropy.double().sum(),
            "clipped_low": outcome.clipped_low.sum(),
            "clipped_high": outcome.clipped_high.sum(),
            "known": known.sum(),
            "rollout_logprobs": torch.where(drifted, rollout, 0.0).sum(),
            "drifted": drifted.sum(),
            "log_ratio": log_ratio.sum(),
            "ratio": ratio.sum(),
            "ratio_squared": ratio.square().sum(),
            "weight": weights.sum(),
            "weight_squared": weights.square().sum(),
            "masked": outcome.masked.sum(),
            "bounded": (outcome.bounded & ~outcome.masked).sum(),
            "sequences": torch.full_like(zero, outcome.sequences),
            "masked_sequences": (kept == 0).sum(),
            "teacher_kl": outcome.teacher_kl,
            "teacher_tokens": zero if outcome.teacher_tokens is None else outcome.teacher_tokens,
            "expected": zero,
        }
        self._sums += torch.stack([sums[name].double() for name in _SUMS])
        self._add_by_age(k3(clamped), drifted, outcome.versions)
        # What is not finite has no class, and a place outside of the histogram would end a CUDA
        # process; the step is refused.
        place = (
            torch.nan_to_num(clamped).div(_FINEST).asinh() / _STEP
        ).round().long() + _LAST_CLASS
        self._histogram.scatter_add_(0, place, drifted.double())

    def _add_by_age(self, kl: Tensor, counted: Tensor, versions: Tensor) -> None:
        age = torch.bucketize(self._version - versions, self._edges, right=True)
        age = torch.where(versions < 0, len(AGES), age)
        # One row for each class: numbers that are added by index have no fixed order on a GPU.
        members = (age == torch.arange(len(AGES) + 1, device=age.device)[:, None]) & counted
        self._kl_by_age += torch.where(members, kl, 0.0).sum(dim=1)
        self._tokens_by_age += members.sum(dim=1)

    def row(self, total: Callable[[Tensor], Tensor]) -> dict[str, float | None]:
        """The figures of the batch; the device is waited for here, once. Collective.

        Args:
            total: adds a float64 vector up over the ranks; may change it.

        Returns:
            Means are over the trained tokens of all passes, those of what is only partly known over
            the tokens of which it is known; None where it is known of none.

            loss: what the gradient is of. kl: KL(rollout policy ‖ present policy) by k3, in nats.
            reference_kl: KL(present policy ‖ reference) by k3, in nats; 0 without a reference.
            teacher_kl: divergence from the teacher, in nats. entropy: of the present policy where
            it chose the tokens, in nats. clip_fraction, clip_fraction_low, clip_fraction_high:
            share of the tokens whose gradient is stopped by clipping, and
                those of them whose ratio fell or rose.
            missing_rollout_logprobs: share of the tokens that came without a rollout logprob.
            drift_share: share of the batch's tokens that ratio_…, ess, kl_age_…, mismatch_kl and
            perplexity_… are of: those
                with a rollout logprob, in minibatches whose logprobs at the batch's first weights
                were worked out.
            ratio_mean, ratio_max, ratio_p01, …: of trainer ÷ sampler, at the batch's first weights.
            The mean is exact. The
                largest and the percentiles (nearest rank) are those of a class: off by at most 0.5
                % of their logarithm and 5e-7; a ratio of 1 is 1.
            ess: (Σ r)² / (n Σ r²), the share of the n tokens that as many equally weighted ones
            would be worth. correction_weight, correction_ess: mean of the correction's weights, and
            the same share for them; what is left out
                weighs 0.
            correction_masked, correction_masked_sequences: share of the tokens that are left out,
            and of the sequences of which
                no token remains.
            correction_bounded: share of the tokens whose weight is the bound. kl_age_0, …:
            KL(rollout policy ‖ the batch's first weights), by how many weight versions earlier the
            token was
                sampled; kl_age_8_to_15 and kl_age_16_up are of several, kl_age_unknown of those for
                whom nobody said.
            mismatch_kl: that of age 0: what sampler and trainer make of the same weights.
            perplexity_rollout, perplexity_trainer: exp(- mean logprob) of the sampled tokens under
            the sampler, and under the
                batch's first weights.
        """
        joined = torch.cat((self._sums, self._kl_by_age, self._tokens_by_age, self._histogram))
        numbers = total(joined).tolist()
        sums = dict(zip(_SUMS, numbers, strict=False))
        ages = len(AGES) + 1
        kl_by_age, numbers = numbers[len(_SUMS) :][:ages], numbers[len(_SUMS) + ages :]
        tokens_by_age, histogram = numbers[:ages], numbers[ages:]
        tokens, drifted = sums["tokens"], sums["drifted"]
        by_age = dict(zip(_age_names(), map(_share, kl_by_age, tokens_by_age), strict=True))
        return {
            "loss": sums["loss"],
            "kl": _share(sums["kl"], sums["known"]),
            "reference_kl": _share(sums["reference_kl"], tokens),
            "teacher_kl": _share(sums["teacher_kl"], sums["teacher_tokens"]),
            "entropy": _share(sums["entropy"], tokens),
            "clip_fraction": _share(sums["clipped_low"] + sums["clipped_high"], tokens),
            "clip_fraction_low": _share(sums["clipped_low"], tokens),
            "clip_fraction_high": _share(sums["clipped_high"], tokens),
            "missing_rollout_logprobs": _share(tokens - sums["known"], tokens),
            "drift_share": _share(drifted, sums["expected"]),
            "ratio_mean": _share(sums["ratio"], drifted),
            **_percentiles(histogram),
            "ess": _share(sums["ratio"] ** 2, drifted * sums["ratio_squared"]),
            "correction_weight": _share(sums["weight"], tokens),
            "correction_ess": _share(sums["weight"] ** 2, tokens * sums["weight_squared"]),
            "correction_masked": _share(sums["masked"], tokens),
            "correction_masked_sequences": _share(sums["masked_sequences"], sums["sequences"]),
            "correction_bounded": _share(sums["bounded"], tokens),
            **by_age,
            "mismatch_kl": by_age["kl_age_0"],
            "perplexity_rollout": _perplexity(sums["rollout_logprobs"], drifted),
            "perplexity_trainer": _perplexity(
                sums["rollout_logprobs"] + sums["log_ratio"], drifted
            ),
        }


@functools.cache
def _edges(device: torch.device) -> Tensor:
    """Copied once for a device: a copy from the host's ordinary memory waits for all that a GPU was
    given before.
    """
    return torch.tensor(AGES[1:], device=device)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _perplexity(logprobs: float, tokens: float) -> float | None:
    """None too for one that is larger than any float."""
    mean = logprobs / tokens if tokens else -math.inf
    return math.exp(-mean) if mean > -_LARGEST_EXPONENT else None


def _age_names() -> list[str]:
    ranges = [(low, up - 1) for low, up in pairwise(AGES)]
    names = [f"kl_age_{low}" if low == high else f"kl_age_{low}_to_{high}" for low, high in ranges]
    return [*names, f"kl_age_{AGES[-1]}_up", "kl_age_unknown"]


def _percentiles(histogram: list[float]) -> dict[str, float | None]:
    """The largest ratio and PERCENTILES of those that are counted, each the middle of its class."""
    wanted = [(f"ratio_p{percent:02d}", percent) for percent in PERCENTILES] + [("ratio_max", 100)]
    found: dict[str, float | None] = dict.fromkeys(name for name, _ in wanted)
    count, seen = sum(histogram), 0.0
    for place, tokens in enumerate(histogram):
        seen += tokens
        while wanted and tokens and 100 * seen >= wanted[0][1] * count:
            found[wanted.pop(0)[0]] = math.exp(_FINEST * math.sinh((place - _LAST_CLASS) * _STEP))
    return found
