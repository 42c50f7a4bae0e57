"""Mixtures of experts for the fast and the invariant table: the forward pass that vLLM's
deterministic mode runs, and its backward pass.

Rows are sorted by expert, and in an expert by token. The gradient of an expert's matrix is summed
span after span: a span's tokens give the same bits whatever they are packed with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from example_trainer.models.shards import Split, Total, deliver, wide
from vllm_patching.batch_invariant import ops


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, count: int, renormalised: bool, replayed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if replayed is None:
            weights, chosen = ops.route(logits, count, renormalised)
        else:
            weights, chosen = _chances(logits).gather(1, replayed), replayed.clone()
            if renormalised:
                weights = weights / _over_slots(weights)
        ctx.save_for_backward(logits, weights, chosen)
        ctx.renormalised = renormalised
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits, weights, chosen = ctx.saved_tensors
        chances = _chances(logits)
        picked = chances.gather(1, chosen)
        if ctx.renormalised:
            upstream = (upstream - _over_slots(upstream * weights)) / _over_slots(picked)
        reaching = torch.zeros_like(chances).scatter_(1, chosen, upstream)
        slope = chances * (reaching - _over_slots(upstream * picked))
        return slope.to(logits.dtype), None, None, None


def _chances(logits: Tensor) -> Tensor:
    return wide(logits).softmax(-1)


def _over_slots(values: Tensor) -> Tensor:
    """The sum over slots of [tokens, slots], in their order: [tokens, 1]."""
    total = values[:, 0].clone()
    for slot in range(1, values.shape[1]):
        total += values[:, slot]
    return total[:, None]


def route(
    logits: Tensor, count: int, renormalised: bool, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See Operations.route."""
    weights, numbers = _Route.apply(logits, count, renormalised, chosen)
    return weights, numbers


class Kernels(NamedTuple):
    """The functions in which tables differ.

    Attributes:
        gated: silu_and_mul without a gradient.
        gradients: the module with `expert_gradient` and `add_expert_gradient`.
    """

    gated: Callable[[Tensor], Tensor]
    gradients: ModuleType


_WHOLE = Split()


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        gate_up: Tensor,
        down: Tensor,
        begins: Tensor,
        totals: tuple[Total | None, Total | None],
        kernels: Kernels,
        split: Split,
        parts: int,
    ) -> Tensor:
        own = parts // split.size
        mixed = ops.mix(x, weights, chosen, gate_up, down, kernels.gated, own)
        ctx.save_for_backward(x, weights, gate_up, down, begins, mixed.inner, *mixed.assigned)
        ctx.totals, ctx.gradients = totals, kernels.gradients
        if parts == 1:
            return mixed.outputs[0]
        return ops.add_parts(split.gather_parts(mixed.outputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, down, begins, inner, order, tokens, places, ends = ctx.saved_tensors
        gradients, count = ctx.gradients, weights.shape[1]
        bounds = _bounds(order, ends, begins * count)
        # Not multiplied by the weights yet: so it gives their gradient too, and outputs of the
        # experts need not be kept for that.
        dy = dy.index_select(0, tokens)
        slope = ops.expert_linear(dy, down.transpose(1, 2), ends)
        d_inner, scaled, d_weights = gradients.expert_gradient(
            slope, inner, weights.reshape(-1).index_select(0, order)
        )
        d_down = d_gate_up = dx = None
        if ctx.needs_input_grad[4]:
            add = partial(gradients.add_expert_gradient, dy, scaled, bounds=bounds)
            d_down = deliver(down, ctx.totals[1], add)
            del add
        del dy, scaled, slope  # their memory is needed below
        if ctx.needs_input_grad[3]:
            rows = x.index_select(0, tokens)
            add = partial(gradients.add_expert_gradient, d_inner, rows, bounds=bounds)
            d_gate_up = deliver(gate_up, ctx.totals[0], add)
            del add, rows
        if ctx.needs_input_grad[0]:
            back = ops.expert_linear(d_inner, gate_up.transpose(1, 2), ends)
            dx = ops.weighted_sum(back, places, torch.ones_like(weights))
        d_weights = d_weights.index_select(0, places).view_as(weights)
        return dx, d_weights, None, d_gate_up, d_down, None, None, None, None, None


def _bounds(order: Tensor, ends: Tensor, begins: Tensor) -> Tensor:
    """The rows [experts, spans + 1] at which each span begins among the rows of each expert.

    Args:
        order, ends: see Assigned.
        begins: [spans + 1], the first slot of each span, and the number of slots.
    """
    experts, slots = len(ends), len(order)
    numbers = torch.arange(experts, device=order.device)
    own = torch.searchsorted(ends, torch.arange(slots, device=order.device), right=True)
    firsts = numbers[:, None] * slots + begins[None, :]
    return torch.searchsorted(own * slots + order, firsts.contiguous())


def experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    begins: Tensor,
    totals: tuple[Total | None, Total | None],
    kernels: Kernels,
    split: Split = _WHOLE,
    parts: int = 1,
) -> Tensor:
    """See Operations.experts. As in `invariant.row_linear`, the gradients do not depend on the
    parts.

    Args:
        begins: [spans + 1], the first token of each span whose sums are taken apart, and the
            number of tokens.

    Raises:
        ValueError: the ranks cannot compute equal shares of the parts.
    """
    if parts % split.size:
        raise ValueError(
            f"{split.size} trainer ranks cannot compute equal shares of a sum of {parts} parts"
        )
    y: Tensor = _Experts.apply(
        x, weights, chosen, gate_up, down, begins, totals, kernels, split, parts
    )
    return y
