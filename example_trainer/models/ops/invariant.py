"""A decoder's operations with gradients. Forward: the kernels that vLLM runs. Backward: ours, every sum in a fixed order.

Weight gradients go one of two ways. Without a `total` they come out as autograd's gradients, in the weight's dtype. With one,
a function that returns a float32 accumulator, they are added to that, and autograd sees none: the sum over a step's tokens is
then taken in the order of the tokens, with one rounding at the end, however the tokens were spread over microbatches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from example_trainer.models.ops import torch_gradients
from example_trainer.models.packing import TILE, Packing
from vllm_patching.batch_invariant import ops

Total = Callable[[], Tensor]
"""Returns the float32 accumulator, in the shape of the weight."""


def gradients_for(x: Tensor) -> ModuleType:
    """The backward passes for a tensor's device: Triton kernels on a GPU (or under Triton's interpreter), else torch."""
    if x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        from example_trainer.models.ops import triton_gradients

        return triton_gradients
    return torch_gradients


def _zeros(weight: Tensor) -> Tensor:
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.zeros(weight.shape, dtype=dtype, device=weight.device)


def _summed(weight: Tensor, total: Total | None, add: Callable[[Tensor], None]) -> Tensor | None:
    """Let `add` put a gradient where it belongs; returns what autograd is to get."""
    if total is not None:
        add(total())
        return None
    fresh = _zeros(weight)
    add(fresh)
    return fresh.to(weight.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing, totals: tuple[Total | None, Total | None]
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.packing, ctx.totals = packing, totals
        return ops.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        gradients = gradients_for(dy)
        dy = dy.contiguous()
        dx = ops.linear(dy, weight.t()) if ctx.needs_input_grad[0] else None
        dw = db = None
        if ctx.needs_input_grad[1]:
            dw = _summed(weight, ctx.totals[0], lambda total: gradients.add_weight_gradient(dy, x, total, ctx.packing))
        if bias is not None and ctx.needs_input_grad[2]:
            db = _summed(bias, ctx.totals[1], lambda total: gradients.add_row_sums(dy, total, ctx.packing))
        return dx, dw, db, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    packing: Packing | None = None,
    total: Total | None = None,
    bias_total: Total | None = None,
) -> Tensor:
    """x Wᵀ + b.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs].
        bias: [outputs].
        packing: the sequences in x [tokens, inputs]; not given: all rows are one.
        total, bias_total: see the module.
    """
    flat = x.reshape(-1, x.shape[-1])
    y: Tensor = _Linear.apply(flat, weight, bias, packing or Packing([len(flat)], x.device), (total, bias_total))
    return y.view(*x.shape[:-1], weight.shape[0])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [..., inner] @ b [inner, outputs], the same product as `linear`'s."""
    return linear(a, b.t())


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, packing: Packing, total: Total | None
    ) -> Any:
        ctx.eps, ctx.packing, ctx.total, ctx.fused = eps, packing, total, residual is not None
        ctx.set_materialize_grads(False)
        if residual is None:
            ctx.save_for_backward(x, weight)
            return ops.rms_norm(x, weight, eps)
        y, summed = ops.fused_add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(summed, weight)
        return y, summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy, extra = (*upstream, None)[:2]
        dw = None
        if dy is None:
            dx = extra
        else:
            gradients = gradients_for(x)
            rows, flat = dy.reshape(-1, x.shape[-1]), x.reshape(-1, x.shape[-1])
            dx, inverse = gradients.norm_gradient(
                rows, flat, weight, ctx.eps, None if extra is None else extra.reshape(rows.shape)
            )
            dx = dx.view(x.shape)
            if ctx.needs_input_grad[2]:
                dw = _summed(weight, ctx.total, lambda total: gradients.add_row_sums(rows, total, ctx.packing, flat, inverse))
        return dx, dx if ctx.fused else None, dw, None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, packing: Packing | None = None, total: Total | None = None) -> Tensor:
    """w · x / sqrt(mean(x²) + eps) over the last dimension (arXiv:1910.07467), float32 inside.

    Args:
        x: [tokens, width] or [tokens, heads, width].
        packing, total: see linear.
    """
    y: Tensor = _RMSNorm.apply(x, None, weight, eps, packing or Packing([len(x)], x.device), total)
    return y


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, packing: Packing | None = None, total: Total | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(r), r) of r = x + residual, all [tokens, width]."""
    y, summed = _RMSNorm.apply(x, residual, weight, eps, packing or Packing([len(x)], x.device), total)
    return y, summed


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return ops.silu_and_mul(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        flat = x.reshape(-1, x.shape[-1])
        dx: Tensor = gradients_for(x).silu_and_mul_gradient(dy.reshape(len(flat), -1), flat)
        return dx.view(x.shape)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) · up of x [..., 2 · width] (arXiv:2002.05202), the gate in its first half."""
    y: Tensor = _SiluAndMul.apply(x)
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, positions: Tensor, head_dim: int, table: Tensor, mirrored: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions, mirrored)
        ctx.head_dim = head_dim
        return ops.rotary_embedding(positions, q, k, head_dim, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        # A rotation's transpose is the rotation back.
        positions, mirrored = ctx.saved_tensors
        dq, dk = ops.rotary_embedding(positions, dq.contiguous(), dk.contiguous(), ctx.head_dim, mirrored)
        return dq, dk, None, None, None, None


def mirrored_table(table: Tensor) -> Tensor:
    """The rotary table [positions, head_dim] that turns the other way."""
    cos, sin = table.chunk(2, dim=-1)
    return torch.cat((cos, -sin), dim=-1)


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, head_dim: int, table: Tensor, mirrored: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate pairs (i, i + head_dim/2) of each head by its position (RoFormer).

    Args:
        positions: [tokens] int64.
        q, k: [tokens, heads, head_dim], each with its own number of heads.
        table: [positions, head_dim], cosines then sines.
        mirrored: mirrored_table(table), if there is one already.
    """
    rotated, rotated_k = _Rotary.apply(
        q, k, positions, head_dim, table, mirrored_table(table) if mirrored is None else mirrored
    )
    return rotated, rotated_k


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
        out, lse = ops.attention_varlen(q, k, v, packing.cu_seqlens, packing.max_length, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packing, ctx.scale = packing, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gradients = gradients_for(dy)
        dq, dk, dv = gradients.attention_backward(dy, *ctx.saved_tensors, ctx.packing, ctx.scale)
        return dq, dk, dv, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """Causal attention within each packed sequence; query heads share key and value heads in equal groups.

    Args:
        q: [tokens, heads, width]; k, v: [tokens, kv_heads, width].
        scale: factor of the scores.

    Returns:
        [tokens, heads, width].
    """
    out: Tensor = _Attention.apply(q, k, v, packing, scale)
    return out


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, total: Total | None) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.total = total
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ids, weight = ctx.saved_tensors
        add = gradients_for(dy).add_embedding_gradient
        return None, _summed(weight, ctx.total, lambda total: add(dy, ids, total)), None


def embedding(ids: Tensor, weight: Tensor, total: Total | None = None) -> Tensor:
    """Rows of weight [vocab, width] for ids [tokens]. The gradients of a repeated id are added in the tokens' order."""
    rows: Tensor = _Embedding.apply(ids, weight, total)
    return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return dy.new_zeros(ctx.shape).index_copy_(0, rows, dy), None


def distinct_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], no row twice. The gradient is copied back; torch's own would add it atomically."""
    chosen: Tensor = _Rows.apply(x, rows)
    return chosen


class _ChosenLogprobs(torch.autograd.Function):
    """Logits exist for a chunk of tokens at a time, in both directions; a chunk is a whole number of tiles."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, packing: Packing, chunk: int, total: Total | None
    ) -> tuple[Tensor, Tensor]:
        padded = _padded_head(weight)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for start, part in _chunks(packing, chunk):
            rows, ids = hidden[start : start + part.tokens], targets[start : start + part.tokens]
            logits = ops.linear(rows, padded)[:, : len(weight)]
            lse = ops.log_sum_exp(logits)  # what ops.chosen_logprobs does, keeping the denominators
            logprobs = logits.gather(1, ids[:, None]).squeeze(1).to(lse.dtype) - lse
            parts.append((logprobs, gradients_for(logits).entropy(logits.contiguous(), lse), lse))
        logprobs, entropy, lse = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.packing, ctx.chunk, ctx.total = packing, chunk, total
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse = ctx.saved_tensors
        gradients = gradients_for(hidden)
        padded, back = _padded_head(weight), weight.t()
        hidden_gradient = torch.empty_like(hidden)
        fresh = None if ctx.total is not None else _zeros(weight)
        for start, part in _chunks(ctx.packing, ctx.chunk):
            rows = slice(start, start + part.tokens)
            logits = ops.linear(hidden[rows], padded)[:, : len(weight)].contiguous()
            slope = gradients.logit_gradient(logits, targets[rows], lse[rows], upstream[rows].contiguous())
            hidden_gradient[rows] = ops.linear(slope, back)
            if ctx.needs_input_grad[1]:
                gradients.add_weight_gradient(slope, hidden[rows], ctx.total() if fresh is None else fresh, part)
        dw = fresh.to(weight.dtype) if fresh is not None and ctx.needs_input_grad[1] else None
        return hidden_gradient, dw, None, None, None, None


def _padded_head(weight: Tensor) -> Tensor:
    """The rows that vLLM pads an output head with; a product of another width might take another kernel."""
    missing = -len(weight) % ops.VOCAB_MULTIPLE
    return F.pad(weight, (0, 0, 0, missing)) if missing and weight.is_cuda else weight


def _chunks(packing: Packing, size: int) -> Iterator[tuple[int, Packing]]:
    """Split into runs of whole tiles of about `size` tokens; yields the first token of each, and its tiles as sequences."""
    pieces = [min(TILE, end - start) for begin, end in packing.spans() for start in range(begin, end, TILE)]
    start, held = 0, list[int]()
    for piece in pieces:
        if held and sum(held) + piece > size:
            yield start, Packing(held, packing.device)
            start, held = start + sum(held), []
        held.append(piece)
    yield start, Packing(held, packing.device)


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    packing: Packing | None = None,
    chunk: int = 1024,
    total: Total | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprobs of given tokens and the entropy of what they were chosen from; logits in the model's dtype, then float32.

    Args:
        hidden: [tokens, width] states that predict the targets.
        weight: [vocab, width] output matrix.
        targets: [tokens] int64 ids.
        packing: how many of them belong to each sequence.
        chunk: tokens whose logits exist at the same time, about.
        total: see the module.

    Returns:
        logprobs [tokens] float32, differentiable; entropy [tokens] float32 in nats, not differentiable.
    """
    logprobs, entropy = _ChosenLogprobs.apply(
        hidden, weight, targets, packing or Packing([len(targets)], hidden.device), chunk, total
    )
    return logprobs, entropy
