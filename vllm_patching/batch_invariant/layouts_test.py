"""The part of the self-test for layouts.

A tensor-parallel rank's share of an operation must have the bits that a trainer with another number
of ranks computes. vLLM's sum over ranks must be the sum of the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.bits import describe_difference, random_rows, same_bits
from vllm_patching.batch_invariant.patches import sum_over_ranks
from vllm_patching.batch_invariant.plan import SumPlan

SPLIT_LENGTHS = (1, 63, 257, 1025)
"""Tokens of the sequences whose heads are split."""
SUMMED_ROWS = (1, 2, 3, 17, 64, 300, 2056)
"""Rows of the sums over ranks: a decode step, and chunks of a prompt. At a width of 2048 the last
has more than the 8 MiB that vLLM's all-reduce takes at once."""


def wider(ranks: int) -> list[int]:
    """Return how many times as wide a trainer's product may be as a rank's."""
    return [factor for factor in SumPlan(ranks).trainer_ranks() if factor > 1]


def wide_rows(x: torch.Tensor, weight: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return the product of some rows, as a trainer of fewer ranks computes it."""
    return ops.linear(x[rows], weight)


def width_checks(
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]], ranks: int
) -> Iterator[tuple[str, int, Any, torch.Tensor]]:
    """Yield a rank's product of each width against the same columns within a wider one.

    Args:
        weights: name -> this rank's weight whose outputs are split, and rows of inputs.
        ranks: tensor-parallel ranks of the server.

    Yields:
        (name, rows, operation, the expected result for all rows).
    """
    for name, (weight, x) in weights.items():
        narrow = ops.linear(x, weight)
        for factor in wider(ranks):
            operation = partial(wide_rows, x, weight.repeat(factor, 1))
            title = f"linear {name} {list(weight.shape)} within {factor} times the width"
            yield title, len(x), operation, narrow.repeat(1, factor)


def row_check(
    name: str, weight: torch.Tensor, x: torch.Tensor, ranks: int
) -> tuple[str, int, Any, torch.Tensor]:
    """Return the sum of parts as a trainer of one rank takes it, against the kernel's sum.

    Args:
        name: of the layer.
        weight: this rank's, whose inputs are split.
        x: rows of this rank's inputs; every rank gets other ones.
        ranks: tensor-parallel ranks of the server.

    Returns:
        (name, rows, operation, the expected result for all rows).
    """
    inputs = [x.roll(rank, 0) for rank in range(ranks)]
    expected = ops.add_parts(torch.stack([ops.linear(one, weight) for one in inputs]))
    whole, wide = torch.cat(inputs, dim=1), weight.repeat(1, ranks)
    title = f"row_linear {name} {list(weight.shape)} in {ranks} parts"
    return title, len(x), partial(row_rows, whole, wide, ranks), expected


def row_rows(x: torch.Tensor, weight: torch.Tensor, parts: int, rows: slice) -> torch.Tensor:
    """Return the sum of parts of some rows, as a trainer of one rank computes it."""
    return ops.row_linear(x[rows], weight, parts)


def split_attention_failure(
    heads: int,
    kv_heads: int,
    dim: int,
    ranks: int,
    like: torch.Tensor,
    lengths: tuple[int, ...] = SPLIT_LENGTHS,
) -> str:
    """Compare attention of each rank's heads with attention of all heads. Empty, or one line.

    Args:
        heads, kv_heads, dim: of the whole model. Ranks above kv_heads share a head of keys.
        ranks: tensor-parallel ranks of the server.
        like: a tensor of its device and dtype.
        lengths: of the sequences.
    """
    generator = torch.Generator(like.device).manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), h, dim, generator=generator, device=like.device).to(like.dtype)
        for h in (heads, kv_heads, kv_heads)
    )
    ends = torch.tensor([0, *lengths]).cumsum(0).to(like.device, torch.int32)
    attend = partial(
        ops.attention_varlen,
        cu_seqlens=ends,
        max_seqlen=max(lengths),
        scale=ops.attention_scale(dim),
    )
    whole, _ = attend(q, k, v)
    for parts in wider(ranks):
        for rank in range(parts):
            mine = slice(rank * heads // parts, (rank + 1) * heads // parts)
            first = rank * kv_heads // parts
            theirs = slice(first, first + max(1, kv_heads // parts))
            alone, _ = attend(
                *(one.contiguous() for one in (q[:, mine], k[:, theirs], v[:, theirs]))
            )
            expected = whole[:, mine].contiguous()
            if not same_bits(alone, expected):
                return (
                    f"attention of {mine.stop - mine.start} of {heads} heads differs from that of "
                    f"all heads: {describe_difference(alone, expected)}"
                )
    return ""


def rank_sum_failure(layer: Any, ranks: int) -> str:
    """Compare vLLM's sums over ranks with the sum of the parts. Collective. Empty, or one line.

    Args:
        layer: of vLLM's model, on every rank.
        ranks: tensor-parallel ranks of the server.
    """
    projection = layer.self_attn.o_proj
    weight = projection.weight.data
    bias = projection.bias if projection.tp_rank == 0 else None
    most = max(SUMMED_ROWS)
    parts = torch.stack(
        [random_rows(most, weight.shape[0], like=weight, seed=100 + rank) for rank in range(ranks)]
    )
    x = random_rows(most, weight.shape[1], like=weight, seed=200 + projection.tp_rank)
    failure = ""
    # Every rank makes all sums, also behind a difference, because the others wait for it.
    for rows in SUMMED_ROWS:
        pairs = {
            "the sum over ranks": (
                sum_over_ranks(parts[projection.tp_rank, :rows]),
                ops.add_parts(parts[:, :rows]),
            ),
            "vLLM's layer o_proj": (
                projection(x[:rows])[0],
                sum_over_ranks(ops.linear(x[:rows], weight, bias)),
            ),
        }
        for name, (theirs, ours) in pairs.items():
            if not same_bits(theirs, ours):
                difference = describe_difference(theirs, ours)
                failure = failure or f"{name} is not that of {ranks} parts: {difference}"
    return failure
