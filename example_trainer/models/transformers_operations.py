"""Norms and gated MLPs of transformers' models, by our table of operations.

Most classes of transformers normalise with six kernels, some of them in float32, and compute the
gate of an MLP with two. Autograd keeps a tensor of each. Our table has one kernel for the norm and
one for the gate, and keeps their inputs alone.

A module shows what it computes before it is replaced: it gets a few random numbers, and the result
must be ours. Every other module stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from example_trainer.models.decoder import Arithmetic
from example_trainer.models.ops import reference
from example_trainer.models.shards import wide

_EPSILONS = ("variance_epsilon", "eps")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_INPUTS, _INNER = 4, 6
"""Sizes of the MLP that a class shows itself with."""


def replace_modules(model: nn.Module, arithmetic: Arithmetic) -> int:
    """Let our table compute the norms and the gated MLPs of a model; return their number.

    Args:
        arithmetic: has the table, which may be replaced later.
    """
    replaced = 0
    for module in model.modules():
        own = _norm_of(module, arithmetic) or _mlp_of(module, arithmetic)
        if own is not None:
            module.forward = own
            replaced += 1
    return replaced


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _agree(module: nn.Module, x: Tensor, expected: Tensor) -> bool:
    """Report if a module of parameters on the CPU computes what is expected."""
    try:
        with torch.no_grad():
            found = module(x)
    except Exception:  # noqa: BLE001 - a class may want other arguments, or need other sizes
        return False
    return (
        isinstance(found, Tensor)
        and found.shape == expected.shape
        and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    )


def _norm_of(module: nn.Module, arithmetic: Arithmetic) -> Callable[..., Tensor] | None:
    """Return the forward function of a module that is an RMSNorm; None for another one."""
    named = dict(module.named_parameters())
    eps = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    weight = named.get("weight")
    if len(named) != 1 or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    shown = copy.copy(module)
    made_up = nn.Parameter(_random(0, len(weight)), requires_grad=False)
    shown._parameters = {"weight": made_up}
    # The second row is so small that the number in the root decides.
    x = _random(1, 2, len(weight)) * torch.tensor([[1.0], [eps**0.5]])
    for offset in (0, 1):
        if _agree(shown, x, reference.rms_norm(x, offset + made_up, eps)):
            return partial(_norm, module, module.forward, arithmetic, offset, eps)
    return None


def _norm(
    module: nn.Module,
    forward: Callable[..., Tensor],
    arithmetic: Arithmetic,
    offset: int,
    eps: float,
    x: Tensor,
    *others: Any,
    **options: Any,
) -> Tensor:
    """Normalise the last dimension of x; the factor is the weight, or 1 + weight.

    Args:
        others, options: what else the class takes, such as a gate; the class then computes it.
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    if others or options or x.dtype != weight.dtype or not x.numel():
        return forward(x, *others, **options)
    factor = offset + wide(weight) if offset else weight
    return arithmetic.ops.rms_norm(x.reshape(-1, x.shape[-1]), factor, eps).view(x.shape)


def _mlp_of(module: nn.Module, arithmetic: Arithmetic) -> Callable[..., Tensor] | None:
    """Return the forward function of a module that is a gated MLP with silu; None for another."""
    parts = [getattr(module, name, None) for name in _PROJECTIONS]
    if not all(isinstance(part, nn.Linear) and part.bias is None for part in parts):
        return None
    shown = copy.copy(module)
    small = {
        name: nn.Linear(*sizes, bias=False, device="cpu", dtype=torch.float32)
        for name, sizes in zip(
            _PROJECTIONS, [(_INPUTS, _INNER), (_INPUTS, _INNER), (_INNER, _INPUTS)], strict=True
        )
    }
    shown._modules = module._modules | small
    x = _random(0, 2, _INPUTS)
    with torch.no_grad():
        for seed, part in enumerate(small.values()):
            part.weight.copy_(_random(seed, *part.weight.shape))
        gated = F.silu(small["gate_proj"](x)) * small["up_proj"](x)
        expected = small["down_proj"](gated)
    if not _agree(shown, x, expected):
        return None
    return partial(_mlp, module, module.forward, arithmetic)


def _mlp(
    module: nn.Module, forward: Callable[[Tensor], Tensor], arithmetic: Arithmetic, x: Tensor
) -> Tensor:
    """Compute a gated MLP of x [..., width]."""
    gate, up, down = (getattr(module, name) for name in _PROJECTIONS)
    if not x.dtype == gate.weight.dtype == up.weight.dtype or not x.numel():
        return forward(x)
    joined: Tensor = _Joined.apply(x.reshape(-1, x.shape[-1]), gate.weight, up.weight)
    y: Tensor = down(arithmetic.ops.silu_and_mul(joined))
    return y.view(*x.shape[:-1], -1)


class _Joined(torch.autograd.Function):
    """Two products of the same inputs, side by side: the table's gate takes them so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(x, first, second)
        joined = x.new_empty(len(x), len(first) + len(second))
        torch.mm(x, first.t(), out=joined[:, : len(first)])
        torch.mm(x, second.t(), out=joined[:, len(first) :])
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, first, second = ctx.saved_tensors
        parts = dy.split([len(first), len(second)], dim=1)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.addmm(parts[0] @ first, parts[1], second)
        slopes = [
            part.t() @ x if needed else None
            for part, needed in zip(parts, ctx.needs_input_grad[1:], strict=True)
        ]
        return dx, *slopes
