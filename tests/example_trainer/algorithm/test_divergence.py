"""Estimates of a divergence against the divergence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.algorithm.losses import MAX_LOG_RATIO, clamped_log_ratio, k3


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
