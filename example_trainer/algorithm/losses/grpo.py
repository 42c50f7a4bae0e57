"""The clipped surrogate of PPO, as group-relative policy optimisation uses it; with DAPO's two
bounds and with dual clip.
"""

from __future__ import annotations

import torch

from example_trainer.algorithm.losses.inputs import LossInputs, LossSettings, TokenLosses


def grpo(inputs: LossInputs, settings: LossSettings) -> TokenLosses:
    """Stop the gradient of a token whose ratio has gone far enough in the direction in which its
    advantage pushes it.

        L_t = - min(ρ_t A_t, clip(ρ_t, 1 - ε_low, 1 + ε_high) A_t)        ρ_t = π(y_t) / π_old(y_t)
        L_t = - max(min(ρ_t A_t, clip(ρ_t, …) A_t), c A_t)                where A_t < 0, with dual clip c

    Sources: PPO, equation 7 (Schulman et al., arXiv:1707.06347); GRPO, equation 3 (Shao et al.,
    arXiv:2402.03300), without its divergence, which is added apart; ε_high ≠ ε_low, "clip-higher",
    is DAPO's (Yu et al., arXiv:2503.14476); dual clip is Ye et al.'s (arXiv:1912.09729), with c = 3
    there.

    Clipped are the tokens whose gradient is stopped, those of the second bound of a negative
    advantage among the upper ones.
    """
    ratio, advantages = inputs.log_ratio.exp(), inputs.advantages
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped_high = (ratio > high) & (advantages > 0)
    if settings.dual_clip is not None:
        bounded = torch.maximum(surrogate, settings.dual_clip * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
        clipped_high = clipped_high | ((ratio > settings.dual_clip) & (advantages < 0))
    return TokenLosses(
        -surrogate, clipped_low=(ratio < low) & (advantages < 0), clipped_high=clipped_high
    )
