"""The objective of a bin: equal to a loop over sequences and tokens, gradients too; with the
defaults GRPO's, to the bit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, cast

import pytest
import torch
from torch import Tensor

from example_trainer.algorithm.advantages import KLPlace
from example_trainer.algorithm.losses import LossInputs, LossSettings, grpo
from example_trainer.algorithm.objective import (
    Correction,
    CorrectionSettings,
    Objective,
    ObjectiveInputs,
    RatioTo,
    bin_loss,
    suffix_sums,
)
from example_trainer.errors import ConfigError

CLIP = LossSettings(clip_low=0.2, clip_high=0.3)
KINDS: tuple[Correction, ...] = (
    "none",
    "token_truncate",
    "sequence_truncate",
    "token_mask",
    "sequence_mask",
)
LENGTHS = (1, 4, 2, 5)


def made_up(seed: int = 0, dtype: torch.dtype = torch.float64) -> ObjectiveInputs:
    """Sequences of LENGTHS tokens, drifted by about a tenth; some rollout's and teacher's logprobs
    are unknown.
    """
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(count, generator=generator, dtype=dtype)

    proximal = -1.5 + noise(0.5)
    rollout, teacher = proximal + noise(0.25), proximal + noise(0.5)
    rollout[[2, 5, 6]] = torch.nan  # of the third sequence all
    teacher[[0, 3]] = torch.nan
    return ObjectiveInputs(
        logprobs=(proximal + noise(0.2)).requires_grad_(),
        entropy=noise(1.0).abs().requires_grad_(),
        proximal_logprobs=proximal,
        rollout_logprobs=rollout,
        reference_logprobs=proximal + noise(0.4),
        teacher_logprobs=teacher,
        advantages=noise(1.0),
        weights=noise(1.0).abs(),
        versions=torch.arange(count) % 3 - 1,
        sequence=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        sequences=len(LENGTHS),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["loss", "reward"])
@pytest.mark.parametrize("distill", ["advantage", "loss"])
@pytest.mark.parametrize("absurd", [3.4e38, -3.4e38])
def test_the_largest_logprobs_that_the_service_accepts_give_no_infinity(
    kind: Correction, place: KLPlace, distill: Literal["advantage", "loss"], absurd: float
) -> None:
    inputs = made_up(dtype=torch.float32)
    for logprobs in (inputs.rollout_logprobs, inputs.reference_logprobs, inputs.teacher_logprobs):
        assert logprobs is not None
        logprobs[[1, 4, 8]] = absurd
    objective = Objective(
        "grpo", grpo, CLIP, CorrectionSettings(kind), 0.1, place, 0.0, 0.5, distill
    )
    found = bin_loss(inputs, objective)
    found.loss.backward()
    assert found.not_finite == 0
    assert found.loss.isfinite()
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.isfinite().all()


def by_hand(inputs: ObjectiveInputs, o: Objective) -> Tensor:
    """The module's equations, one token at a time."""
    total, begin = torch.zeros((), dtype=torch.float64), 0
    assert inputs.proximal_logprobs is not None
    assert inputs.reference_logprobs is not None
    for length in LENGTHS:
        places, begin = range(begin, begin + length), begin + length
        now = [inputs.logprobs[t].item() for t in places]
        mu = [inputs.rollout_logprobs[t].item() for t in places]
        near = [inputs.proximal_logprobs[t].item() for t in places]
        ref = [inputs.reference_logprobs[t].item() for t in places]
        teacher = [inputs.teacher_logprobs[t].item() for t in places]
        policy = near if o.correction.ratio == "proximal" else now
        gaps = [0.0 if math.isnan(m) else p - m for p, m in zip(policy, mu, strict=True)]
        known = sum(not math.isnan(m) for m in mu)
        mean = sum(gaps) / known if known else 0.0
        divergence = sum(math.exp(gap) - 1 - gap for gap in gaps) / known if known else 0.0
        classic = [n if math.isnan(m) else m for n, m in zip(now, mu, strict=True)]
        old = classic
        if o.correction.kind != "none" and o.correction.ratio == "proximal":
            old = near
        elif o.correction.kind in ("token_truncate", "sequence_truncate"):
            old = now
        for i, t in enumerate(places):
            ratio = math.exp(mean if o.correction.kind.startswith("sequence") else gaps[i])
            c = {"none": 1.0, "truncate": min(ratio, o.correction.high)}.get(
                o.correction.kind.rpartition("_")[2]
            )
            if c is None:
                c = float(o.correction.low <= ratio <= o.correction.high)
            if (
                o.correction.sequence_kl_limit is not None
                and divergence > o.correction.sequence_kl_limit
            ):
                c = 0.0
            advantage = inputs.advantages[t].item()
            if o.kl_in == "reward":
                advantage -= o.kl_coef * sum(old[s] - ref[s] for s in range(i, length))
            taught = not math.isnan(teacher[i])
            if o.distill_in == "advantage" and taught:
                advantage -= o.distill_coef * (old[i] - teacher[i])
            rho = (inputs.logprobs[t] - old[i]).exp()
            term = -c * torch.minimum(rho * advantage, rho.clamp(0.8, 1.3) * advantage)
            if o.kl_in == "loss":
                gap = ref[i] - inputs.logprobs[t]
                term = term + o.kl_coef * (gap.exp() - 1 - gap)
            if o.distill_in == "loss" and taught:
                term = term + o.distill_coef * (inputs.logprobs[t] - teacher[i]) ** 2 / 2
            total = total + inputs.weights[t] * (term - o.entropy_coef * inputs.entropy[t])
    return total


def gradients(loss: Tensor, inputs: ObjectiveInputs) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros_like(tensor) if found is None else found
        for tensor, found in zip(
            (inputs.logprobs, inputs.entropy),
            torch.autograd.grad(loss, (inputs.logprobs, inputs.entropy), allow_unused=True),
            strict=True,
        )
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", ["proximal", "now"])
def test_value_and_gradient_are_those_of_a_loop_over_tokens(
    kind: Correction, ratio: RatioTo
) -> None:
    inputs, seen = made_up(), set()
    for limit in (None, 0.02):
        correction = CorrectionSettings(
            kind, low=0.8, high=1.2, ratio=ratio, sequence_kl_limit=limit
        )
        for kl_coef, kl_in in ((0.0, "loss"), (0.1, "loss"), (0.1, "reward")):
            for distill_coef, distill_in, entropy in (
                (0.0, "loss", 0.0),
                (0.2, "loss", 0.03),
                (0.2, "advantage", -0.03),
            ):
                where = cast("Literal['advantage', 'loss']", distill_in)
                objective = Objective(
                    "grpo",
                    grpo,
                    CLIP,
                    correction,
                    kl_coef,
                    cast("KLPlace", kl_in),
                    entropy,
                    distill_coef,
                    where,
                )
                ours, expected = bin_loss(inputs, objective).loss, by_hand(inputs, objective)
                torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
                for one, two in zip(
                    gradients(ours, inputs), gradients(expected, inputs), strict=True
                ):
                    torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
                seen.add(round(ours.item(), 12))
    assert len(seen) == 18, "each option changes something"


def test_what_is_told_of_a_bin() -> None:
    inputs = made_up()
    correction = CorrectionSettings("token_truncate", high=1.05, sequence_kl_limit=0.02)
    found = bin_loss(
        inputs,
        Objective("grpo", grpo, CLIP, correction, kl_coef=0.1, distill_coef=0.5, distill_in="loss"),
    )
    told = found.outcome
    assert not any(
        tensor.requires_grad for tensor in vars(told).values() if isinstance(tensor, Tensor)
    )
    assert torch.equal(told.loss, found.loss.detach())
    assert told.proximal_logprobs is inputs.proximal_logprobs
    assert inputs.reference_logprobs is not None
    gap = inputs.reference_logprobs - inputs.logprobs.detach()
    torch.testing.assert_close(told.reference_kl, (gap.exp() - 1 - gap).sum())
    taught = ~inputs.teacher_logprobs.isnan()
    gap = (inputs.teacher_logprobs - inputs.logprobs.detach())[taught]
    torch.testing.assert_close(told.teacher_kl, (gap.exp() - 1 - gap).sum())
    assert told.teacher_tokens == taught.sum() == sum(LENGTHS) - 2
    assert 0 < int(told.masked.sum()) < sum(LENGTHS)
    assert (told.weights[told.bounded & ~told.masked] == 1.05).all()
    assert found.not_finite == 0


@pytest.mark.parametrize("kind", KINDS)
def test_on_fresh_rollouts_every_correction_is_grpo_to_the_bit(kind: Correction) -> None:
    """Rollouts' logprobs equal the recomputed ones, as in exact synchronous training. The loss of
    DeepSeekMath's equation 3 written down plainly, in float32, has the same bits, and so has its
    gradient.
    """
    generator = torch.Generator().manual_seed(3)
    count = 2000
    logprobs = (-3 * torch.rand(count, generator=generator)).requires_grad_()
    advantages, weights = torch.randn(count, generator=generator), torch.full((count,), 1 / count)
    ratio = (logprobs - logprobs.detach()).exp()
    plain = (-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages) * weights).sum()
    (expected,) = torch.autograd.grad(plain, logprobs)
    now = logprobs.detach()
    inputs = ObjectiveInputs(
        logprobs, torch.zeros(count), now, now.clone(), None, torch.full((count,), torch.nan), advantages, weights,
        torch.zeros(count, dtype=torch.int64), torch.arange(count) // 40, count // 40,
    )  # fmt: skip
    ratios: tuple[RatioTo, ...] = ("proximal", "now")
    for policy in ratios:
        for limit in (None, 1e-9):
            correction = CorrectionSettings(kind, ratio=policy, sequence_kl_limit=limit)
            found = bin_loss(inputs, Objective("grpo", grpo, CLIP, correction))
            assert torch.equal(found.loss, plain)
            assert torch.equal(torch.autograd.grad(found.loss, logprobs)[0], expected)


def test_a_bin_without_trained_tokens_adds_nothing() -> None:
    none = torch.zeros(0)
    ids = torch.zeros(0, dtype=torch.int64)
    logprobs = torch.zeros(0, requires_grad=True)
    inputs = ObjectiveInputs(logprobs, none, none, none, none, none, none, none, ids, ids, 0)
    for kind in KINDS:
        correction = CorrectionSettings(kind, sequence_kl_limit=0.1)
        objective = Objective("grpo", grpo, CLIP, correction, 0.1, "reward", 0.1, 0.1, "loss")
        found = bin_loss(inputs, objective)
        assert found.loss == 0
        found.loss.backward()


def test_what_is_missing_or_wrong_is_named() -> None:
    inputs = made_up()
    bare = replace(inputs, proximal_logprobs=None, reference_logprobs=None)
    with pytest.raises(ValueError, match="proximal logprobs"):
        bin_loss(bare, Objective("grpo", grpo, CLIP, CorrectionSettings()))
    none = CorrectionSettings("none")
    assert bin_loss(bare, Objective("grpo", grpo, CLIP, none)).loss.isfinite()
    with pytest.raises(ValueError, match="reference logprobs"):
        bin_loss(bare, Objective("grpo", grpo, CLIP, none, kl_coef=0.1))

    def of_sequences(found: LossInputs, _: LossSettings) -> Tensor:
        return found.logprobs[: found.sequences]

    with pytest.raises(
        ConfigError, match=r"^--loss mine:one: it returned losses of shape \[4\] for 12 tokens"
    ):
        bin_loss(inputs, Objective("mine:one", of_sequences, CLIP, none))

    def spoiled(found: LossInputs, _: LossSettings) -> Tensor:
        return torch.where(found.sequence == 1, torch.nan, found.logprobs)

    assert bin_loss(inputs, Objective("mine:two", spoiled, CLIP, none)).not_finite == LENGTHS[1]


def test_what_is_left_out_is_not_clipped_too() -> None:
    inputs, narrow, limit = (
        made_up(),
        LossSettings(clip_low=0.001, clip_high=0.001),
        CorrectionSettings(sequence_kl_limit=0.02),
    )
    some, every = (
        bin_loss(inputs, Objective("grpo", grpo, narrow, c)).outcome
        for c in (limit, CorrectionSettings())
    )
    assert ((every.clipped_low | every.clipped_high) & some.masked).any()
    assert torch.equal(some.clipped_low, every.clipped_low & ~some.masked)
    assert torch.equal(some.clipped_high, every.clipped_high & ~some.masked)


def test_suffix_sums_keep_to_their_sequence() -> None:
    values, sequence = torch.arange(1.0, 13.0), made_up().sequence
    assert suffix_sums(values, sequence).tolist() == [1, 14, 12, 9, 5, 13, 7, 50, 42, 33, 23, 12]
    assert suffix_sums(values[:0], sequence[:0]).tolist() == []


@pytest.mark.parametrize("several_updates", [False, True])
@pytest.mark.parametrize("ratio", ["now", "proximal"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_ratio_is_one_if_the_old_policy_is_the_present_one(
    kind: Correction, ratio: RatioTo, several_updates: bool
) -> None:
    correction = CorrectionSettings(kind=kind, ratio=ratio)
    objective = Objective("grpo", grpo, CLIP, correction)
    truncates_present = ratio == "now" and "truncate" in kind
    one_update = ratio == "proximal" and kind != "none" and not several_updates
    assert objective.ratio_is_one(several_updates) == (truncates_present or one_update)
