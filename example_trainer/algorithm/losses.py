"""Losses per token: pure functions of tensors, found by name or as `module:function`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from example_trainer.algorithm.advantages import built_in, import_function, is_import, refusal, told
from example_trainer.errors import ConfigError, NonFiniteError
from example_trainer.out_of_memory import ran_out_of_memory

# Sums and means over the tokens of each sequence of a bin. Pure functions of tensors.


def sequence_lengths(sequence: Tensor, sequences: int) -> Tensor:
    """[sequences] int64: how many tokens each has.

    Args:
        sequence: [n] int64, ascending: which sequence each token is of.
        sequences: how many there are.
    """
    return torch.zeros(sequences, dtype=torch.int64, device=sequence.device).index_add_(
        0, sequence, torch.ones_like(sequence)
    )


def sequence_mean(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """For each token the mean of its sequence, with gradient.

    Sums are taken in float64, each sequence's by itself and in its tokens' order. So neither the
    rest of the bin nor the order of a GPU's threads changes a bit.

    Args:
        values: [n] float32 or float64.
        sequence: [n] int64, ascending: which sequence each token is of. The tokens of a sequence
            lie together.
        sequences: how many there are; each has a token.

    Returns:
        [n] of the values' dtype.
    """
    if not len(values):
        return values
    mean: Tensor = _Mean.apply(values, sequence, sequence_lengths(sequence, sequences))
    return mean


class _Mean(torch.autograd.Function):
    """Its gradient is the mean of the gradients, by the same sums. To put a mean in the place of
    each value is a symmetric map.

    Autograd's own way back through the index adds the gradients at equal indices one after the
    other on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(sequence, lengths)
        sums = torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True)
        return (sums / lengths)[sequence].to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        sequence, lengths = ctx.saved_tensors
        return _Mean.apply(gradients[0], sequence, lengths), None, None


# Estimates of how far one policy is from another, from the tokens that were sampled.
#
# Pure functions of tensors.

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


# The arguments of a loss, and its result.


@dataclass(frozen=True)
class LossInputs:
    """The trained tokens of a bin: n of them, in the order of its sequences and, in each, of the
    tokens.

    Attributes:
        logprobs: [n] float32, with gradient: of the chosen tokens under the present policy.
        old_logprobs: [n] float32, without: under the policy that the ratio is taken to. See
            docs/algorithms.md for which it is. Where it is unknown it is the present one, so that
            the ratio is 1 and the gradient the plain policy gradient.
        advantages: [n] float32.
        sequence: [n] int64, ascending: which sequence of the bin each token is of.
        sequences: how many there are; each has a token.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequence: Tensor
    sequences: int

    @property
    def log_ratio(self) -> Tensor:
        """[n] with gradient: log of the present policy's probability over the old one's, within ±
        MAX_LOG_RATIO.
        """
        return clamped_log_ratio(self.logprobs, self.old_logprobs)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[n]: for each token the mean of [n] values over its sequence, with gradient."""
        return sequence_mean(values, self.sequence, self.sequences)


@dataclass(frozen=True)
class LossSettings:
    """Bounds of a loss, from the options.

    Attributes:
        clip_low, clip_high: how far the ratio may fall below 1 and rise above it.
        dual_clip: at which ratio the loss of a negative advantage stops growing; None for nowhere.
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None = None


@dataclass(frozen=True)
class TokenLosses:
    """A loss for each token, before it is weighted: what the token counts in its batch is not the
    loss's business.

    Attributes:
        losses: [n] float32, with gradient.
        clipped_low, clipped_high: [n] bool: tokens on which the lower or the upper bound acts.
    """

    losses: Tensor
    clipped_low: Tensor
    clipped_high: Tensor

    @classmethod
    def unclipped(cls, losses: Tensor) -> TokenLosses:
        """Losses without bounds."""
        nowhere = torch.zeros_like(losses, dtype=torch.bool)
        return cls(losses, nowhere, nowhere)


Loss = Callable[[LossInputs, LossSettings], TokenLosses | Tensor]
"""A bare [n] tensor counts no token as clipped."""


# The clipped surrogate of PPO, as group-relative policy optimisation uses it; with DAPO's two
# bounds and with dual clip.


def grpo(inputs: LossInputs, settings: LossSettings) -> TokenLosses:
    """Stop the gradient of a token whose ratio has gone far enough in the direction in which its
    advantage pushes it.

        L_t = - min(ρ_t A_t, clip(ρ_t, 1 - ε_low, 1 + ε_high) A_t)        ρ_t = π(y_t) / π_old(y_t)
        L_t = - max(min(ρ_t A_t, clip(ρ_t, …) A_t), c A_t)                where A_t < 0, with dual clip c

    Sources: PPO, equation 7 (Schulman et al., arXiv:1707.06347). GRPO, equation 3 (Shao et al.,
    arXiv:2402.03300), without its divergence, which is added apart. The bounds ε_high ≠ ε_low,
    "clip-higher", are DAPO's (Yu et al., arXiv:2503.14476). Dual clip is Ye et al.'s
    (arXiv:1912.09729), with c = 3 there.

    Tokens whose gradient is stopped count as clipped. A token at the second bound of a negative
    advantage counts as clipped from above.
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


# Group sequence policy optimisation: the ratio and bounds of the whole sequence.


def gspo(inputs: LossInputs, settings: LossSettings) -> TokenLosses:
    """PPO's surrogate with one ratio for all tokens of a sequence, in the form that lets advantages
    differ within it.

        s_i = exp( 1/|y_i| Σ_t log(π(y_it) / π_old(y_it)) )               the geometric mean of the tokens' ratios
        s_it = sg(s_i) · π(y_it) / sg(π(y_it))                            its value is s_i, its gradient the token's own
        L_it = - min(s_it A_it, clip(s_it, 1 - ε_low, 1 + ε_high) A_it)

    sg stops the gradient. Where the advantages of a sequence are all alike and
    `--loss-normalisation` is sequence, value and gradient equal GSPO's.

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


# Clipped importance weights instead of clipped updates: every token keeps a gradient.


def cispo(inputs: LossInputs, settings: LossSettings) -> TokenLosses:
    """The policy gradient with a bounded importance weight.

        L_t = - sg( clip(ρ_t, 1 - ε_low, 1 + ε_high) ) · A_t · log π(y_t)        ρ_t = π(y_t) / π_old(y_t)

    sg stops the gradient: a bound limits what a token weighs, and never silences it. With ε_low = 1
    no lower bound acts, as in the paper's runs.

    Source: CISPO, MiniMax-M1 (MiniMax, arXiv:2506.13585).

    Clipped are the tokens whose weight is at a bound, whatever the sign of their advantage; their
    gradient is not stopped.
    """
    ratio = inputs.log_ratio.detach().exp()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    losses = -ratio.clamp(low, high) * inputs.advantages * inputs.logprobs
    return TokenLosses(losses, clipped_low=ratio < low, clipped_high=ratio > high)


# The policy gradient itself, without bounds.


def reinforce(inputs: LossInputs, settings: LossSettings) -> TokenLosses:
    """The policy gradient of the tokens, importance-weighted if an older policy sampled them.

        L_t = - ρ_t A_t        ∇L_t = - ρ_t A_t ∇log π(y_t)        ρ_t = π(y_t) / π_old(y_t)

    Where the present policy is the old one ρ is 1 and this is the gradient of REINFORCE, - A_t ∇log
    π(y_t). Elsewhere ρ makes each token's term unbiased, with a variance that nothing bounds.

    Sources: Williams, "Simple statistical gradient-following algorithms for connectionist
    reinforcement learning", 1992; RLOO is this with leave-one-out advantages (Ahmadian et al.,
    arXiv:2402.14740).

    Nothing is clipped; `settings` are not used.
    """
    return TokenLosses.unclipped(-inputs.log_ratio.exp() * inputs.advantages)


BUILT_IN: dict[str, Loss] = {"grpo": grpo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}

_EXPECTED = (
    "a function of LossInputs and LossSettings that returns one loss per trained token, finite float32 of shape [n] "
    "with a gradient to logprobs, or TokenLosses"
)


def find_loss(name: str, settings: LossSettings) -> Loss:
    """A loss of ours, or one of the user's, which is imported and tried on made-up batches.

    Args:
        name: a key of BUILT_IN, or `module:function`.
        settings: what it will be called with, and is tried with: it may need the value of a flag.

    Raises:
        ConfigError: it does not exist, cannot be imported, or does not do what a loss does. The
            message is one line with the reason.
    """
    if not is_import(name):
        return built_in("--loss", name, BUILT_IN)
    function: Loss = import_function("--loss", name, 2, _EXPECTED)
    present = torch.tensor([-0.1, -2.0, -1.0, -0.7, -3.0, -0.01])
    near = torch.tensor([1.3, 0.7, 1.3, 0.7, 1.3, 0.7])
    far = torch.tensor([MAX_LOG_RATIO, 0.0, MAX_LOG_RATIO, 0.0, MAX_LOG_RATIO, 0.0])
    _try(name, function, settings, present, present)
    _try(name, function, settings, present, present * near)
    _try(name, function, settings, present - far, present - far.roll(1))
    return function


def token_losses(name: str, loss: Loss, inputs: LossInputs, settings: LossSettings) -> TokenLosses:
    """The losses of a bin, of the right shape. A loss is not called for a bin without a trained
    token.

    This does not check that they are finite, because that would wait for a GPU: see
    count_nonfinite.

    Args:
        name: of the loss, for errors.

    Raises:
        ConfigError: the function is the user's and failed, other than for want of memory; or it did
            not return what a loss returns.
    """
    if not len(inputs.logprobs):
        return TokenLosses.unclipped(inputs.logprobs * 0.0)
    try:
        result = loss(inputs, settings)
    except Exception as error:
        # An error that a GPU reports late may come from another function, and an error in a loss of
        # ours is a bug.
        if (
            not is_import(name)
            or ran_out_of_memory(error)
            or isinstance(error, torch.AcceleratorError)
        ):
            raise
        raise refusal("--loss", name, f"it failed with {told(error)}", _EXPECTED) from error
    return _checked(name, result, inputs)


def _checked(name: str, result: object, inputs: LossInputs) -> TokenLosses:
    shape = inputs.logprobs.shape
    if isinstance(result, Tensor):
        result = TokenLosses.unclipped(result)
    if not isinstance(result, TokenLosses):
        raise refusal("--loss", name, f"it returned {type(result).__name__}", _EXPECTED)
    if result.losses.shape != shape:
        raise refusal(
            "--loss",
            name,
            f"it returned losses of shape {[*result.losses.shape]} for {shape[0]} tokens",
            _EXPECTED,
        )
    if result.losses.dtype != inputs.logprobs.dtype:
        raise refusal("--loss", name, f"it returned {result.losses.dtype}", _EXPECTED)
    if not result.losses.requires_grad and inputs.logprobs.requires_grad:
        raise refusal(
            "--loss",
            name,
            "what it returned has no gradient: it does not depend on logprobs",
            _EXPECTED,
        )
    for side in ("clipped_low", "clipped_high"):
        mask = getattr(result, side)
        if not isinstance(mask, Tensor) or mask.shape != shape or mask.dtype != torch.bool:
            raise refusal(
                "--loss", name, f"its {side} is not a bool tensor of shape {[*shape]}", _EXPECTED
            )
    return result


def count_nonfinite(losses: Tensor) -> Tensor:
    """Count the losses that are NaN or infinite: a scalar on the device, to be summed over a step
    and read once.
    """
    return (~torch.isfinite(losses)).sum()


def refuse_nonfinite(name: str, count: int, tokens: int) -> None:
    """End a step whose losses are not all finite, before its gradient is used.

    Args:
        name: of the loss.
        count: sum of count_nonfinite over the step.
        tokens: trained tokens of the step.

    Raises:
        NonFiniteError: `count` is not 0.
    """
    if count:
        raise NonFiniteError(
            f"--loss {name} is NaN or infinite for {count} of {tokens} tokens; look at its divisions, logarithms and "
            "exponents, or leave such batches out with --skip-nonfinite"
        )


def _try(name: str, function: Loss, settings: LossSettings, present: Tensor, old: Tensor) -> None:
    """Call a loss with three sequences, one of them of a single token, and advantages of both signs
    and 0.

    Args:
        present, old: [6] float32 logprobs under the two policies.
    """
    logprobs = present.clone().requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old.clone(),
        advantages=torch.tensor([1.0, 1.0, 1.0, -0.5, 0.0, 0.0]),
        sequence=torch.tensor([0, 0, 0, 1, 2, 2]),
        sequences=3,
    )
    try:
        losses = _checked(name, function(inputs, settings), inputs).losses
        gradient = torch.autograd.grad(losses.sum(), logprobs, allow_unused=True)[0]
    except ConfigError:
        raise
    except Exception as error:
        raise refusal(
            "--loss", name, f"a made-up batch made it fail with {told(error)}", _EXPECTED
        ) from error
    if gradient is None:
        raise refusal("--loss", name, "its gradient does not reach logprobs", _EXPECTED)
    for what, tensor in (("loss", losses), ("gradient", gradient)):
        if not torch.isfinite(tensor).all():
            raise refusal(
                "--loss", name, f"on a made-up batch its {what} is {tensor.tolist()}", _EXPECTED
            )
