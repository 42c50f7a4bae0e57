"""Which trainer rank sends what to whom, by which route, when a sender gathers it, and the memory
that takes. Pure arithmetic.

A *cohort* is vLLM's rank r of every server, and the trainer ranks that send to it; a *lane* is one
communicator of a cohort, from one sender to all of its receivers. Bucket b of a cohort goes over
its lane b modulo their number, so every trainer rank sends, and each has one bucket under way at a
time: a *round*. In each round every rank hands the others the rows they send, if FSDP2 spreads
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch

from vllm_patching.protocol.manifest import (
    BUCKET_BYTES,
    Bucket,
    FlatSlice,
    Manifest,
    Piece,
    buckets,
    flat_layout,
)
from vllm_patching.protocol.messages import Route

HANDED_BYTES = 256 << 20
"""How much a rank puts together for the others at a time: a round is gathered in several steps
where it would be more."""


@dataclass(frozen=True)
class SendPlan:
    """Who sends.

    Attributes:
        world_size: trainer ranks.
        vllm_ranks: cohorts.
    """

    world_size: int
    vllm_ranks: int

    @property
    def lanes(self) -> int:
        """Of each cohort: the same for all, so that a server is told one number."""
        return -(-self.world_size // self.vllm_ranks)

    def senders(self, cohort: int) -> list[int]:
        """The trainer ranks that send to vLLM's rank `cohort`."""
        if self.world_size < self.vllm_ranks:
            return [cohort % self.world_size]
        return list(range(cohort, self.world_size, self.vllm_ranks))

    def sender(self, cohort: int, lane: int) -> int:
        """The trainer rank at the head of a lane.

        Where the ranks do not divide by the cohorts, some have two lanes.
        """
        senders = self.senders(cohort)
        return senders[lane % len(senders)]

    def own_lanes(self, rank: int) -> list[tuple[int, int]]:
        """(cohort, lane) of every lane that a trainer rank sends over."""
        return [
            (r, lane)
            for r in range(self.vllm_ranks)
            for lane in range(self.lanes)
            if self.sender(r, lane) == rank
        ]

    def rounds(self, counts: Sequence[int]) -> list[dict[int, tuple[int, int]]]:
        """For each round, by trainer rank, the (cohort, bucket) that it sends; a rank that has none
        is left out.

        Args:
            counts: the number of buckets of each cohort.
        """
        queues: list[list[tuple[int, int]]] = [[] for _ in range(self.world_size)]
        for bucket in range(max(counts, default=0)):
            for cohort, count in enumerate(counts):
                if bucket < count:
                    queues[self.sender(cohort, bucket % self.lanes)].append((cohort, bucket))
        return [
            {rank: one for rank, one in enumerate(column) if one is not None}
            for column in zip_longest(*queues, fillvalue=None)
        ]


@dataclass(frozen=True)
class Transfer:
    """Rows of one piece, from the trainer rank that holds them to the one that sends them to vLLM.

    Attributes:
        owner, sender: trainer ranks; the same if nothing has to go anywhere.
        cohort, bucket: what the sender sends.
        piece: of that bucket.
        first, last: rows first … last - 1 of the piece, counted from its own first one.
        local: the row of the owner's part of the parameter at which they begin.
    """

    owner: int
    sender: int
    cohort: int
    bucket: int
    piece: Piece
    first: int
    last: int
    local: int


@dataclass(frozen=True)
class Cuts:
    """The layouts of vLLM's ranks, and their buckets."""

    layouts: tuple[tuple[FlatSlice, ...], ...]
    buckets: tuple[tuple[Bucket, ...], ...]
    full: tuple[dict[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, manifests: Sequence[Manifest], limit: int = BUCKET_BYTES) -> Cuts:
        """
        Args:
            manifests: by vLLM rank.
            limit: bytes of a bucket.
        """
        layouts = tuple(tuple(flat_layout(manifest)[0]) for manifest in manifests)
        full = tuple(
            {e.shard.name: tuple(e.shard.full_shape) for e in manifest.entries}
            for manifest in manifests
        )
        return cls(layouts, tuple(tuple(buckets(layout, limit)) for layout in layouts), full)

    def item(self, cohort: int, piece: Piece) -> FlatSlice:
        """The slice that a piece is of."""
        return self.layouts[cohort][piece.item]

    def in_place(self, cohort: int, item: FlatSlice, dtype: torch.dtype) -> bool:
        """Whether a slice's rows lie contiguous, in the right dtype, in a whole parameter of
        `dtype`: columns do not.
        """
        return item.dtype == dtype and (
            item.slice.dim == 0 or item.slice.length == self.full[cohort][item.name][1]
        )

    @property
    def num_bytes(self) -> int:
        """Of weights, over all of vLLM's ranks."""
        return sum(item.num_bytes for layout in self.layouts for item in layout)


def steps_of(
    plan: SendPlan, cuts: Cuts, dtype: torch.dtype, limit: int = HANDED_BYTES
) -> Iterator[list[list[Transfer]]]:
    """For each round what is exchanged, in steps; each of FSDP2's ranks holds a chunk of every
    parameter's rows.

    Args:
        dtype: of the trainer's parameters.
        limit: bytes that a rank packs for the others in one step. One transfer may be more.
    """
    for row in plan.rounds([len(one) for one in cuts.buckets]):
        steps: list[list[Transfer]] = [[]]
        packed = [0] * plan.world_size
        for sender, (cohort, bucket) in row.items():
            for transfer in _transfers(plan.world_size, cuts, sender, cohort, bucket):
                size = packed_bytes(cuts, transfer, dtype)
                if packed[transfer.owner] and packed[transfer.owner] + size > limit:
                    steps.append([])
                    packed = [0] * plan.world_size
                packed[transfer.owner] += size
                steps[-1].append(transfer)
        yield steps


def _transfers(
    world_size: int, cuts: Cuts, sender: int, cohort: int, bucket: int
) -> Iterator[Transfer]:
    for piece in cuts.buckets[cohort][bucket].pieces:
        item = cuts.item(cohort, piece)
        rows = cuts.full[cohort][item.name][0]
        chunk = -(-rows // world_size)
        first = piece.first + (item.slice.source_start if item.slice.dim == 0 else 0)
        last = first + piece.last - piece.first
        for owner in range(first // chunk, -(-last // chunk)):
            begin, end = max(first, owner * chunk), min(last, (owner + 1) * chunk)
            yield Transfer(
                owner,
                sender,
                cohort,
                bucket,
                piece,
                begin - first,
                end - first,
                begin - owner * chunk,
            )


def packed_bytes(cuts: Cuts, transfer: Transfer, dtype: torch.dtype) -> int:
    """Bytes of a transfer that its owner cannot hand over from where they are, each aligned to 16."""
    item = cuts.item(transfer.cohort, transfer.piece)
    if transfer.owner == transfer.sender or cuts.in_place(transfer.cohort, item, dtype):
        return 0
    rows = transfer.piece.last - transfer.piece.first
    size = transfer.piece.num_bytes // rows * (transfer.last - transfer.first)
    return -(-size // 16) * 16


ROUTE_KEYS = ("gpu_uuids", "tp_degree")
"""What /bridge/info says that a route depends on."""


def route_to(info: Mapping[str, Any], gpus: Sequence[str]) -> Route:
    """How weights travel to a server.

    Args:
        info: its /bridge/info, or the ROUTE_KEYS of it; `gpu_uuids` are of its ranks, replica by
            replica, empty on a CPU.
        gpus: UUID of the GPU that each of this process's ranks sends from; empty on a CPU.
    """
    uuids, ranks = info["gpu_uuids"], int(info["tp_degree"])
    if not all(uuids) or not all(gpus):
        return Route.GLOO
    plan = SendPlan(len(gpus), ranks)
    on_one = any(
        uuid in {gpus[sender] for sender in plan.senders(n % ranks)} for n, uuid in enumerate(uuids)
    )
    return Route.CUDA_IPC if on_one else Route.NCCL


def sent_together(
    servers: Sequence[tuple[Hashable, Route, Sequence[str]]],
) -> list[tuple[int, list[int]]]:
    """Which servers are sent to at the same time: for each group how many of its kind come before
    it, and places in `servers`.

    NCCL connects no two receivers on one GPU, so servers that share one come into different groups;
    by the other routes they may come into one.

    Args:
        servers: of each its kind, which all members of a group share, its route, and the UUIDs of
            its ranks' GPUs.
    """
    groups: list[tuple[Hashable, set[str], list[int]]] = []
    for place, (kind, route, uuids) in enumerate(servers):
        own = set(uuids) if route is Route.NCCL else set()
        for of, taken, places in groups:
            if of == kind and not taken & own:
                taken |= own
                places.append(place)
                break
        else:
            groups.append((kind, own, [place]))
    before = Counter[Hashable]()
    found = []
    for kind, _, places in groups:
        found.append((before[kind], places))
        before[kind] += 1
    return found


def distinct_layouts(servers: Iterable[Sequence[Manifest]]) -> tuple[tuple[Manifest, ...], ...]:
    """The manifests of the ranks of each kind of server among these; servers of one kind get the
    same bytes.
    """
    return tuple(
        {tuple(m.digest() for m in ranks): tuple(ranks) for ranks in servers if ranks}.values()
    )


@dataclass(frozen=True)
class BufferBytes:
    """What a trainer rank keeps to send from: two buffers for buckets, and one for rows that it
    hands to other ranks.
    """

    bucket: int
    handed: int

    @property
    def total(self) -> int:
        return 2 * self.bucket + self.handed


@lru_cache(maxsize=64)
def buffer_bytes(
    manifests: tuple[Manifest, ...],
    world_size: int,
    dtype: torch.dtype,
    packs: bool,
    limit: int = BUCKET_BYTES,
) -> BufferBytes:
    """The greatest buffers that a trainer rank needs to send to servers of one layout; every rank
    makes these.

    Args:
        manifests: by vLLM rank.
        world_size: trainer ranks; several are FSDP2's.
        dtype: of the trainer's parameters.
        packs: a bucket is packed whole, since it goes in one piece. NCCL sends each of its pieces
            from where it is.
        limit: bytes of a bucket.
    """
    cuts, plan = Cuts.of(manifests, limit), SendPlan(world_size, len(manifests))
    packs_all = packs or world_size > 1
    every = ((r, b) for r, found in enumerate(cuts.buckets) for b in range(len(found)))
    largest = max((bucket_bytes(cuts, r, b, dtype, packs_all) for r, b in every), default=0)
    handed = 0
    if world_size > 1:
        for steps in steps_of(plan, cuts, dtype):
            for step in steps:
                packed = [0] * world_size
                for transfer in step:
                    packed[transfer.owner] += packed_bytes(cuts, transfer, dtype)
                handed = max(handed, *packed)
    return BufferBytes(largest, handed)


def bucket_bytes(cuts: Cuts, cohort: int, bucket: int, dtype: torch.dtype, packs_all: bool) -> int:
    """Bytes of a buffer for a bucket, of which only what cannot be sent from where it is is packed,
    or all of it.
    """
    one = cuts.buckets[cohort][bucket]
    if packs_all or any(
        not cuts.in_place(cohort, cuts.item(cohort, piece), dtype) for piece in one.pieces
    ):
        return one.num_bytes
    return 0
