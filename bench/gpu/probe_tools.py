"""What the determinism probe measures with: rows compared bit by bit, and microseconds of a call
inside a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

COLD_BYTES = 200 << 20
"""Weights of a measurement together: more than the GPU's cache holds, as in a model whose layers
follow each other."""


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that NaN equals NaN and 0 differs from -0."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def differing_rows(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How many rows (first dimension) differ in any bit, as a tensor on the device: nothing waits
    for it.
    """
    return (bits(one) != bits(other)).flatten(1).any(1).sum()


def batch_dependence(
    operation: Callable[[slice], torch.Tensor], sizes: Iterable[int], total: int, offset: int = 7
) -> dict[str, Any]:
    """Compare each batch of some of the rows with the same rows of the largest batch.

    Args:
        operation: result for a slice of the rows, first dimension the rows.
        sizes: of the batches; each is taken from the start, and from `offset` where it fits.
        total: rows of the largest batch.

    Returns:
        {"batches", "rows", "differ": rows, "first_sizes": up to six sizes of batches in which one
        differs}
    """
    whole = operation(slice(0, total))
    cases, counts = [], []
    for size in sizes:
        for start in {0, min(offset, total - size)}:
            cases.append(size)
            counts.append(
                differing_rows(operation(slice(start, start + size)), whole[start : start + size])
            )
    found = torch.stack(counts).tolist()
    wrong = sorted({size for size, count in zip(cases, found, strict=True) if count})
    return {
        "batches": len(cases),
        "rows": sum(cases),
        "differ": int(sum(found)),
        "first_sizes": wrong[:6],
    }


def microseconds(calls: Sequence[Callable[[], Any]], repeats: int = 5) -> float:
    """Of one call, on average, when all of them run one after the other in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return round(begin.elapsed_time(end) * 1e3 / repeats / len(calls), 2)


def time_linear(
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], out: int, width: int, rows: int
) -> float:
    """Microseconds of a product with a weight [out, width] that is not in the cache."""
    copies = min(64, max(2, math.ceil(COLD_BYTES / (2 * out * width)))) if rows <= 512 else 2
    weights = torch.randn(copies, out, width, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    return microseconds([lambda w=w: linear(x, w) for w in weights.unbind(0)])  # type: ignore[misc]
