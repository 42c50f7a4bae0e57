"""float32 sums of gradients, to which the backward pass itself adds.

A parameter's gradient over a step is the sum over many passes. If each pass left a gradient in the
parameter's dtype, adding it up would cost a pass over all of them, and a rounding, every time.
Instead the matrix product that makes it adds to the float32 sum (cuBLAS and our kernels do so
without another pass), and autograd sees no gradient of the parameter at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Total = Callable[[], Tensor]
"""Returns the float32 sum that a parameter's gradient is added to, in the parameter's shape; zeros
at first."""

_HEAD_OF_TIED = ":as output matrix"


class Sums(Protocol):
    """Where the backward pass adds gradients."""

    def total(self, parameter: Tensor, as_head_of_tied: bool = False) -> Total | None:
        """Return where the gradient of a parameter is summed; None if it is frozen.

        Args:
            as_head_of_tied: the parameter is the embedding, used as output matrix.
        """

    def take(self) -> dict[str, Tensor]:
        """Return the sums that are not on the parameters, by name, and begin new ones."""


class PassGradients:
    """float32 gradients of one backward pass, left on the parameters for FSDP2 to reduce.

    FSDP2 gathers float32 parameters in the dtype that the model computes in. Autograd would round
    their gradients to that dtype before the ranks' gradients are added. So the backward pass adds
    to a float32 `grad` of the gathered parameter instead.
    """

    def total(self, parameter: Tensor, as_head_of_tied: bool = False) -> Total | None:
        """See Sums.total. A tied matrix has one sum for its two uses."""
        if not parameter.requires_grad:
            return None
        parameter.grad_dtype = _sum_dtype(parameter)
        return partial(_gradient_of, parameter)

    def take(self) -> dict[str, Tensor]:
        """Return nothing: FSDP2 leaves the reduced gradients on the sharded parameters."""
        return {}


def _gradient_of(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = _zeros(parameter)
    return parameter.grad


class GradientSums:
    """The sums of one optimizer step, each made when it is first added to.

    Example:
        model.arithmetic.sums = sums = GradientSums(model)
        loss(model(tokens, packing)).backward()      # as often as there are microbatches
        for name, gradient in sums.take().items(): ...

    Args:
        model: whose trainable parameters are summed for.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._sums: dict[str, Tensor] = {}

    def total(self, parameter: Tensor, as_head_of_tied: bool = False) -> Total | None:
        """See Sums.total.

        The two uses of a tied matrix are summed apart: the order in which they are added must not
        depend on how a batch is packed.
        """
        if not parameter.requires_grad:
            return None
        return partial(
            self._of, self._names[id(parameter)] + _HEAD_OF_TIED * as_head_of_tied, parameter
        )

    def take(self) -> dict[str, Tensor]:
        """Everything summed so far, by the parameter's name; the next addition begins anew."""
        sums, self._sums = self._sums, {}
        for key in [key for key in sums if key.endswith(_HEAD_OF_TIED)]:
            head, name = sums.pop(key), key.removesuffix(_HEAD_OF_TIED)
            sums[name] = sums[name].add_(head) if name in sums else head
        return sums

    def _of(self, key: str, parameter: Tensor) -> Tensor:
        if key not in self._sums:
            self._sums[key] = _zeros(parameter)
        return self._sums[key]


def deliver(
    parameter: Tensor, total: Total | None, add: Callable[[Tensor], object]
) -> Tensor | None:
    """Have a gradient added to where it belongs.

    Args:
        add: adds it in place to a tensor of the parameter's shape, in float32 (float64 for a
            float64 parameter).

    Returns:
        what autograd is to get: nothing if there is a `total`, else the gradient in the parameter's
        dtype.
    """
    if total is not None:
        add(total())
        return None
    fresh = _zeros(parameter)
    add(fresh)
    return fresh.to(parameter.dtype)


def add_product(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """total [outputs, inputs] += dyᵀ x, in place, for dy [rows, outputs] and x [rows, inputs] of
    any floating dtype.
    """
    if (
        dy.is_cuda and dy.dtype != total.dtype
    ):  # rounded nowhere: cuBLAS adds the products of 16 bits to the total
        torch.addmm(total, dy.t(), x, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(wide(dy).t(), wide(x))


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: Total) -> Tensor:
        ctx.total = total
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.total().add_(gradient)
        return None, None


def summed(parameter: Tensor, total: Total | None) -> Tensor:
    """The parameter, whose gradient goes to the total if there is one."""
    tied: Tensor = parameter if total is None else _Summed.apply(parameter, total)
    return tied


def wide(x: Tensor) -> Tensor:
    """float32, or float64 for float64: what sums are taken in."""
    return x if x.dtype == torch.float64 else x.float()


def _sum_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros(parameter.shape, dtype=_sum_dtype(parameter), device=parameter.device)
