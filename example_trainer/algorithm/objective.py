"""A bin's part in the loss of its batch: policy loss, corrections, divergences, entropy. Pure
functions, all in float32.

    loss = Σ_t w_t ( c_t L_t + [kl_in loss] β k3_t + [distill_in loss] δ ½ (logπ_t - logπ_T,t)² ) - η Σ_t w_t H_t

    L_t     the loss of --loss, of the ratio π/π_old and the advantages A_t
    w_t     what the token counts in its batch (token_weights); the batch's denominator is that of all its tokens, corrected,
            left out or not
    c_t     the correction's weight: of the policy loss alone
    k3_t    π_ref/π - log(π_ref/π) - 1, whose mean is KL(π ‖ π_ref)                       DeepSeekMath, arXiv:2402.03300, eq. 4
    H_t     the entropy of π where it chose the token

    [kl_in reward]        A_t -= β Σ_{s ≥ t} (logπ_old,s - logπ_ref,s)    within the sequence; no gradient
    [distill_in advantage] A_t -= δ (logπ_old,t - logπ_T,t)               no gradient; 0 without a teacher's logprob

π_old is the policy that c_t brings the samples' expectation to, so that all three estimate under
the same one:

    correction                            π_old              c_t is of
    none                                  the sampler        (1)
    any, --correction-ratio proximal      π_proximal         π_proximal / sampler
    truncate, --correction-ratio now      π, no gradient     π / sampler: the ratio must not stand in c_t and L_t both
    mask, --correction-ratio now          the sampler        π / sampler, which only chooses

Where the sampler's logprob is needed and unknown it is the present policy's: the ratio is 1 there,
and the gradient the plain policy gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from example_trainer.algorithm.advantages import KLPlace
from example_trainer.algorithm.losses import (
    MAX_LOG_RATIO,
    Loss,
    LossInputs,
    LossSettings,
    clamped_log_ratio,
    count_nonfinite,
    k3,
    sequence_mean,
    token_losses,
)
from example_trainer.errors import BatchError

# Figures of a step's passes: sums on the device, one row of numbers at the end.
#
# All is summed in float64, and nothing is read on the host before `StepFigures.row`, so that no
# pass waits for figures of the one before. Everything that is kept is a sum over tokens. So it does
# not matter which bin or rank a token was in. One sum over the ranks makes the figures of the whole
# batch. Percentiles and the largest ratio come from a histogram, whose counts are sums.
#
# The effective sample size is that of L. Kish, "Survey Sampling" (1965), for given weights.

AGES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16)
"""The least age of each class for which the KL is reported, in weight versions; the last class has
no end."""
PERCENTILES = (1, 50, 95, 99)
"""Shown percentiles of the ratio trainer ÷ sampler."""

_FINEST = 1e-4
"""Log ratios well below this are counted in even steps, larger ones in steps that grow with
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
    """Results of a pass over a bin, all of them detached. n counts the bin's trained tokens.

    Attributes:
        logprobs: [n] float32, under the present weights.
        rollout_logprobs: [n] float32, under the weights and by the arithmetic that sampled; NaN
            where unknown.
        versions: [n] int64, the weight version that each was sampled under, negative where unknown.
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
            `logprobs`. None if they were not computed, as in later updates that do not need them:
            nothing of these counts as drift.
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
    """Sums of the outcomes of a batch's bins, and the figures that `row` makes of them.

    Means are over the trained tokens of all passes. If a value is known only of some tokens, its
    figures are over these tokens; they are None if it is known of no token.

    loss                    what the gradient is of
    kl                      KL(rollout policy ‖ present policy) by k3, in nats
    reference_kl            KL(present policy ‖ reference) by k3, in nats; 0 without a reference
    teacher_kl              divergence from the teacher, in nats
    entropy                 of the present policy where it chose the tokens, in nats
    clip_fraction           share of the tokens whose gradient is stopped by clipping
    clip_fraction_low, _high    the part whose ratio fell, or rose
    missing_rollout_logprobs    share of the tokens that came without a rollout logprob
    drift_share             share of the batch's tokens that ratio_…, ess, kl_age_…, mismatch_kl and
                            perplexity_… count. These have a rollout logprob, in minibatches whose
                            logprobs at the batch's first weights were computed
    ratio_mean, ratio_max, ratio_p01, …    trainer ÷ sampler, at the batch's first weights. The mean is
                            exact. The largest and the percentiles (nearest rank) are values of a class:
                            off by at most 0.5 % of their logarithm and 5e-7. A ratio of 1 is 1
    ess                     (Σ r)² / (n Σ r²): as many equally weighted tokens, as a share of the n
    correction_weight       mean of the correction's weights, 0 for what is left out
    correction_ess          as ess, for those weights
    correction_masked, correction_masked_sequences    share of the tokens that are left out, and of the
                            sequences without a remaining token
    correction_bounded      share of the tokens whose weight is the bound
    kl_age_0, …             KL(rollout policy ‖ the batch's first weights) by how many weight versions
                            earlier the token was sampled. Several ages are in kl_age_8_to_15 and in
                            kl_age_16_up; kl_age_unknown is of tokens without a version
    mismatch_kl             kl_age_0: how far sampler and trainer differ at the same weights
    perplexity_rollout, perplexity_trainer    exp(- mean logprob) of the sampled tokens under the
                            sampler, and under the batch's first weights

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
        began, drifted = logprobs, torch.zeros_like(known)
        if outcome.proximal_logprobs is not None:
            began, drifted = outcome.proximal_logprobs.double(), known
        # The two perplexities come from one sum of the sampler's logprobs and one of the
        # differences, not from a sum each. So differences that are all 0 make them equal to the
        # bit, in any order of blocks and ranks.
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
        # A value that is not finite has no class, and a place outside of the histogram would end a
        # CUDA process; the step is refused.
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
        """Return the figures of the batch. Wait for the device, once. Collective.

        Args:
            total: adds a float64 vector up over the ranks; may change it.
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
    """The largest ratio and PERCENTILES of the counted ratios, each the middle of its class."""
    ranks_at = [(f"ratio_p{percent:02d}", percent) for percent in PERCENTILES] + [
        ("ratio_max", 100)
    ]
    ratios: dict[str, float | None] = dict.fromkeys(name for name, _ in ranks_at)
    count, seen = sum(histogram), 0.0
    for place, tokens in enumerate(histogram):
        seen += tokens
        while ranks_at and tokens and 100 * seen >= ranks_at[0][1] * count:
            ratios[ranks_at.pop(0)[0]] = math.exp(
                _FINEST * math.sinh((place - _LAST_CLASS) * _STEP)
            )
    return ratios


# Weights that make up for a sampler that is not the trainer: other kernels, other precision, or
# older weights.
#
# With π the policy of the trainer and μ the sampling policy, by the rollouts' logprobs, per token
#
#     r_t = π(y_t) / μ(y_t) = exp(logπ_t - logμ_t)
#
# is what E_μ[r f] = E_π[f] needs. Its variance has no bound, so it is truncated, or what lies outside
# of a band is left out:
#
#     token_truncate       c_t = min(r_t, high)                       truncated importance sampling (Ionides, 2008),
#                                                                     per token as in IMPALA (arXiv:1802.01561, section 4)
#     token_mask           c_t = 1 if low ≤ r_t ≤ high else 0
#     sequence_truncate    c_t = min(r̄, high)
#     sequence_mask        c_t = 1 if low ≤ r̄ ≤ high else 0
#
#     r̄ = exp(1/n Σ_t (logπ_t - logμ_t))                              over the n tokens of the sequence whose logμ is known
#
# r̄ is the geometric mean, the sequence ratio of GSPO (Zheng et al., arXiv:2507.18071, equation 7).
# The product Π_t r_t would be without bias before it is truncated, but its logarithm grows with the
# length. Almost every product of a long answer lies at a bound, or at 0. The mean means the same
# for every length, and so do its bounds.
#
# π may be the policy that the batch began with ("proximal"). Then c makes up for the sampler alone.
# The loss's own ratio π_now/π_proximal makes up for the updates of the batch. This is decoupled PPO
# (Hilton et al., arXiv:2110.00641; AReaL: Fu et al., arXiv:2505.24298, section 5). Or it is the
# present one ("now"), and c makes up for both.
#
# In the dtype of the logprobs, which is float32 in training; nothing here has a gradient.

Correction = Literal["none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"]
RatioTo = Literal["proximal", "now"]


@dataclass(frozen=True)
class CorrectionSettings:
    """Settings of the correction for the sampler.

    Attributes:
        kind: see above.
        low, high: of the ratio.
        ratio: which policy π is.
        sequence_kl_limit: sequences whose KL(μ ‖ π), the mean of k3 over their known tokens in
            nats, is larger are left out; None for none. With any kind, "none" included.
    """

    kind: Correction = "token_truncate"
    low: float = 0.5
    high: float = 2.0
    ratio: RatioTo = "proximal"
    sequence_kl_limit: float | None = None

    @property
    def active(self) -> bool:
        """Return whether rollouts' logprobs are compared with anything."""
        return self.kind != "none" or self.sequence_kl_limit is not None

    @property
    def needs_proximal(self) -> bool:
        """Return whether the logprobs under the weights that the batch began with are needed."""
        return self.active and self.ratio == "proximal"

    @property
    def corrects_present(self) -> bool:
        """Return whether the weights hold the ratio of the present policy to the sampler already,
        so that the loss must not.
        """
        return self.ratio == "now" and self.kind in ("token_truncate", "sequence_truncate")


@dataclass(frozen=True)
class CorrectionWeights:
    """Factors of each token's policy loss.

    Attributes:
        weights: [n] float32, at least 0 and at most `high`.
        masked: [n] bool, left out: the weight is 0.
        bounded: [n] bool, the weight is `high` instead of the ratio.
    """

    weights: Tensor
    masked: Tensor
    bounded: Tensor

    @classmethod
    def of_one(cls, logprobs: Tensor) -> CorrectionWeights:
        """1 for each of [n] tokens."""
        nowhere = torch.zeros_like(logprobs, dtype=torch.bool)
        return cls(torch.ones_like(logprobs), nowhere, nowhere)


@torch.no_grad()
def correction_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequence: Tensor,
    sequences: int,
    settings: CorrectionSettings,
) -> CorrectionWeights:
    """The weights c of a bin's tokens.

    They are exactly 1 where the logprobs are equal, bit for bit; and depend on a token's own
    sequence alone.

    Args:
        logprobs: [n] logπ.
        rollout_logprobs: [n] logμ, NaN where unknown. Such a token counts as one of ratio 1. By its
            own ratio it has the weight 1, by its sequence's ratio the weight of its sequence. A
            sequence without a known token has the weight 1.
        sequence: [n] int64, ascending: which sequence each token is of.
        sequences: how many there are.
        settings: what is done.
    """
    one = CorrectionWeights.of_one(logprobs)
    if not settings.active:
        return one
    weights, masked, bounded = one.weights, one.masked, one.bounded
    unknown = rollout_logprobs.isnan()
    log_ratio = clamped_log_ratio(logprobs, rollout_logprobs).masked_fill(unknown, 0.0)

    def known_mean(values: Tensor) -> Tensor:
        known_share = sequence_mean((~unknown).to(log_ratio.dtype), sequence, sequences)
        return torch.where(
            known_share > 0, sequence_mean(values, sequence, sequences) / known_share, 0.0
        )

    ratio = (known_mean(log_ratio) if settings.kind.startswith("sequence") else log_ratio).exp()
    if settings.kind.endswith("truncate"):
        weights, bounded = ratio.clamp(max=settings.high), ratio > settings.high
    elif settings.kind.endswith("mask"):
        masked = (ratio < settings.low) | (ratio > settings.high)
    if settings.sequence_kl_limit is not None:
        masked = masked | (known_mean(k3(log_ratio)) > settings.sequence_kl_limit)
    return CorrectionWeights(weights.masked_fill(masked, 0.0), masked, bounded)


# On-policy distillation: the student samples, a teacher scores what was sampled, and their reverse
# KL is made smaller.
#
# Sources: the reverse KL on the student's own samples is that of Agarwal et al., "On-Policy
# Distillation of Language Models" (arXiv:2306.13649). It is also that of MiniLLM (Gu et al.,
# arXiv:2306.08543). The term k2 is the second estimator of J. Schulman's note "Approximating KL
# Divergence" (2020, http://joschu.net/blog/kl-approx.html).
#
# At a position whose prefix is held fixed, with π the student, T the teacher, and r = log π - log T:
#
#     KL(π‖T) = E_{y~π}[ r(y) ]
#     ∇KL     = E_{y~π}[ r ∇log π ] + E_{y~π}[ ∇log π ] = E_{y~π}[ r ∇log π ]        since Σ_y ∇π(y) = ∇1 = 0
#
# Both forms below have this gradient in expectation over samples of π. That of the advantage, -coef ·
# r without gradient, is the policy gradient with r as a cost: -A ∇log π = coef · r ∇log π. That of
# the loss, coef · r²/2 (k2), is coef · r ∇r, the same; its value does not estimate the KL. The
# advantage goes through the loss that was chosen, with its clipping and correction weights; the loss
# is added beside it. Neither counts what a token does to the KL of those after it.
#
# A token without a teacher's logprob (NaN) counts as if the teacher agreed: r = 0.

MAX_LOGPROB = 1e6
"""Teacher's logprobs are clamped to ± this where a loss grows with them, so that one absurd token
gives no infinity."""


def distillation_advantage(old_logprobs: Tensor, teacher_logprobs: Tensor, coef: float) -> Tensor:
    """Return the term that distillation adds to a token's advantage: -coef · (log π_old - log T),
    the log ratio within ± MAX_LOG_RATIO.

    Args:
        old_logprobs: [n] float32 under the policy that the loss takes its ratio to.
        teacher_logprobs: [n] float32, NaN without the teacher's logprob.
        coef: `--distill-coef`.

    Returns:
        [n] float32, without gradient.
    """
    return -coef * _log_ratio(old_logprobs.detach(), teacher_logprobs)


def distillation_loss(logprobs: Tensor, teacher_logprobs: Tensor, coef: float) -> Tensor:
    """coef · (log π - log T)² / 2 of each token. Beyond ± MAX_LOG_RATIO it grows linearly, with the
    gradient of the limit.

    Args:
        logprobs: [n] float32 of the sampled tokens under the present policy, with gradient.
        teacher_logprobs: [n] float32, NaN without the teacher's logprob.
        coef: `--distill-coef`.

    Returns:
        [n] float32, with gradient.
    """
    known = torch.isfinite(teacher_logprobs)
    # Not `where` on the result alone: the gradient of the NaN would come through it as NaN.
    ratio = logprobs - torch.where(
        known, teacher_logprobs.clamp(-MAX_LOGPROB, MAX_LOGPROB), logprobs.detach()
    )
    limited = ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return coef * limited * (ratio - limited / 2)


def teacher_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """k3 estimate of KL(student ‖ teacher), in nats, summed over the tokens that the teacher
    scored.

    Args:
        logprobs: [n] float32 of the sampled tokens under the student.
        teacher_logprobs: [n] float32, NaN without the teacher's logprob.

    Returns:
        Scalar float32, without gradient. Divide it by the number of tokens that were scored.
    """
    return k3(-_log_ratio(logprobs.detach(), teacher_logprobs)).sum()


def untaught_share(taught: int, tokens: int) -> float:
    """The share of a batch's trained tokens for which no teacher's logprob came along.

    Args:
        taught: trained tokens that have one, of the whole batch.
        tokens: trained tokens of the whole batch.

    Raises:
        BatchError: not one of them has one.
    """
    if tokens > 0 and taught == 0:
        raise BatchError(
            f"--distill-coef is above 0, but none of the {tokens} trained tokens of this batch "
            "has a teacher's logprob (distill_logprobs). Start the environments with "
            "--env.teacher_url, or leave --distill-coef out"
        )
    return 1.0 - taught / max(tokens, 1)


def _log_ratio(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """log π - log T within ± MAX_LOG_RATIO, 0 where either is unknown."""
    return torch.nan_to_num(logprobs - teacher_logprobs, nan=0.0).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )


@dataclass(frozen=True)
class Objective:
    """The function to minimise: the options, resolved, with the loss itself.

    Attributes:
        name: value of --loss, for errors.
        loss: the function.
        clip: its bounds.
        correction: see corrections.
        kl_coef, kl_in: β, and where its divergence goes.
        entropy_coef: η.
        distill_coef, distill_in: δ, and where its divergence goes.
    """

    name: str
    loss: Loss
    clip: LossSettings
    correction: CorrectionSettings
    kl_coef: float = 0.0
    kl_in: KLPlace = "loss"
    entropy_coef: float = 0.0
    distill_coef: float = 0.0
    distill_in: Literal["advantage", "loss"] = "advantage"

    def ratio_is_one(self, several_updates: bool) -> bool:
        """Return whether π_old is the present policy wherever the loss is taken, so that bounds of
        their ratio never act.

        Args:
            several_updates: whether a batch may be for more than one.
        """
        correction = self.correction
        return correction.corrects_present or (
            not several_updates and correction.kind != "none" and correction.needs_proximal
        )


@dataclass(frozen=True)
class ObjectiveInputs:
    """The trained tokens of a bin. n counts them, sequence after sequence.

    Attributes:
        logprobs: [n] float32, with gradient: under the present weights.
        entropy: [n] float32, with gradient where the objective has a weight for it.
        proximal_logprobs: [n] float32, under the weights that the batch began with. None if they
            were not computed, which is an error only if the objective needs them. In the first
            update they are `logprobs` without their gradient.
        rollout_logprobs: [n] float32, when they were sampled; NaN where unknown.
        reference_logprobs: [n] float32; None without a reference.
        teacher_logprobs: [n] float32, NaN where there are none.
        advantages, weights: [n] float32; what each token counts.
        versions: [n] int64, that each was sampled under; negative if unknown.
        sequence: [n] int64, ascending: which sequence of the bin each token is of.
        sequences: how many there are; each has a token.
    """

    logprobs: Tensor
    entropy: Tensor
    proximal_logprobs: Tensor | None
    rollout_logprobs: Tensor
    reference_logprobs: Tensor | None
    teacher_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    versions: Tensor
    sequence: Tensor
    sequences: int


@dataclass(frozen=True)
class BinLoss:
    """A bin's part in the loss.

    Attributes:
        loss: scalar float32, with gradient.
        outcome: what its figures are made of.
        not_finite: scalar int64, tokens whose policy loss is not finite.
    """

    loss: Tensor
    outcome: BinOutcome
    not_finite: Tensor


def bin_loss(inputs: ObjectiveInputs, objective: Objective) -> BinLoss:
    """The loss of a bin.

    Raises:
        ConfigError: see token_losses.
        ValueError: the objective needs logprobs that are not among the inputs.
    """
    present, correction = inputs.logprobs.detach(), objective.correction
    policy = needed(inputs.proximal_logprobs, "proximal") if correction.needs_proximal else present
    corrected = correction_weights(
        policy, inputs.rollout_logprobs, inputs.sequence, inputs.sequences, correction
    )
    old = old_logprobs(inputs, correction)
    with torch.no_grad():
        advantages = shaped_advantages(inputs, objective, old)
    loss_inputs = LossInputs(inputs.logprobs, old, advantages, inputs.sequence, inputs.sequences)
    losses = token_losses(objective.name, objective.loss, loss_inputs, objective.clip)
    per_token = losses.losses * corrected.weights if correction.active else losses.losses
    reference_kl = taught_kl = taught = torch.zeros((), device=present.device)
    if objective.kl_coef:
        divergence = k3(
            clamped_log_ratio(needed(inputs.reference_logprobs, "reference"), inputs.logprobs)
        )
        reference_kl = divergence.detach().sum()
        if objective.kl_in == "loss":
            per_token = per_token + objective.kl_coef * divergence
    if objective.distill_coef:
        taught_kl, taught = (
            teacher_kl(present, inputs.teacher_logprobs),
            inputs.teacher_logprobs.isfinite().sum(),
        )
        if objective.distill_in == "loss":
            per_token = per_token + distillation_loss(
                inputs.logprobs, inputs.teacher_logprobs, objective.distill_coef
            )
    loss = (per_token * inputs.weights).sum()
    if objective.entropy_coef:
        loss = loss - objective.entropy_coef * (inputs.entropy * inputs.weights).sum()
    outcome = BinOutcome(
        logprobs=present,
        rollout_logprobs=inputs.rollout_logprobs,
        versions=inputs.versions,
        entropy=inputs.entropy.detach(),
        weights=corrected.weights,
        masked=corrected.masked,
        bounded=corrected.bounded,
        # A token that is left out has no gradient to stop.
        clipped_low=losses.clipped_low & ~corrected.masked,
        clipped_high=losses.clipped_high & ~corrected.masked,
        sequence=inputs.sequence,
        sequences=inputs.sequences,
        loss=loss.detach(),
        reference_kl=reference_kl,
        teacher_kl=taught_kl,
        teacher_tokens=taught,
        proximal_logprobs=inputs.proximal_logprobs,
    )
    return BinLoss(loss, outcome, count_nonfinite(losses.losses.detach()))


def old_logprobs(inputs: ObjectiveInputs, correction: CorrectionSettings) -> Tensor:
    """[n] logπ_old, without gradient; see the table above."""
    present = inputs.logprobs.detach()
    if correction.corrects_present:
        return present
    if correction.kind != "none" and correction.needs_proximal:
        return needed(inputs.proximal_logprobs, "proximal")
    return torch.where(inputs.rollout_logprobs.isnan(), present, inputs.rollout_logprobs)


def shaped_advantages(inputs: ObjectiveInputs, objective: Objective, old: Tensor) -> Tensor:
    """[n] the advantages, less the divergences that are taken off them."""
    advantages = inputs.advantages
    if objective.kl_coef and objective.kl_in == "reward":
        reference = needed(inputs.reference_logprobs, "reference")
        advantages = advantages - objective.kl_coef * suffix_sums(
            clamped_log_ratio(old, reference), inputs.sequence
        )
    if objective.distill_coef and objective.distill_in == "advantage":
        advantages = advantages + distillation_advantage(
            old, inputs.teacher_logprobs, objective.distill_coef
        )
    return advantages


def suffix_sums(values: Tensor, sequence: Tensor) -> Tensor:
    """For each token the sum of its value and of those behind it in its sequence: Σ_{s ≥ t} x_s.

    Added elementwise, at distances that double (Hillis and Steele, 1986). A scan of a whole tensor
    has no fixed order on a GPU. Here a token's sum is made of the same pairs whatever its sequence
    is packed with.

    Args:
        values: [n].
        sequence: [n] int64, ascending: which sequence each is of.
    """
    sums, distance = values, 1
    while distance < len(values):
        same = sequence[distance:] == sequence[:-distance]
        sums = sums + pad(torch.where(same, sums[distance:], 0.0), (0, distance))
        distance *= 2
    return sums


def needed(logprobs: Tensor | None, which: str) -> Tensor:
    """They are there, or nothing can be worked out."""
    if logprobs is None:
        raise ValueError(f"the objective needs {which} logprobs, and there are none")
    return logprobs
