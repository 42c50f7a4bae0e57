"""Candidates for products of a few rows: the weight is the tall operand, so that each tile of it
goes to its own processor.

A sum still runs over the whole width in steps of 16 in one accumulator, so the bits may be those of
cuBLASLt without split-K; the probe tells. Needs a GPU and Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

CANDIDATES: dict[str, dict[str, Any]] = {
    "wgmma 64x16": {"block_out": 64, "block_k": 128, "stages": 6, "warps": 4},
    "mma 16x16": {"block_out": 16, "block_k": 256, "stages": 5, "warps": 1},
    "mma 32x16": {"block_out": 32, "block_k": 128, "stages": 6, "warps": 2},
}
"""The first uses Hopper's wide instruction, the others the one of earlier GPUs, on four or two
times as many processors."""


@triton.jit
def _small_linear(  # type: ignore[no-untyped-def]
    x, weight, y, rows, x_stride, OUT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    step = tl.arange(0, BLOCK_K)
    weights = weight + out.to(tl.int64)[:, None] * WIDTH + step[None, :]
    inputs = x + row[None, :] * x_stride + step[:, None]
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    for _ in range(0, WIDTH, BLOCK_K):
        a = tl.load(weights)
        b = tl.load(inputs, mask=row[None, :] < rows, other=0.0)
        total = tl.dot(a, b, total)
        weights += BLOCK_K
        inputs += BLOCK_K
    tl.store(
        y + row[None, :] * OUT + out[:, None],
        total.to(y.dtype.element_ty),
        mask=row[None, :] < rows,
    )


def small_linear(
    x: torch.Tensor, weight: torch.Tensor, block_out: int, block_k: int, stages: int, warps: int
) -> torch.Tensor:
    """x [rows, width] @ weight[out, width].T; out a multiple of block_out, width of block_k."""
    rows, width = x.shape
    out = weight.shape[0]
    y = torch.empty(rows, out, dtype=x.dtype, device=x.device)
    grid = (out // block_out, triton.cdiv(rows, 16))
    _small_linear[grid](
        x, weight, y, rows, x.stride(0), OUT=out, WIDTH=width,
        BLOCK_OUT=block_out, BLOCK_ROWS=16, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y
