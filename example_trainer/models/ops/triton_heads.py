"""The way back through the norms of heads and their rotation, in one kernel.

A program takes all heads of a kind, queries or keys or values, for a part of a tile of tokens. It
adds the shares of the norm's weight head after head. So they do not depend on what a sequence is
packed with.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from example_trainer.models.ops.launch import on_its_device
from example_trainer.models.packing import TILE, Packing


@triton.jit
def columns_of_pairs(pair, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two columns of a head's pair. The first PAIRS pairs are rotated; the others only share
    the work of loading what stays as it is.
    """
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + PAIRS
    rotated = pair < PAIRS
    return tl.where(rotated, first, pair + PAIRS), tl.where(rotated, second, pair + HALF)


@triton.jit
def load_pairs(x, at, column, partner, live):
    """The two values of each pair, in float32."""
    first = tl.load(x + at + column[None, :], mask=live, other=0.0).to(tl.float32)
    second = tl.load(x + at + partner[None, :], mask=live, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def turns_of_pairs(positions, table, row, inside, pair, live, PAIRS: tl.constexpr):
    """Cosine and sine by which each pair is rotated; 1 and 0 for a pair that stays."""
    place = tl.load(positions + row, mask=inside, other=0)[:, None] * (2 * PAIRS) + pair[None, :]
    turns = live & (pair < PAIRS)[None, :]
    cos = tl.load(table + place, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(table + place + PAIRS, mask=turns, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def _copy_heads(x, to, row, pair, live, count, first, width, HALF: tl.constexpr):
    """Copy `count` heads of some tokens to the place of head `first` in rows of `width`."""
    for local in range(0, count):
        source = row[:, None] * (count * 2 * HALF) + local * (2 * HALF)
        place = row[:, None] * width + (first + local) * (2 * HALF)
        for half in tl.static_range(2):
            column = pair[None, :] + half * HALF
            tl.store(to + place + column, tl.load(x + source + column, mask=live), mask=live)


@triton.jit
def _through_norm(
    first, second, normed, second_normed, factor, second_factor, eps, HALF: tl.constexpr
):
    """Gradients of a head's values from its normalised values' gradients; and the shares of the weight's
    gradient.

    first, second: [rows, pairs] the gradients of each pair's halves; normed, second_normed: the
    values themselves.
    """
    squares = tl.sum(normed * normed, axis=1) + tl.sum(second_normed * second_normed, axis=1)
    scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
    normed *= scale
    second_normed *= scale
    share = tl.sum(first * normed, axis=0)
    second_share = tl.sum(second * second_normed, axis=0)
    first *= factor[None, :]
    second *= second_factor[None, :]
    mean = tl.sum(first * normed, axis=1) + tl.sum(second * second_normed, axis=1)
    mean = (mean / (2 * HALF))[:, None]
    first = scale * (first - normed * mean)
    second = scale * (second - second_normed * mean)
    return first, second, share, second_share


@triton.jit
def _heads_gradient(
    dq, dk, dv, qkv, dqkv, q_weight, k_weight, positions, table, shares, tile_starts, tile_lengths, heads, kv_heads,
    stride, eps, NORMED: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of all heads of one kind in ROWS tokens of a tile: rotated back, then through the
    norm. A value's gradient is copied.

    shares[kind, tile, part] is these tokens' share of the gradient of the norm's weight.
    """
    tile = tl.program_id(0)
    kind = tl.program_id(1)
    part = tl.program_id(2)
    rows = part * ROWS + tl.arange(0, ROWS)
    inside = rows < tl.load(tile_lengths + tile)
    row = tl.load(tile_starts + tile).to(tl.int64) + rows
    pair = tl.arange(0, PADDED)
    column, partner = columns_of_pairs(pair, HALF, PAIRS, INTERLEAVED)
    in_head = pair < HALF
    live = inside[:, None] & in_head[None, :]
    width = (heads + 2 * kv_heads) * 2 * HALF
    if kind == 2:
        _copy_heads(dv, dqkv, row, pair, live, kv_heads, heads + kv_heads, width, HALF)
    else:
        is_query = kind == 0
        upstream = dq if is_query else dk
        weight = q_weight if is_query else k_weight
        count = heads if is_query else kv_heads
        before = 0 if is_query else heads
        cos, sin = turns_of_pairs(positions, table, row, inside, pair, live, PAIRS)
        if NORMED:
            factor = tl.load(weight + column, mask=in_head, other=0.0).to(tl.float32)
            second_factor = tl.load(weight + partner, mask=in_head, other=0.0).to(tl.float32)
        share = tl.zeros((PADDED,), dtype=tl.float32)
        second_share = tl.zeros((PADDED,), dtype=tl.float32)
        for local in range(0, count):
            at = row[:, None] * (count * 2 * HALF) + local * (2 * HALF)
            rotated, second_rotated = load_pairs(upstream, at, column, partner, live)
            # A rotation's transpose is the rotation back.
            first = rotated * cos + second_rotated * sin
            second = second_rotated * cos - rotated * sin
            if NORMED:
                source = row[:, None] * stride + (before + local) * (2 * HALF)
                normed, second_normed = load_pairs(qkv, source, column, partner, live)
                first, second, more, second_more = _through_norm(
                    first, second, normed, second_normed, factor, second_factor, eps, HALF
                )
                share += more
                second_share += second_more
            to = row[:, None] * width + (before + local) * (2 * HALF)
            tl.store(dqkv + to + column[None, :], first.to(dqkv.dtype.element_ty), mask=live)
            tl.store(dqkv + to + partner[None, :], second.to(dqkv.dtype.element_ty), mask=live)
        if NORMED:
            own = (kind * tl.num_programs(0) + tile) * tl.num_programs(2) + part
            own = own.to(tl.int64) * (2 * HALF)
            tl.store(shares + own + column, share, mask=in_head)
            tl.store(shares + own + partner, second_share, mask=in_head)


_ROWS = 16
"""Tokens of a program: more would leave few programs room for their registers."""


@on_its_device
def heads_gradient(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    packing: Packing,
    table: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See torch_gradients.heads_gradient; the shares are [2, tiles, parts, head_dim] float32."""
    tokens, heads, head_dim = dq.shape
    kv_heads = dk.shape[1]
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    dqkv = torch.empty((tokens, qkv.shape[1]), dtype=qkv.dtype, device=qkv.device)
    starts, lengths = packing.tiles()[:2]
    shares = None
    if norms is not None:
        size = (2, len(starts), TILE // _ROWS, head_dim)
        shares = torch.empty(size, dtype=torch.float32, device=qkv.device)
    q_weight, k_weight = norms or (table, table)
    _heads_gradient[(len(starts), 3, TILE // _ROWS)](
        dq, dk, dv, qkv, dqkv, q_weight, k_weight, packing.positions, table, dqkv if shares is None else shares, starts,
        lengths, heads, kv_heads, qkv.stride(0), eps, NORMED=norms is not None, HALF=head_dim // 2,
        PAIRS=table.shape[1] // 2, INTERLEAVED=interleaved, PADDED=triton.next_power_of_2(head_dim // 2), ROWS=_ROWS,
        num_warps=4 if head_dim <= 128 else 8,
    )  # fmt: skip
    return dqkv, shares
