"""Clipped importance weights instead of clipped updates: every token keeps a gradient."""

from __future__ import annotations

from example_trainer.algorithm.losses.inputs import LossInputs, LossSettings, TokenLosses


def cispo(inputs: LossInputs, settings: LossSettings) -> TokenLosses:
    """The policy gradient with a bounded importance weight.

        L_t = - sg( clip(ρ_t, 1 - ε_low, 1 + ε_high) ) · A_t · log π(y_t)        ρ_t = π(y_t) / π_old(y_t)

    sg stops the gradient: a bound limits what a token weighs, and never silences it. With ε_low = 1
    there is no lower bound, as in the paper's runs.

    Source: CISPO, MiniMax-M1 (MiniMax, arXiv:2506.13585).

    Clipped are the tokens whose weight is at a bound, whatever the sign of their advantage; their
    gradient is not stopped.
    """
    ratio = inputs.log_ratio.detach().exp()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    losses = -ratio.clamp(low, high) * inputs.advantages * inputs.logprobs
    return TokenLosses(losses, clipped_low=ratio < low, clipped_high=ratio > high)
