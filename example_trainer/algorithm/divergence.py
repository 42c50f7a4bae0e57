"""Estimates of how far one policy is from another, from the tokens that were sampled.

Pure functions of tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ± this before they are exponentiated, so that one absurd token gives no
infinity."""


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimator of KL(q‖p) from samples of q: (p/q - 1) - log(p/q), never negative,
    without bias.

    It is the third estimator of J. Schulman's note "Approximating KL Divergence" (2020,
    http://joschu.net/blog/kl-approx.html).

    Args:
        log_ratio: log p(x) - log q(x) at samples x of q.
    """
    return torch.expm1(log_ratio) - log_ratio


def clamped_log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """log(p/q) at the sampled tokens, within ± MAX_LOG_RATIO; beyond it the gradient is 0."""
    return (logprobs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
