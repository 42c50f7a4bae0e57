"""Group sequence policy optimisation: the ratio, and its bounds, are those of the whole sequence."""

from __future__ import annotations

import torch

from example_trainer.algorithm.losses.inputs import LossInputs, LossSettings, TokenLosses


def gspo(inputs: LossInputs, settings: LossSettings) -> TokenLosses:
    """PPO's surrogate with one ratio for all tokens of a sequence, in the form that lets advantages
    differ within it.

        s_i = exp( 1/|y_i| Σ_t log(π(y_it) / π_old(y_it)) )               the geometric mean of the tokens' ratios
        s_it = sg(s_i) · π(y_it) / sg(π(y_it))                            its value is s_i, its gradient the token's own
        L_it = - min(s_it A_it, clip(s_it, 1 - ε_low, 1 + ε_high) A_it)

    sg stops the gradient. Where the advantages of a sequence are all alike and
    `--loss-normalisation` is sequence, value and gradient are those of GSPO itself.

    Source: Zheng et al., arXiv:2507.18071: equations of the sequence ratio and of GSPO-token.

    Clipped are the tokens whose gradient is stopped; in a sequence with advantages of one sign that
    is all of them or none.
    """
    sequence_ratio = inputs.sequence_mean(inputs.log_ratio.detach()).exp()
    # 1, with the gradient of the token's logprob.
    one = (inputs.logprobs - inputs.logprobs.detach()).exp()
    ratio, advantages = sequence_ratio * one, inputs.advantages
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return TokenLosses(
        -surrogate,
        clipped_low=(sequence_ratio < low) & (advantages < 0),
        clipped_high=(sequence_ratio > high) & (advantages > 0),
    )
