"""The loss against closed forms, and against the same formula written naively over full logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from example_trainer.algorithm.divergence import MAX_LOG_RATIO, k3
from example_trainer.algorithm.losses import grpo_loss


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


class TestK3:
    @given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.randoms())
    def test_its_mean_under_q_is_the_divergence(self, raw: list[float], random: object) -> None:
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


class TestGrpoLoss:
    def loss(self, logprobs: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor, **options: float) -> torch.Tensor:
        weights = torch.full_like(logprobs, 1 / logprobs.numel())
        settings = {"clip_low": 0.2, "clip_high": 0.2} | options
        return grpo_loss(logprobs, rollout, advantages, weights, **settings)[0]  # type: ignore[arg-type]

    def test_on_policy_it_is_minus_the_mean_advantage_and_its_gradient_the_policy_gradient(self) -> None:
        logprobs = tensor(-1.0, -2.0, -0.5).requires_grad_()
        advantages = tensor(1.0, -2.0, 4.0)
        loss = self.loss(logprobs, logprobs.detach().clone(), advantages)
        loss.backward()
        assert loss.item() == pytest.approx(-1.0)
        torch.testing.assert_close(logprobs.grad, -advantages / 3)

    @pytest.mark.parametrize(
        ("ratio", "advantage", "loss", "slope"),
        [
            (1.5, 1.0, -1.2, 0.0),  # beyond the upper bound, and better than average: stopped
            (0.5, 1.0, -0.5, -0.5),  # below the lower bound, and better: still pulled up
            (1.5, -1.0, 1.5, 1.5),  # beyond the upper bound, and worse: still pushed down
            (0.5, -1.0, 0.8, 0.0),  # below the lower bound, and worse: stopped
            (1.1, 2.0, -2.2, -2.2),  # within the bounds
        ],
    )
    def test_clipping(self, ratio: float, advantage: float, loss: float, slope: float) -> None:
        logprobs = tensor(math.log(ratio) - 1.0).requires_grad_()
        weights = torch.ones(1)
        value, sums = grpo_loss(logprobs, tensor(-1.0), tensor(advantage), weights, clip_low=0.2, clip_high=0.2)
        value.backward()
        assert value.item() == pytest.approx(loss, rel=1e-6)
        assert logprobs.grad is not None
        assert logprobs.grad.item() == pytest.approx(slope, rel=1e-6)
        assert sums.clipped.item() == (slope == 0.0)

    def test_the_two_bounds_are_apart(self) -> None:
        logprobs, rollout = tensor(math.log(1.25), math.log(0.75)), tensor(0.0, 0.0)
        loss = self.loss(logprobs, rollout, tensor(1.0, -1.0), clip_low=0.2, clip_high=0.28)
        assert loss.item() == pytest.approx((-1.25 + 0.8) / 2)

    def test_divergence_from_the_reference(self) -> None:
        logprobs = tensor(-1.0, -2.0).requires_grad_()
        reference = tensor(-1.5, -1.0)
        weights = tensor(0.5, 0.5)
        loss, sums = grpo_loss(
            logprobs,
            logprobs.detach().clone(),
            torch.zeros(2),
            weights,
            clip_low=0.2,
            clip_high=0.2,
            kl_coef=0.1,
            reference_logprobs=reference,
        )
        loss.backward()
        expected = [math.exp(-0.5) + 0.5 - 1, math.exp(1.0) - 1.0 - 1]
        assert loss.item() == pytest.approx(0.1 * sum(expected) / 2, rel=1e-5)
        assert sums.reference_kl.item() == pytest.approx(sum(expected), rel=1e-5)
        # d k3 / d logprob = 1 - π_ref/π
        slopes = [0.05 * (1 - math.exp(-0.5)), 0.05 * (1 - math.exp(1.0))]
        torch.testing.assert_close(logprobs.grad, tensor(*slopes))

    def test_the_reported_divergence_is_from_the_rollout_policy_to_the_current_one(self) -> None:
        ratio = math.log(1.3)
        _, sums = grpo_loss(tensor(ratio - 1), tensor(-1.0), tensor(1.0), torch.ones(1), clip_low=0.2, clip_high=0.2)
        assert sums.kl.item() == pytest.approx(1.3 - 1 - ratio, rel=1e-5)

    def test_unknown_rollout_logprobs_give_the_plain_policy_gradient(self) -> None:
        logprobs = tensor(-1.0, -3.0).requires_grad_()
        rollout = tensor(math.nan, -3.0)
        value, sums = grpo_loss(logprobs, rollout, tensor(2.0, 1.0), tensor(0.5, 0.5), clip_low=0.2, clip_high=0.2)
        value.backward()
        torch.testing.assert_close(logprobs.grad, tensor(-1.0, -0.5))
        assert sums.missing_rollout_logprobs.item() == 1
        assert sums.kl.item() == 0

    @pytest.mark.parametrize("advantage", [-1.0, 1.0])
    def test_an_absurd_ratio_stays_finite(self, advantage: float) -> None:
        logprobs = tensor(-0.0).requires_grad_()
        value, sums = grpo_loss(logprobs, tensor(-500.0), tensor(advantage), torch.ones(1), clip_low=0.2, clip_high=0.2)
        value.backward()
        assert logprobs.grad is not None
        assert torch.isfinite(logprobs.grad).all()
        assert 0 < sums.kl.item() <= math.exp(MAX_LOG_RATIO)

    def test_a_reference_that_is_needed_must_be_there(self) -> None:
        with pytest.raises(ValueError, match="no reference logprobs"):
            self.loss(tensor(-1.0), tensor(-1.0), tensor(1.0), kl_coef=0.1)

    @settings(deadline=None)
    @given(st.integers(0, 2**31), st.integers(1, 40), st.floats(0.05, 0.5), st.floats(0.05, 0.9))
    def test_loss_and_gradient_equal_the_formula_in_float64(self, seed: int, n: int, low: float, high: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        current = (-3 * torch.rand(n, generator=generator, dtype=torch.float64)).requires_grad_()
        old = current.detach() + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
        reference = current.detach() + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
        advantages = torch.randn(n, generator=generator, dtype=torch.float64)
        weights = torch.rand(n, generator=generator, dtype=torch.float64) / n
        expected = torch.zeros((), dtype=torch.float64)
        for i in range(n):  # equations 3 and 4 as they are printed
            ratio = (current[i] - old[i]).exp()
            clipped = ratio.clamp(1 - low, 1 + high)
            inverse = (reference[i] - current[i]).exp()
            penalty = inverse - inverse.log() - 1
            expected = expected - weights[i] * (torch.minimum(ratio * advantages[i], clipped * advantages[i]) - 0.04 * penalty)
        expected.backward()
        logprobs = current.detach().float().requires_grad_()
        loss, _ = grpo_loss(
            logprobs,
            old.float(),
            advantages.float(),
            weights.float(),
            clip_low=low,
            clip_high=high,
            kl_coef=0.04,
            reference_logprobs=reference.float(),
        )
        loss.backward()
        assert current.grad is not None
        assert logprobs.grad is not None
        distance = ((current.detach() - old).exp() - torch.tensor([[1 - low], [1 + high]], dtype=torch.float64)).abs()
        assume(bool((distance > 1e-5).all()))  # at a kink, rounding decides which side the gradient is taken on
        torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logprobs.grad.double(), current.grad, atol=1e-5, rtol=1e-5)
