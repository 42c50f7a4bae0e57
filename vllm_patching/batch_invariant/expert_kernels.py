"""The experts' rows in Triton, for a mixture's few tokens. Needs a GPU and Triton.

Assignment: every program counts the rows of the experts before its own, and then writes its own
ones. So one launch sorts the choices, and nothing waits for another program.

Product of few rows: a step of decoding reads all matrices for a handful of rows each. So the speed
of the memory is its limit. PyTorch's grouped product has tiles of at least 64 rows and first
computes addresses in a launch of its own. Here the matrix is the wide side of the tensor cores'
products, and the rows of an expert are the narrow side. An element is the sum over its inputs, 16
after 16, in one accumulator, as in the grouped product on Hopper. So both give the same bits, and
the self-test compares them.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_SLOTS = 2048
"""Slots that a program of the assignment reads at once."""


@dataclass(frozen=True)
class ProductBlocks:
    """The programs of a product; they change no bit.

    Attributes:
        rows: of an expert, at once.
        outputs: of the matrix, for each program.
        inputs: read at once.
        warps, stages: of a program, and its blocks of inputs that are on their way.
    """

    rows: int = 16
    outputs: int = 128
    inputs: int = 64
    warps: int = 4
    stages: int = 4

    def __str__(self) -> str:
        sizes = f"{self.rows} rows, {self.outputs} x {self.inputs}"
        return f"{sizes}, {self.warps} warps, {self.stages} stages"


NARROW, MIDDLE, WIDE = ProductBlocks(), ProductBlocks(rows=32), ProductBlocks(rows=64)
NARROW_ROWS, MIDDLE_ROWS, MOST_ROWS = 8, 16, 32
"""Rows of an expert, on average: up to the first NARROW is taken, then MIDDLE, then WIDE, and above
the third PyTorch's grouped product."""


@triton.jit(do_not_specialize=["slots"])
def _assign(chosen, order, tokens, places, ends, slots, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Write the slots, tokens and end of one expert's rows, and the place of each of these slots."""
    expert = tl.program_id(0)
    before = 0
    own = 0
    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        number = tl.load(chosen + slot, mask=slot < slots, other=2147483647).to(tl.int32)
        before += tl.sum((number < expert).to(tl.int32), axis=0)
        own += tl.sum((number == expert).to(tl.int32), axis=0)
    tl.store(ends + expert, before + own)
    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        number = tl.load(chosen + slot, mask=slot < slots, other=2147483647).to(tl.int32)
        mine = number == expert
        one = mine.to(tl.int32)
        row = before + tl.cumsum(one, axis=0) - one
        tl.store(order + row, slot.to(tl.int64), mask=mine)
        tl.store(tokens + row, (slot // COUNT).to(tl.int64), mask=mine)
        tl.store(places + slot, row.to(tl.int64), mask=mine)
        before += tl.sum(one, axis=0)


@triton.jit
def _few_rows(
    x, weight, out, ends, tokens, x_stride,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, TAKES: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """out = x weight[expert]ᵀ for OUTPUTS columns of one expert's rows.

    WIDTH, DEPTH: outputs and inputs of a matrix.
    TAKES: a row's place in x is in `tokens`; else x has the rows in their order.
    """
    expert = tl.program_id(1)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    matrix = weight + expert.to(tl.int64) * (WIDTH * DEPTH) + output[:, None] * DEPTH
    inner = tl.arange(0, INPUTS)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        live = row < last
        source = row.to(tl.int64)
        if TAKES:
            source = tl.load(tokens + row, mask=live, other=0)
        values = x + source[:, None] * x_stride
        total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
        for begin in range(0, DEPTH, INPUTS):
            column = begin + inner
            wanted = live[:, None]
            if DEPTH % INPUTS:
                wanted = wanted & (column < DEPTH)[None, :]
            if DEPTH % INPUTS or WIDTH % OUTPUTS:
                there = (output < WIDTH)[:, None] & (column < DEPTH)[None, :]
                factors = tl.load(matrix + column[None, :], mask=there, other=0.0)
            else:
                factors = tl.load(matrix + column[None, :])
            value = tl.load(values + column[None, :], mask=wanted, other=0.0)
            total = tl.dot(factors, tl.trans(value), total, input_precision="ieee")
        at = row.to(tl.int64)[:, None] * WIDTH + output[None, :]
        wanted = live[:, None] & (output < WIDTH)[None, :]
        tl.store(out + at, tl.trans(total).to(out.dtype.element_ty), mask=wanted)


def assign(
    chosen: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ops.assign; the parts of Assigned."""
    chosen = chosen.contiguous()
    slots = chosen.numel()
    order, tokens, places = torch.empty(3, slots, dtype=torch.int64, device=chosen.device).unbind(0)
    ends = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    with torch.cuda.device_of(chosen):
        _assign[(experts,)](
            chosen,
            order,
            tokens,
            places,
            ends,
            slots,
            COUNT=chosen.shape[1],
            BLOCK=_SLOTS,
            num_warps=8,
        )
    return order, tokens, places, ends


def takes(rows: int, weight: torch.Tensor) -> bool:
    """Report if `few_rows` is the product to take for so many rows and these matrices.

    Bits were compared on Hopper alone, and transposed matrices have no wide reads.
    """
    return (
        rows <= MOST_ROWS * len(weight)
        and weight.is_contiguous()
        and weight.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(weight.device)[0] == 9
    )


def few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    tokens: torch.Tensor | None = None,
    blocks: ProductBlocks | None = None,
) -> torch.Tensor:
    """See ops.expert_linear; not given `blocks`: by the rows of an expert, on average."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows = len(x if tokens is None else tokens)
    experts, width, depth = weight.shape
    if blocks is None:
        average = rows / experts
        blocks = NARROW if average <= NARROW_ROWS else MIDDLE if average <= MIDDLE_ROWS else WIDE
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    with torch.cuda.device_of(x):
        _few_rows[(triton.cdiv(width, blocks.outputs), experts)](
            x,
            weight,
            out,
            ends,
            ends if tokens is None else tokens,
            x.stride(0),
            WIDTH=width,
            DEPTH=depth,
            TAKES=tokens is not None,
            ROWS=blocks.rows,
            OUTPUTS=blocks.outputs,
            INPUTS=blocks.inputs,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    return out
