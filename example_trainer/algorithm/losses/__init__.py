"""Losses per token, each a pure function of tensors in a file of its own, found by name or as
`module:function`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from example_trainer.algorithm.divergence import MAX_LOG_RATIO
from example_trainer.algorithm.functions import built_in, import_function, is_import, refusal, told
from example_trainer.algorithm.losses.cispo import cispo
from example_trainer.algorithm.losses.grpo import grpo
from example_trainer.algorithm.losses.gspo import gspo
from example_trainer.algorithm.losses.inputs import Loss, LossInputs, LossSettings, TokenLosses
from example_trainer.algorithm.losses.reinforce import reinforce
from example_trainer.errors import ConfigError, NonFiniteError
from example_trainer.out_of_memory import ran_out_of_memory

__all__ = [
    "BUILT_IN",
    "Loss",
    "LossInputs",
    "LossSettings",
    "TokenLosses",
    "count_nonfinite",
    "find_loss",
    "refuse_nonfinite",
    "token_losses",
]

BUILT_IN: dict[str, Loss] = {"grpo": grpo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}

_EXPECTED = (
    "a function of LossInputs and LossSettings that returns one loss per trained token, finite float32 of shape [n] "
    "with a gradient to logprobs, or TokenLosses"
)


def find_loss(name: str, settings: LossSettings) -> Loss:
    """A loss of ours, or one of the user's, which is imported and tried on made-up batches.

    Args:
        name: a key of BUILT_IN, or `module:function`.
        settings: what it will be called with, and is tried with: it may need what a flag says.

    Raises:
        ConfigError: it does not exist, cannot be imported, or does not do what a loss does. One
            line says what and why.
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

    Whether they are finite is not asked here, since a GPU would have to be waited for: see
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
        # What a GPU reports late is not the function's doing, and what went wrong in a loss of ours
        # is a bug.
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
                "--loss", name, f"its {side} is no bool tensor of shape {[*shape]}", _EXPECTED
            )
    return result


def count_nonfinite(losses: Tensor) -> Tensor:
    """How many of [n] losses are NaN or infinite: a scalar on the device, to be summed over a step
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
