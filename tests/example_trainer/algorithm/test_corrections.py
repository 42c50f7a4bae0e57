"""Corrections and estimates of a divergence: closed forms, and laws that hold for all rollouts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from example_trainer.algorithm.losses import MAX_LOG_RATIO, clamped_log_ratio, k3
from example_trainer.algorithm.objective import (
    Correction,
    CorrectionSettings,
    CorrectionWeights,
    correction_weights,
)

NAN = math.nan
KINDS: tuple[Correction, ...] = (
    "none",
    "token_truncate",
    "sequence_truncate",
    "token_mask",
    "sequence_mask",
)


LOG2 = math.log(2)


Sequence = list[tuple[float, float]]


"""(log ratio, rollout's logprob) of each token; a NaN as the latter: unknown."""


tokens = st.tuples(st.floats(-5, 5, width=32), st.one_of(st.just(NAN), st.floats(-9, 0, width=32)))


bins = st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=5)


choices = st.builds(
    CorrectionSettings,
    kind=st.sampled_from(KINDS),
    low=st.floats(0.1, 0.9),
    high=st.floats(1.1, 5),
    sequence_kl_limit=st.one_of(st.none(), st.floats(1e-3, 2)),
)


def tensors(sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
    """Trainer's logprobs, rollouts' and sequence numbers."""
    rollout = torch.tensor([sampled for sequence in sequences for _, sampled in sequence])
    ratio = torch.tensor([ratio for sequence in sequences for ratio, _ in sequence])
    numbers = torch.tensor([number for number, sequence in enumerate(sequences) for _ in sequence])
    return torch.where(rollout.isnan(), ratio - 5, rollout + ratio), rollout, numbers


def found(sequences: list[Sequence], options: CorrectionSettings) -> CorrectionWeights:
    logprobs, rollout, numbers = tensors(sequences)
    return correction_weights(logprobs, rollout, numbers, len(sequences), options)


@pytest.mark.parametrize(
    ("kind", "expected", "masked", "bounded"),
    [
        ("none", [1, 1, 1, 1, 1, 1], [], []),
        ("token_truncate", [0.5, 2, 3, 1, 0.25, 1], [], [2]),
        ("token_mask", [1, 1, 0, 1, 0, 1], [2, 4], []),
        # Means of the logarithm, over known tokens: log 2 of the first, -2 log 2 of the second;
        # nothing of the third.
        ("sequence_truncate", [2, 2, 2, 0.25, 0.25, 1], [], []),
        ("sequence_mask", [1, 1, 1, 0, 0, 1], [3, 4], []),
    ],
)
def test_closed_forms(
    kind: Correction, expected: list[float], masked: list[int], bounded: list[int]
) -> None:
    """Ratios ½, 2, 8 · an unknown one, ¼ · an unknown one."""
    sequences = [
        [(-LOG2, -3.0), (LOG2, -3.0), (3 * LOG2, -3.0)],
        [(1.0, NAN), (-2 * LOG2, -3.0)],
        [(4.0, NAN)],
    ]
    weights = found(sequences, CorrectionSettings(kind, low=0.4, high=3.0))
    torch.testing.assert_close(weights.weights, torch.tensor(expected, dtype=torch.float32))
    assert weights.masked.nonzero().flatten().tolist() == masked
    assert weights.bounded.nonzero().flatten().tolist() == bounded


def test_a_sequence_is_left_out_by_its_mean_kl() -> None:
    """k3 of log ratios ± x is e^±x - 1 ∓ x; the mean over ± x is cosh x - 1."""
    sequences: list[Sequence] = [[(x, -2.0), (-x, -2.0), (1.0, NAN)] for x in (0.1, 0.4)]
    for kind in KINDS:
        for limit, expected in (
            (math.cosh(0.4) - 0.999, []),
            (math.cosh(0.4) - 1.001, [3, 4, 5]),
            (1e-4, [0, 1, 2, 3, 4, 5]),
        ):
            weights = found(
                sequences, CorrectionSettings(kind, low=0.1, high=9.0, sequence_kl_limit=limit)
            )
            assert weights.masked.nonzero().flatten().tolist() == expected
            assert ((weights.weights == 0) == weights.masked).all()


@settings(deadline=None, max_examples=60)
@given(bins, choices)
def test_bounds_equal_bits_and_packing(
    sequences: list[Sequence], options: CorrectionSettings
) -> None:
    weights = found(sequences, options)
    assert weights.weights.isfinite().all()
    assert (weights.weights >= 0).all()
    assert (weights.weights <= options.high * (1 + 1e-6)).all()
    assert not (weights.masked & (weights.weights != 0)).any()
    alone = [found([sequence], options) for sequence in sequences]
    assert torch.equal(torch.cat([one.weights for one in alone]), weights.weights), (
        "a sequence's weights are its own business"
    )
    _, rollout, numbers = tensors(sequences)
    equal = torch.where(rollout.isnan(), -1.0, rollout)
    exact = correction_weights(equal, rollout, numbers, len(sequences), options)
    assert (exact.weights == 1).all(), "to the bit"
    assert not exact.masked.any()
    assert not exact.bounded.any()


@settings(deadline=None, max_examples=40)
@given(bins, st.sampled_from(KINDS), st.floats(0, 3))
def test_a_truncated_weight_never_falls_with_the_ratio(
    sequences: list[Sequence], kind: Correction, more: float
) -> None:
    options = CorrectionSettings(kind, low=1e-9, high=2.0)
    lower = found(sequences, options).weights
    higher = found(
        [[(ratio + more, sampled) for ratio, sampled in one] for one in sequences], options
    ).weights
    if kind.endswith("truncate"):
        assert (higher >= lower * (1 - 1e-5)).all()
    unknown = tensors(sequences)[1].isnan()
    if kind.startswith("token"):
        assert (lower[unknown] == 1).all()


def test_absurd_ratios_stay_finite() -> None:
    weights = found(
        [[(400.0, -1.0), (-400.0, -1.0)]],
        CorrectionSettings("token_truncate", sequence_kl_limit=1e12),
    )
    assert weights.weights.tolist() == [2.0, pytest.approx(math.exp(-20))]


class TestK3:
    @given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6))
    def test_its_mean_under_q_is_the_divergence(self, raw: list[float]) -> None:
        q = torch.tensor(raw, dtype=torch.float64) / sum(raw)
        p = torch.flip(q, dims=(0,))
        expected = (q * (q / p).log()).sum()
        assert torch.allclose((q * k3(p.log() - q.log())).sum(), expected, atol=1e-12)

    def test_never_negative_and_exact_near_zero(self) -> None:
        x = torch.linspace(-5, 5, 1001)
        assert (k3(x) >= 0).all()
        assert k3(torch.zeros(1)).item() == 0
        small = torch.tensor([1e-3], dtype=torch.float64)
        assert k3(small).item() == pytest.approx(1e-6 / 2 + 1e-9 / 6, rel=1e-6)


def test_an_absurd_ratio_has_a_bound_and_no_gradient() -> None:
    logprobs = torch.tensor([-500.0, -1.0, 0.0], requires_grad=True)
    ratio = clamped_log_ratio(logprobs, torch.tensor([0.0, -1.5, -500.0]))
    assert ratio.tolist() == [-MAX_LOG_RATIO, 0.5, MAX_LOG_RATIO]
    ratio.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 1.0, 0.0]
