"""Bins of some of a bin's sequences: for a pass over those alone of which something is not known
yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from example_trainer.batch.bins import PackedBin
from example_trainer.batch.packing import empty_bin
from example_trainer.models.packing import NO_PARENT


def completed_reference(bin: PackedBin, compute: Callable[[PackedBin], Tensor]) -> Tensor:
    """The reference's logprobs of a bin's trained tokens: those that came along, and computed ones
    where they are missing.

    Of a sequence with a single one missing all are forwarded. If none came along, `compute` is
    given the bin itself.

    Args:
        compute: [n] float32 logprobs of the trained tokens of a bin. Collective where the reference
            is spread over ranks: each has as many bins, and all of them agree by `reference_pass`
            of which a pass is made.

    Returns:
        [n] float32 on the bin's device.
    """
    sent = bin["reference_logprobs"]
    if not bin.reference_pass.any():
        return sent
    chosen = bin.unreferenced.nonzero().flatten().tolist()
    if len(chosen) == len(bin.counts):
        return torch.where(sent.isnan(), compute(bin), sent)
    part, rows = part_of(bin, chosen)
    completed = sent.clone()
    completed[rows] = torch.where(sent[rows].isnan(), compute(part), sent[rows])
    return completed


def part_of(bin: PackedBin, sequences: Sequence[int]) -> tuple[PackedBin, Tensor]:
    """Some of a bin's sequences as a bin of their own: the spans that they are in, and those that
    these continue.

    Args:
        sequences: their numbers in the bin, ascending. Without any it is the bin of a rank without
            work.

    Returns:
        The bin, and [n] int64 on its device: the places of its trained tokens among those of the
        whole one.
    """
    device = bin.tokens.device
    if not sequences:
        return empty_bin().to(device), torch.zeros(0, dtype=torch.int64, device=device)
    ends = bin.counts.cumsum(0).tolist()
    rows = torch.cat([torch.arange(ends[i] - int(bin.counts[i]), ends[i]) for i in sequences])
    sources = bin.sources.cpu()[rows]
    begins = torch.tensor(bin.packing().begins)
    spans = torch.searchsorted(begins, sources, right=True) - 1
    kept = _with_parents(spans.tolist(), bin.parents.tolist())
    places = torch.full((len(bin.lengths),), NO_PARENT)
    places[kept] = torch.arange(len(kept))
    new_begins = torch.cat((torch.zeros(1, dtype=torch.int64), bin.lengths[kept].cumsum(0)))
    tokens = torch.cat(
        [torch.arange(begin, end) for begin, end in map(bin.packing().spans().__getitem__, kept)]
    )
    parents = bin.parents[kept]
    on_device, of_sequences = rows.to(device), torch.tensor(sequences)
    taken = {name: tensor[on_device] for name, tensor in bin.of_targets().items()}
    whole = replace(
        bin,
        tokens=bin.tokens[tokens.to(device)],
        lengths=bin.lengths[kept],
        parents=torch.where(parents == NO_PARENT, parents, places[parents]),
        sources=(sources - begins[spans] + new_begins[places[spans]]).to(device),
        counts=bin.counts[of_sequences],
        orders=bin.orders[of_sequences],
        unreferenced=bin.unreferenced[of_sequences],
    )
    return PackedBin.of(whole.tensors() | taken), on_device


def _with_parents(spans: Iterable[int], parents: Sequence[int]) -> list[int]:
    """The spans with all that they continue, ascending."""
    kept: set[int] = set()
    for span in set(spans):
        while span != NO_PARENT and span not in kept:
            kept.add(span)
            span = parents[span]
    return sorted(kept)
