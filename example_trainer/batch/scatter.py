"""Bins on their way from rank 0 to all ranks: as bytes, in one message to each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from example_trainer.batch.bins import PackedBin
from example_trainer.parallel.ranks import Ranks

Sizes = list[int]
"""Of one bin: its tokens, spans, trained tokens and sequences."""

_SPANS, _SEQUENCES = ("lengths", "parents"), ("counts", "orders", "unreferenced")
_FLOATS = ("rollout_logprobs", "advantages", "weights", "temperatures", "teacher_logprobs", "reference_logprobs")
_INTS = ("tokens", *_SPANS, "sources", "targets", "versions", "positions", *_SEQUENCES, "reference_pass")


def sizes_of(minibatches: Sequence[Sequence[Sequence[PackedBin]]]) -> list[list[list[Sizes]]]:
    """What `scatter_bins` must be told about the bins of each rank of each minibatch."""
    return [
        [[[len(one.tokens), len(one.lengths), len(one.targets), len(one.counts)] for one in share] for share in shares]
        for shares in minibatches
    ]


def scatter_bins(
    ranks: Ranks, minibatches: Sequence[Sequence[Sequence[PackedBin]]], sizes: Sequence[Sequence[Sequence[Sizes]]]
) -> list[list[PackedBin]]:
    """Each rank's bins of each minibatch, on the host, all in one message to each. Collective.

    Args:
        minibatches: on rank 0, of each the bins of each data-parallel rank; one share is for all ranks. Ignored on the others.
        sizes: of all these, on every rank.

    Raises:
        RankError: a rank is gone, or silent for longer than --rank-timeout.
    """
    mine = [shares[ranks.rank % len(shares)] for shares in sizes]
    parts = []
    if ranks.is_main:
        parts = [encode([one for share in shares for one in share]) for shares in zip(*minibatches, strict=True)]
        parts = [parts[rank % len(parts)] for rank in range(ranks.world_size)]
    joined = [size for share in mine for size in share]
    bins = iter(decode(ranks.scatter(parts, sum(map(_bytes, joined)), "handing out a batch"), joined))
    return [list(islice(bins, len(share))) for share in mine]


def encode(bins: Sequence[PackedBin]) -> Tensor:
    """All tensors of some bins as bytes; those of 8 bytes a number come first, so that every one is aligned."""
    tensors = [one.tensors() for one in bins]
    rows = [fields[name] for names in (_INTS, _FLOATS) for fields in tensors for name in names]
    return torch.cat([row.contiguous().flatten().view(torch.uint8) for row in rows])


def decode(data: Tensor, sizes: Sequence[Sizes]) -> list[PackedBin]:
    """The bins that were encoded, as views of the bytes."""
    fields: list[dict[str, Tensor]] = [{} for _ in sizes]
    begin = 0
    for names, dtype in ((_INTS, torch.int64), (_FLOATS, torch.float32)):
        for found, size in zip(fields, sizes, strict=True):
            for name in names:
                shape = _shape(name, size)
                end = begin + shape.numel() * dtype.itemsize
                found[name] = data[begin:end].view(dtype).view(shape)
                begin = end
    return [PackedBin(**found) for found in fields]


def _shape(name: str, size: Sizes) -> torch.Size:
    tokens, spans, trained, sequences = size
    if name == "orders":
        return torch.Size((sequences, 2))
    if name == "reference_pass":
        return torch.Size((1,))
    return torch.Size(
        (tokens if name == "tokens" else spans if name in _SPANS else sequences if name in _SEQUENCES else trained,)
    )


def _bytes(size: Sizes) -> int:
    return sum(8 * _shape(name, size).numel() for name in _INTS) + sum(4 * _shape(name, size).numel() for name in _FLOATS)
