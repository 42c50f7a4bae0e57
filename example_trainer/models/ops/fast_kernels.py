"""Triton kernels of the fast table: each reads and writes its tensors once, and rounds once, at the
end.

A decoder's matrix products run at the card's arithmetic rate; everything between them is bound by
memory. So between two products there is one kernel in each direction. The kernels are: residual sum
with norm, norms of heads with their rotation, the gated product, the softmax over the vocabulary.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from example_trainer.models.ops.launch import on_its_device
from example_trainer.models.ops.triton_heads import columns_of_pairs, load_pairs, turns_of_pairs

_PROGRAMS_EACH = 8
"""Programs for each multiprocessor in kernels that sum over all tokens: enough to hide latency, few
partial sums."""


@triton.jit
def _norm(
    x, residual, weight, y, total, width, eps, HAS_RESIDUAL: tl.constexpr, WIDTH: tl.constexpr
):
    """One row: r = x + residual (stored), y = weight · r / rms(r)."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, WIDTH)
    live = column < width
    value = tl.load(x + row + column, mask=live, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row + column, mask=live, other=0.0).to(tl.float32)
        tl.store(total + row + column, value.to(total.dtype.element_ty), mask=live)
        value = value.to(total.dtype.element_ty).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    tl.store(y + row + column, (value * scale * factor).to(y.dtype.element_ty), mask=live)


@triton.jit
def _norm_gradient(
    dy, x, weight, extra, dx, partial, rows, width, eps, each, HAS_EXTRA: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """dx of a run of `each` rows, plus a gradient that reaches x by another way; partial[program] =
    their share of dweight.
    """
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    live = column < width
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    share = tl.zeros((WIDTH,), dtype=tl.float32)
    for row in range(program * each, tl.minimum((program + 1) * each, rows)):
        at = tl.cast(row, tl.int64) * width + column
        value = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
        upstream = tl.load(dy + at, mask=live, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
        normed = value * scale
        share += upstream * normed
        slope = upstream * factor
        result = scale * (slope - normed * (tl.sum(slope * normed, axis=0) / width))
        if HAS_EXTRA:
            result += tl.load(extra + at, mask=live, other=0.0).to(tl.float32)
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=live)
    tl.store(partial + program.to(tl.int64) * width + column, share, mask=live)


@triton.jit
def _heads(
    qkv, q, k, q_weight, k_weight, positions, table, tokens, heads, kv_heads, stride, eps,
    NORMED: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One query or key head of a block of tokens, normalised and rotated; queries come before keys
    in qkv.
    """
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, PADDED)
    column, partner = columns_of_pairs(pair, HALF, PAIRS, INTERLEAVED)
    in_head = pair < HALF
    live = (row < tokens)[:, None] & in_head[None, :]
    at = row[:, None] * stride + head * (2 * HALF)
    first, second = load_pairs(qkv, at, column, partner, live)
    is_query = head < heads
    if NORMED:
        weight = q_weight if is_query else k_weight
        scale = 1.0 / tl.sqrt(
            (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF) + eps
        )
        first *= (
            scale[:, None]
            * tl.load(weight + column, mask=in_head, other=0.0).to(tl.float32)[None, :]
        )
        second *= (
            scale[:, None]
            * tl.load(weight + partner, mask=in_head, other=0.0).to(tl.float32)[None, :]
        )
    cos, sin = turns_of_pairs(positions, table, row, row < tokens, pair, live, PAIRS)
    out = q if is_query else k
    count = heads if is_query else kv_heads
    local = head if is_query else head - heads
    to = row[:, None] * (count * 2 * HALF) + local * (2 * HALF)
    turned = (first * cos - second * sin).to(out.dtype.element_ty)
    turned_second = (second * cos + first * sin).to(out.dtype.element_ty)
    tl.store(out + to + column[None, :], turned, mask=live)
    tl.store(out + to + partner[None, :], turned_second, mask=live)


@triton.jit
def _silu_and_mul(x, y, width, SIZE: tl.constexpr):
    """y = silu(x[:width]) · x[width:] of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    live = column < width
    gate = tl.load(x + row * (2 * width) + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * width) + width + column, mask=live, other=0.0).to(tl.float32)
    tl.store(
        y + row * width + column, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=live
    )


@triton.jit
def _softmax_figures(
    logits, targets, logprobs, entropies, lses, width, stride, inverse_temperature, BY_ROW: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Figures of one row, in one pass: log Σ exp, the target's logprob, and the entropy
    log Σ exp - Σ softmax · logit.

    BY_ROW: `inverse_temperature` is where each row's is, and not one number for all.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    if BY_ROW:
        inverse = tl.load(inverse_temperature + row)
    else:
        inverse = inverse_temperature
    top = tl.full((SIZE,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((SIZE,), dtype=tl.float32)
    weighted = tl.zeros((SIZE,), dtype=tl.float32)
    # Every lane keeps a maximum and sums of its own, so that nothing is reduced before the end.
    for first in range(0, width, SIZE):
        live = first + column < width
        value = tl.load(logits + row * stride + first + column, mask=live, other=float("-inf")).to(
            tl.float32
        )
        value *= inverse
        higher = tl.maximum(top, value)
        fade = tl.where(top == float("-inf"), 0.0, tl.exp(top - higher))
        chance = tl.where(live, tl.exp(value - higher), 0.0)
        mass = mass * fade + chance
        weighted = weighted * fade + tl.where(live, chance * value, 0.0)
        top = higher
    highest = tl.max(top, axis=0)
    fade = tl.where(top == float("-inf"), 0.0, tl.exp(top - highest))
    whole = tl.sum(mass * fade, axis=0)
    lse = highest + tl.log(whole)
    target = tl.load(logits + row * stride + tl.load(targets + row)).to(tl.float32) * inverse
    tl.store(lses + row, lse)
    tl.store(logprobs + row, target - lse)
    tl.store(entropies + row, lse - tl.sum(weighted * fade, axis=0) / whole)


def _warps(width: int) -> int:
    return max(1, min(16, width // 512))


@on_its_device
def norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of r = x + residual, and r itself, of contiguous [rows, width].

    Without a residual r is x.
    """
    rows, width = x.shape
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    padded = triton.next_power_of_2(width)
    _norm[(rows,)](
        x, x if residual is None else residual, weight, y, total, width, eps,
        HAS_RESIDUAL=residual is not None, WIDTH=padded, num_warps=_warps(padded),
    )  # fmt: skip
    return y, total


@on_its_device
def norm_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, extra: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dx [rows, width] of RMSNorm, plus `extra`; and the gradient of its weight, float32."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    each = triton.cdiv(rows, _PROGRAMS_EACH * _multiprocessors(x))
    programs = triton.cdiv(rows, each)
    partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(width)
    _norm_gradient[(programs,)](
        dy, x, weight, dy if extra is None else extra, dx, partial, rows, width, eps, each,
        HAS_EXTRA=extra is not None, WIDTH=padded, num_warps=_warps(padded),
    )  # fmt: skip
    return dx, partial.sum(0)


_HEAD_ROWS = 64


@on_its_device
def heads(
    qkv: Tensor,
    kv_heads: int,
    head_dim: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    positions: Tensor,
    table: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Queries and keys of qkv [tokens, heads + 2 · kv_heads, head_dim], normalised and rotated."""
    tokens = qkv.shape[0]
    count = qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty((tokens, count, head_dim), dtype=qkv.dtype, device=qkv.device)
    k = torch.empty((tokens, kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight = norms or (table, table)
    _heads[(triton.cdiv(tokens, _HEAD_ROWS), count + kv_heads)](
        qkv, q, k, q_weight, k_weight, positions, table, tokens, count, kv_heads, qkv.stride(0), eps,
        NORMED=norms is not None, HALF=head_dim // 2, PAIRS=table.shape[1] // 2, INTERLEAVED=interleaved,
        PADDED=triton.next_power_of_2(head_dim // 2), ROWS=_HEAD_ROWS,
        num_warps=4,
    )  # fmt: skip
    return q, k


@on_its_device
def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) · up of contiguous x [rows, 2 · width]."""
    rows, width = x.shape[0], x.shape[1] // 2
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _silu_and_mul[(rows, triton.cdiv(width, 1024))](x, y, width, SIZE=1024, num_warps=4)
    return y


@on_its_device
def softmax_figures(
    logits: Tensor, targets: Tensor, inverse_temperature: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of each target, entropy, and log of the softmax's denominator, all [rows] float32, of
    logits [rows, vocab].

    Args:
        inverse_temperature: multiplies the logits; a number, or [rows] float32.
    """
    logprobs, entropies, lses = (
        torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    _softmax_figures[(len(logits),)](
        logits, targets, logprobs, entropies, lses, logits.shape[1], logits.stride(0), inverse_temperature,
        BY_ROW=isinstance(inverse_temperature, Tensor), SIZE=4096, num_warps=8,
    )  # fmt: skip
    return logprobs, entropies, lses


def _multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
