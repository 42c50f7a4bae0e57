"""The policy gradient itself, without bounds."""

from __future__ import annotations

from example_trainer.algorithm.losses.inputs import LossInputs, LossSettings, TokenLosses


def reinforce(inputs: LossInputs, settings: LossSettings) -> TokenLosses:
    """The policy gradient of the tokens, importance-weighted if an older policy sampled them.

        L_t = - ρ_t A_t        ∇L_t = - ρ_t A_t ∇log π(y_t)        ρ_t = π(y_t) / π_old(y_t)

    Where the present policy is the old one ρ is 1 and this is the gradient of REINFORCE, - A_t ∇log
    π(y_t); where it is not, ρ makes each token's term unbiased, with a variance that nothing
    bounds.

    Sources: Williams, "Simple statistical gradient-following algorithms for connectionist
    reinforcement learning", 1992; RLOO is this with leave-one-out advantages (Ahmadian et al.,
    arXiv:2402.14740).

    Nothing is clipped; `settings` are not used.
    """
    return TokenLosses.unclipped(-inputs.log_ratio.exp() * inputs.advantages)
