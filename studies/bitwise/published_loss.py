"""The loss of the published on/off study, for
`simple_rl.py --loss studies.bitwise.published_loss:sequence_ppo`.

The study is TorchTitan's deterministic_vllm_rl experiment. Its policy loss is PPO's on whole
answers, to the sampler that vLLM was, with a small penalty for leaving it. So a sampler with other
bits than the trainer changes the ratio, and the gradient:

    ρ = exp( Σ_t logπ_t - logπ_vLLM,t )                         one ratio for each answer, of its sum, not its mean
    L = - min( ρ A, clip(ρ, 1 - ε, 1 + ε) A )  +  0.1 (ρ - 1 - log ρ)  +  0.01 mean_t logπ_t

The last term is the study's entropy bonus: it takes the mean logprob of the sampled tokens for the
negative entropy. The expectation of its gradient on fresh samples is 0. Pass `--correction none`,
so that ρ is to the sampler, and `--loss-normalisation sequence`, so that each answer counts the
same.
"""

from __future__ import annotations

import torch

from example_trainer.algorithm.losses import (
    MAX_LOG_RATIO,
    LossInputs,
    LossSettings,
    TokenLosses,
    sequence_lengths,
)

KL_WEIGHT = 0.1
ENTROPY_WEIGHT = 0.01


def sequence_ppo(inputs: LossInputs, settings: LossSettings) -> TokenLosses:
    """Return the loss of an answer at each of its tokens, [n].

    The weights of `--loss-normalisation sequence` average over an answer's tokens, which gives the
    answer's loss once.
    """
    tokens = sequence_lengths(inputs.sequence, inputs.sequences)[inputs.sequence]
    log_ratio = (inputs.sequence_mean(inputs.log_ratio) * tokens).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    losses = -torch.minimum(ratio * inputs.advantages, bounded * inputs.advantages)
    losses = (
        losses
        + KL_WEIGHT * (ratio - 1 - log_ratio)
        + ENTROPY_WEIGHT * inputs.sequence_mean(inputs.logprobs)
    )
    above = (ratio > 1 + settings.clip_high) & (inputs.advantages > 0)
    below = (ratio < 1 - settings.clip_low) & (inputs.advantages < 0)
    return TokenLosses(losses, clipped_low=below, clipped_high=above)
