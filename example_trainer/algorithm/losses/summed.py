"""The loss of group-relative policy optimisation, summed over a bin. Goes with its last caller.

Sources: GRPO is equations 3 and 4 of DeepSeekMath (Shao et al., arXiv:2402.03300); the clipped ratio is PPO's (Schulman et
al., arXiv:1707.06347); k3 is the third estimator of J. Schulman's note "Approximating KL Divergence" (2020,
http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from example_trainer.algorithm.divergence import MAX_LOG_RATIO, k3


@dataclass(frozen=True)
class LossSums:
    """Sums over the trained tokens of a bin, detached. Add them up, then divide by the batch's tokens.

    Attributes:
        tokens: how many.
        kl: k3 estimate of KL(rollout policy ‖ current policy), in nats.
        clipped: tokens whose ratio lies outside of the clipping range on the side where clipping stops the gradient.
        reference_kl: k3 estimate of KL(current policy ‖ reference), in nats; 0 without a reference.
        missing_rollout_logprobs: tokens that came without a rollout logprob.
    """

    tokens: int
    kl: Tensor
    clipped: Tensor
    reference_kl: Tensor
    missing_rollout_logprobs: Tensor


def grpo_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
    reference_logprobs: Tensor | None = None,
) -> tuple[Tensor, LossSums]:
    """The GRPO objective, negated, summed over the trained tokens of a bin.

        loss = Σ_t w_t · ( - min(ρ_t A_t, clip(ρ_t, 1 - clip_low, 1 + clip_high) A_t) + kl_coef · k3_t )

        ρ_t = exp(logprob_t - rollout_logprob_t)                          DeepSeekMath eq. 3, PPO eq. 7
        k3_t = π_ref/π - log(π_ref/π) - 1                                DeepSeekMath eq. 4

    Args:
        logprobs: [tokens] of the chosen tokens under the current weights, with gradient.
        rollout_logprobs: [tokens] of the same tokens when they were sampled. NaN where unknown: the current logprob,
            without its gradient, is taken, which makes the ratio 1 and the gradient the plain policy gradient.
        advantages: [tokens] advantage of the token's rollout.
        weights: [tokens] from `token_weights`.
        clip_low, clip_high: how far the ratio may fall or rise before its gradient stops.
        kl_coef: weight of the divergence from the reference.
        reference_logprobs: [tokens] under the reference; needed if kl_coef is not 0.

    Returns:
        The loss (scalar, float32) and sums for metrics.
    """
    logprobs = logprobs.float()
    current = logprobs.detach()
    unknown = torch.isnan(rollout_logprobs)
    rollout = torch.where(unknown, current, rollout_logprobs.float())
    log_ratio = (logprobs - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    per_token = -surrogate
    reference_kl = torch.zeros((), device=logprobs.device)
    if kl_coef:
        if reference_logprobs is None:
            raise ValueError("kl_coef is not 0 but there are no reference logprobs")
        penalty = k3((reference_logprobs.float() - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        per_token = per_token + kl_coef * penalty
        reference_kl = penalty.detach().sum()
    stopped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    sums = LossSums(
        tokens=logprobs.numel(),
        kl=k3(log_ratio.detach()).sum(),
        clipped=stopped.sum(),
        reference_kl=reference_kl,
        missing_rollout_logprobs=unknown.sum(),
    )
    return (per_token * weights).sum(), sums
