"""Reductions over a row in Triton, ordered by the row's width alone. Needs a GPU and Triton.

RMSNorm: vLLM's fused kernel picks the size of its block by the number of tokens. So a row's sum is
ordered one way in a small batch and another way in a large one. Its Triton kernel for the norm
without the addition copies views first.

Log of the sum of exponentials: vLLM's kernel walks along a row with one block. That leaves most of
the GPU idle for a single sequence. Here chunks of a fixed width are summed by as many blocks, and
then the chunks one after the other.

Sum of tensor-parallel parts: the order of an all-reduce depends on the number of ranks and of
bytes. Here each element is added in the order of the ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WIDEST = 16384
"""Columns that one block normalises."""
CHUNK = 4096
"""Columns that one block sums."""
MOST_PARTS = 8
"""Parts that add_parts adds."""
_TOGETHER = 2048
"""Columns of a block's rows, if a warp reads a row at once. So the number of rows depends on their
width alone."""
_ALIGNMENT = 16
_PART_COLUMNS = 1024
"""Columns that one block of add_parts adds. Elements do not depend on each other, so this changes no
bit."""


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, y, total, outer_stride, inner_stride, inner: tl.constexpr, eps, rows,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """VECTOR: columns that a thread reads at once. With more of them, for several rows, a row's sum
    would have another order.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)[None, :]
    live = column < COLUMNS
    valid = (row < rows)[:, None] & live if ROWS > 1 else live
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    own = row.to(tl.int64)[:, None] * COLUMNS
    values = tl.load(x + start[:, None] + column, mask=valid, other=0.0)
    if ADD:
        added = values.to(tl.float32) + tl.load(residual + own + column, mask=valid, other=0.0).to(
            tl.float32
        )
        values = added.to(y.dtype.element_ty)
        tl.store(total + own + column, values, mask=valid)
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / COLUMNS
    scale = (1.0 / tl.sqrt(mean + eps))[:, None]
    # Each row reads the weight, or threads would exchange it through shared memory.
    every = tl.zeros((ROWS, 1), tl.int32) + column
    factors = tl.load(weight + every, mask=every < COLUMNS, other=0.0).to(tl.float32)
    tl.store(y + own + column, (wide * scale * factors).to(y.dtype.element_ty), mask=valid)


@triton.jit
def _chunk_sums(  # type: ignore[no-untyped-def]
    logits, maxima, sums, stride, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + column, mask=column < COLUMNS, other=-float("inf")).to(
        tl.float32
    )
    highest = tl.max(values, axis=0)
    # A chunk of nothing but -inf would otherwise come to NaN.
    offset = tl.where(highest == -float("inf"), 0.0, highest)
    tl.store(maxima + row * CHUNKS + chunk, highest)
    tl.store(sums + row * CHUNKS + chunk, tl.sum(tl.exp(values - offset), axis=0))


@triton.jit
def _combine_chunks(maxima, sums, out, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    valid = chunk < CHUNKS
    highest = tl.load(maxima + row * CHUNKS + chunk, mask=valid, other=-float("inf"))
    total = tl.load(sums + row * CHUNKS + chunk, mask=valid, other=0.0)
    peak = tl.max(highest, axis=0)
    tl.store(out + row, peak + tl.log(tl.sum(total * tl.exp(highest - peak), axis=0)))


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    logits, weights, chosen, stride, EXPERTS: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, RENORMALISED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    live = column < EXPERTS
    values = tl.load(logits + row * stride + column, mask=live, other=-float("inf")).to(tl.float32)
    grown = tl.exp(values - tl.max(values, axis=0))
    chances = tl.where(live, grown / tl.sum(grown, axis=0), -1.0)
    highest = tl.zeros((SLOTS,), dtype=tl.float32)
    numbers = tl.zeros((SLOTS,), dtype=tl.int64)
    total = 0.0
    for turn in range(COUNT):
        best = tl.max(chances, axis=0)
        number = tl.min(tl.where(chances == best, column, BLOCK), axis=0)
        # A row of NaN has no best one, and its number must still be an expert's.
        number = tl.minimum(number, EXPERTS - 1)
        highest = tl.where(slot == turn, best, highest)
        numbers = tl.where(slot == turn, number.to(tl.int64), numbers)
        chances = tl.where(column == number, -1.0, chances)
        total += best
    if RENORMALISED:
        highest = highest / total
    tl.store(weights + row * COUNT + slot, highest, mask=slot < COUNT)
    tl.store(chosen + row * COUNT + slot, numbers, mask=slot < COUNT)


@triton.jit
def _weighted_sum(  # type: ignore[no-untyped-def]
    rows, places, weights, out, width, COUNT: tl.constexpr, SIZE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    live = column < width
    total = tl.zeros((SIZE,), dtype=tl.float32)
    for slot in range(COUNT):
        place = tl.load(places + token * COUNT + slot)
        value = tl.load(rows + place * width + column, mask=live, other=0.0).to(tl.float32)
        total += tl.load(weights + token * COUNT + slot) * value
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _add_parts(  # type: ignore[no-untyped-def]
    parts, out, part_stride, row_stride, columns, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < columns
    start = parts + row * row_stride + column
    total = tl.load(start, mask=valid, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        more = tl.load(start + tl.cast(part, tl.int64) * part_stride, mask=valid, other=0.0)
        total += more.to(tl.float32)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _lay_out(  # type: ignore[no-untyped-def]
    k, v, cache, pages, offsets, token_stride, head_stride, value_token_stride, value_head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    head, column = place // DIM, place % DIM
    valid = head < HEADS
    at = (tl.load(pages + token) * HEADS + head) * PAGE + tl.load(offsets + token)
    to = cache + at * (2 * DIM) + column
    key = tl.load(k + token * token_stride + head * head_stride + column, mask=valid)
    tl.store(to, key, mask=valid)
    source = token * value_token_stride + head * value_head_stride + column
    tl.store(to + DIM, tl.load(v + source, mask=valid), mask=valid)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ops.rms_norm. x: [..., dim] of 1 to 3 dimensions."""
    if not (x.dim() in (2, 3) and _aligned(x)):
        x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() == 3 and not x.is_contiguous():
        inner, outer_stride, inner_stride = x.shape[1], x.stride(0), x.stride(1)
    else:
        flat = x.view(-1, x.shape[-1]) if x.is_contiguous() else x
        inner, outer_stride, inner_stride = 1, flat.stride(0), 0
    _launch(x, None, weight, y, None, outer_stride, inner_stride, inner, eps)
    return y


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.fused_add_rms_norm."""
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"cannot add a residual {tuple(residual.shape)} {residual.dtype} to {tuple(x.shape)} {x.dtype}: "
            "shapes and dtypes must be equal"
        )
    x, residual = x.contiguous(), residual.contiguous()
    y, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, y, total, x.shape[-1], 0, 1, eps)
    return y, total


def add_parts(parts: torch.Tensor) -> torch.Tensor:
    """See ops.add_parts. Parts and rows may have any stride; elements of a row lie side by side."""
    if parts.dim() != 3 or not 1 <= len(parts) <= MOST_PARTS:
        raise ValueError(
            f"cannot add parts of shape {tuple(parts.shape)}: take [1 to {MOST_PARTS}, rows, out]"
        )
    if parts.stride(-1) != 1:
        parts = parts.contiguous()
    count, rows, columns = parts.shape
    out = torch.empty(rows, columns, dtype=parts.dtype, device=parts.device)
    if out.numel() == 0:
        return out
    with torch.cuda.device_of(parts):
        _add_parts[(rows, triton.cdiv(columns, _PART_COLUMNS))](
            parts,
            out,
            parts.stride(0),
            parts.stride(1),
            columns,
            PARTS=count,
            BLOCK=_PART_COLUMNS,
            num_warps=4,
        )
    return out


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(row))) in float32 of each row of logits [tokens, vocab] in any floating dtype."""
    if (
        logits.dim() != 2
        or logits.stride(-1) != 1
        or logits.stride(0) % _ALIGNMENT
        or logits.data_ptr() % _ALIGNMENT
    ):
        logits = _aligned_copy(logits)
    rows, columns = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return out
    chunks = triton.cdiv(columns, CHUNK)
    maxima, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device).unbind(0)
    with torch.cuda.device(logits.device):
        _chunk_sums[(rows, chunks)](
            logits,
            maxima,
            sums,
            logits.stride(0),
            COLUMNS=columns,
            CHUNKS=chunks,
            BLOCK=CHUNK,
            num_warps=8,
        )
        _combine_chunks[(rows,)](
            maxima, sums, out, CHUNKS=chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1
        )
    return out


def route(
    logits: torch.Tensor, count: int, renormalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.route."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    tokens, experts = logits.shape
    weights = torch.empty(tokens, count, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, count, dtype=torch.int64, device=logits.device)
    if tokens:
        with torch.cuda.device_of(logits):
            _route[(tokens,)](
                logits,
                weights,
                chosen,
                logits.stride(0),
                EXPERTS=experts,
                COUNT=count,
                BLOCK=triton.next_power_of_2(experts),
                SLOTS=triton.next_power_of_2(count),
                RENORMALISED=renormalised,
                num_warps=1,
            )
    return weights, chosen


def weighted_sum(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See ops.weighted_sum."""
    rows, weights = rows.contiguous(), weights.contiguous()
    (tokens, count), width = weights.shape, rows.shape[1]
    out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    if tokens:
        with torch.cuda.device_of(rows):
            _weighted_sum[(tokens, triton.cdiv(width, 1024))](
                rows, places, weights, out, width, COUNT=count, SIZE=1024, num_warps=4
            )
    return out


def lay_out(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Write keys and values [tokens, kv_heads, dim] to their places in a contiguous cache
    [pages, kv_heads, page, 2 · dim], the key first.

    Args:
        pages, offsets: [tokens] int64, the page of each token and its place there.
    """
    tokens, heads, dim = k.shape
    k, v = (part if part.stride(2) == 1 else part.contiguous() for part in (k, v))
    with torch.cuda.device_of(k):
        _lay_out[(tokens,)](
            k, v, cache, pages, offsets, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            HEADS=heads, DIM=dim, PAGE=cache.shape[2], BLOCK=triton.next_power_of_2(heads * dim), num_warps=4,
        )  # fmt: skip


def _aligned_copy(logits: torch.Tensor) -> torch.Tensor:
    """Rows [tokens, vocab] each at a multiple of 16 elements, so that the same code is compiled for
    any vocabulary.
    """
    rows, columns = logits.shape
    wide = torch.empty(
        rows, columns + -columns % _ALIGNMENT, dtype=logits.dtype, device=logits.device
    )
    wide[:, :columns] = logits
    return wide[:, :columns]


def _aligned(x: torch.Tensor) -> bool:
    """Return whether Triton would compile the same code for it as for a contiguous copy, which it
    does by what strides divide by.
    """
    outer = all(stride % _ALIGNMENT == 0 for stride in x.stride()[:-1])
    return (
        x.stride(-1) == 1
        and outer
        and x.shape[-1] % _ALIGNMENT == 0
        and x.data_ptr() % _ALIGNMENT == 0
    )


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    y: torch.Tensor,
    total: torch.Tensor | None,
    outer_stride: int,
    inner_stride: int,
    inner: int,
    eps: float,
) -> None:
    columns = x.shape[-1]
    rows = x.numel() // columns
    if weight.shape != (columns,) or columns > WIDEST:
        raise ValueError(
            f"cannot normalise rows of {columns} with a weight {tuple(weight.shape)}: at most {WIDEST} columns"
        )
    if rows == 0:
        return
    block = triton.next_power_of_2(columns)
    vector = 16 // x.element_size()
    narrow = block <= 32 * vector
    together = _TOGETHER // block if narrow else 1
    with torch.cuda.device_of(x):
        _rms_norm[(triton.cdiv(rows, together),)](
            x,
            x if residual is None else residual,
            weight.contiguous(),
            y,
            y if total is None else total,
            outer_stride,
            inner_stride,
            inner,
            eps,
            rows,
            COLUMNS=columns,
            BLOCK=block,
            ADD=residual is not None,
            ROWS=together,
            VECTOR=max(1, min(block // 32, vector)),
            num_warps=4 if narrow else min(16, max(1, block // 256)),
        )
