"""Triton kernels of the attention's backward pass: causal, packed sequences, every sum in an order
that is fixed.

Where spans continue others, `dq` is summed over copies of the keys that each span sees, which lie
one after the other. The tokens that see a span's keys follow it in the packing (`Packing.nested`).
So `dk` and `dv` are summed over all of them in the order in which they lie.

The probabilities are made again, block by block. They come from the logarithms of the softmax's
denominators that the forward pass kept (FlashAttention-2, arXiv:2307.08691, section 3.1.2). Nothing
is added atomically. One program owns each block of `dq`, and one each block of `dk` and `dv`. It
sums the latter over the query heads that share the key head. Blocks are counted from the beginning
of each span. So the bits of the gradient of a sequence that shares nothing do not depend on the
rest of its bin. For the same reason numbers that depend on the packing are kept from choosing
another compilation (`do_not_specialize`).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from example_trainer.models.packing import TILE, Packing


@triton.jit(do_not_specialize=["rows"])
def _row_dots(a, b, out, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out[row] = Σ a[row] · b[row] for contiguous [rows, width]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    left = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(b + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(left * right, axis=1), mask=row < rows)


@triton.jit(do_not_specialize=["tokens"])
def _query_gradient(
    q, k, v, do, lse, delta, dq, tile_starts, tile_lengths, tile_first_keys, tile_shifts, scale, tokens, heads,
    kv_heads, group, stride_q, stride_k, stride_v, WIDTH: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries of one head; walks over the keys from the sequence's first. The
    arguments k and v are of the keys that each span sees; see Tiles for their numbers and places.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // group
    start = tl.load(tile_starts + tile)
    end = start + tl.load(tile_lengths + tile)
    begin = tl.load(tile_first_keys + tile)
    shift = tl.load(tile_shifts + tile)
    row = start + tl.arange(0, QUERIES)
    column = tl.arange(0, PADDED)
    live = row < end
    in_head = column < WIDTH
    mask = live[:, None] & in_head[None, :]
    queries = tl.load(
        q + row.to(tl.int64)[:, None] * stride_q + head * WIDTH + column[None, :],
        mask=mask,
        other=0.0,
    )
    at = row.to(tl.int64)[:, None] * (heads * WIDTH) + head * WIDTH + column[None, :]
    upstream = tl.load(do + at, mask=mask, other=0.0)
    row_lse = tl.load(lse + head.to(tl.int64) * tokens + row, mask=live, other=0.0)
    row_delta = tl.load(delta + row.to(tl.int64) * heads + head, mask=live, other=0.0)
    total = tl.zeros((QUERIES, PADDED), dtype=tl.float32)
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        key_mask = (key < end)[:, None] & in_head[None, :]
        key_at = (key + shift).to(tl.int64)[:, None]
        keys = tl.load(
            k + key_at * stride_k + kv_head * WIDTH + column[None, :], mask=key_mask, other=0.0
        )
        values = tl.load(
            v + key_at * stride_v + kv_head * WIDTH + column[None, :], mask=key_mask, other=0.0
        )
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        seen = (key[None, :] <= row[:, None]) & live[:, None]
        chance = tl.where(seen, tl.exp(scores - row_lse[:, None]), 0.0)
        slope = tl.dot(upstream, tl.trans(values), input_precision="ieee")
        slope = chance * (slope - row_delta[:, None]) * scale
        total = tl.dot(slope.to(keys.dtype), keys, total, input_precision="ieee")
    tl.store(dq + at, total.to(dq.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _key_value_gradient(
    q, k, v, do, lse, delta, dk, dv, tile_starts, tile_lengths, tile_ends, scale, tokens, heads, kv_heads, group,
    stride_q, stride_k, stride_v, WIDTH: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one key head; walks over its query heads. In each it walks
    over the queries behind it, of its own span and then of the spans that continue it.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    start = tl.load(tile_starts + tile)
    tile_end = start + tl.load(tile_lengths + tile)
    end = tl.load(tile_ends + tile)
    key = start + tl.arange(0, KEYS)
    column = tl.arange(0, PADDED)
    live = key < tile_end
    in_head = column < WIDTH
    mask = live[:, None] & in_head[None, :]
    key_at = key.to(tl.int64)[:, None]
    keys = tl.load(k + key_at * stride_k + kv_head * WIDTH + column[None, :], mask=mask, other=0.0)
    values = tl.load(
        v + key_at * stride_v + kv_head * WIDTH + column[None, :], mask=mask, other=0.0
    )
    key_total = tl.zeros((KEYS, PADDED), dtype=tl.float32)
    value_total = tl.zeros((KEYS, PADDED), dtype=tl.float32)
    for member in range(0, group):
        head = kv_head * group + member
        for first in range(start, end, QUERIES):
            row = first + tl.arange(0, QUERIES)
            row_live = row < end
            row_mask = row_live[:, None] & in_head[None, :]
            row_at = row.to(tl.int64)
            queries = tl.load(
                q + row_at[:, None] * stride_q + head * WIDTH + column[None, :],
                mask=row_mask,
                other=0.0,
            )
            at = row_at[:, None] * (heads * WIDTH) + head * WIDTH + column[None, :]
            upstream = tl.load(do + at, mask=row_mask, other=0.0)
            row_lse = tl.load(lse + head.to(tl.int64) * tokens + row, mask=row_live, other=0.0)
            row_delta = tl.load(delta + row_at * heads + head, mask=row_live, other=0.0)
            scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale
            seen = (key[:, None] <= row[None, :]) & row_live[None, :] & live[:, None]
            chance = tl.where(seen, tl.exp(scores - row_lse[None, :]), 0.0)
            value_total = tl.dot(
                chance.to(upstream.dtype), upstream, value_total, input_precision="ieee"
            )
            slope = tl.dot(values, tl.trans(upstream), input_precision="ieee")
            slope = chance * (slope - row_delta[None, :]) * scale
            key_total = tl.dot(slope.to(queries.dtype), queries, key_total, input_precision="ieee")
    at = key_at * (kv_heads * WIDTH) + kv_head * WIDTH + column[None, :]
    tl.store(dk + at, key_total.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + at, value_total.to(dv.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class AttentionBlocks:
    """The blocks of one kernel. Its sums run over steps of 16 queries or keys from the beginning of
    the sequence with any sizes, so bits stay.

    Attributes:
        queries, keys: of a block.
        warps, stages: of a program, and its blocks that are on their way.
    """

    queries: int = TILE
    keys: int = TILE
    warps: int = 4
    stages: int = 1

    def options(self) -> dict[str, int]:
        """Return them as the kernels' arguments."""
        sizes = {"QUERIES": self.queries, "KEYS": self.keys}
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}


def attention_blocks(dtype: torch.dtype, padded: int) -> tuple[AttentionBlocks, AttentionBlocks]:
    """Choose the blocks of dq, and the blocks of dk and dv, for a width.

    Measured on an H200 at widths of 64 and 128, with 64 queries and keys. Larger blocks, more warps
    or more stages in flight gain nothing. In float32 a block of 64 would not fit into shared memory.
    """
    size = TILE // 2 if dtype == torch.float32 else TILE
    square = AttentionBlocks(size, size, warps=8 if padded > 128 else 4)
    return replace(square, stages=2), square


def attention_backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packing: Packing,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of causal attention over packed sequences.

    Args:
        upstream, out: [tokens, heads, width] gradient of the output, and the output.
        q: [tokens, heads, width]; k, v: [tokens, kv_heads, width]. Tokens may be strided, the rest
            is contiguous.
        lse: [heads, tokens] float32, natural logarithm of each query's softmax denominator.
        packing: the spans; nested.
        scale: factor of the scores.

    Returns:
        dq, dk, dv, contiguous, in the inputs' dtypes.
    """
    q, k, v = (_rows_contiguous(part) for part in (q, k, v))
    upstream, out, lse = upstream.contiguous(), out.contiguous(), lse.contiguous()
    tokens, heads, width = q.shape
    kv_heads = k.shape[1]
    padded = max(16, triton.next_power_of_2(width))
    delta = _dots(out, upstream, padded)
    dq, dk, dv = (torch.empty(part.shape, dtype=q.dtype, device=q.device) for part in (q, k, v))
    by_queries, by_keys = attention_blocks(q.dtype, padded)
    sizes = (scale, tokens, heads, kv_heads, heads // kv_heads, q.stride(0))
    tiles = packing.tiles(by_queries.queries)
    rows = packing.key_rows
    seen = (k, v) if rows is None else (k.index_select(0, rows), v.index_select(0, rows))
    _query_gradient[(len(tiles.starts), heads)](
        q, *seen, upstream, lse, delta, dq, tiles.starts, tiles.lengths, tiles.first_keys, tiles.shifts,
        *sizes, seen[0].stride(0), seen[1].stride(0), width, padded, **by_queries.options(),
    )  # fmt: skip
    tiles = packing.tiles(by_keys.keys)
    _key_value_gradient[(len(tiles.starts), kv_heads)](
        q, k, v, upstream, lse, delta, dk, dv, tiles.starts, tiles.lengths, tiles.ends,
        *sizes, k.stride(0), v.stride(0), width, padded, **by_keys.options(),
    )  # fmt: skip
    return dq, dk, dv


def _dots(out: Tensor, upstream: Tensor, padded: int) -> Tensor:
    """Return the dot product of each row of two [tokens, heads, width], in float32."""
    tokens, heads, width = out.shape
    dots = torch.empty((tokens, heads), dtype=torch.float32, device=out.device)
    rows = max(1, 2048 // padded)
    _row_dots[(triton.cdiv(tokens * heads, rows),)](
        out, upstream, dots, tokens * heads, width, ROWS=rows, WIDTH=padded, num_warps=4
    )
    return dots


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
