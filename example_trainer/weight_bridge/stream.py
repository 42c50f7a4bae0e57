"""The sending half of an update. It has the plan of senders, the meeting with the receivers, and
the weights on their way. These go bucket by bucket, through two buffers of bounded size.

While one bucket is on its way to the servers, the rows of the next fill the other buffer. They come
from the trainer's ranks (FSDP2). One process that holds whole parameters sends contiguous parts
from their own place over NCCL; every other route needs a bucket in one piece. A tensor-parallel
trainer never gets here: its weights are vLLM's.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from example_trainer.errors import BridgeError
from example_trainer.models.shards import Shards
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.checkpoint_sources import held_in, held_tensors
from vllm_patching.protocol.checksum import Part, Row, WeightSums, summary_of
from vllm_patching.protocol.manifest import (
    BUCKET_BYTES,
    Bucket,
    FlatSlice,
    Manifest,
    Piece,
    buckets,
    flat_layout,
    source_view,
)
from vllm_patching.protocol.messages import Route
from vllm_patching.transport.addresses import (
    RendezvousError,
    is_here,
    listening_address,
    rendezvous_address,
    under_torchrun,
)
from vllm_patching.transport.lane import (
    GO,
    NEAR,
    SENDER,
    Lane,
    LaneBroken,
    LanePlace,
    SendMemory,
    close_lanes,
    form_lanes,
    lane_places,
)
from vllm_patching.transport.rendezvous import (
    KeyedStore,
    Meeting,
    connect_store,
    first_line,
    host_store,
    new_secret,
)
from vllm_patching.weights.regions import row_major

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Rendezvous:
    """Opens the stores on rank 0, where the servers need them, and connects the other ranks to
    them.

    A store listens on one address: on loopback as long as every server is on this machine. Servers
    that join later from another machine meet at a second store.
    """

    def __init__(self, ranks: Ranks, timeout: float, port: int | None) -> None:
        """
        Args:
            timeout: seconds for each wait at a store.
            port: 0: any free one; None: the environment's.
        """
        self._ranks, self._timeout, self._port = ranks, timeout, port
        self._secret = new_secret()
        self._hosted: dict[str, KeyedStore] = {}  # by the address that it listens on
        self._stores: dict[tuple[str, int], KeyedStore] = {}

    def open(self, urls: Sequence[str]) -> Meeting:
        """Return where these servers meet this trainer, and open the store there. On rank 0.

        Raises:
            BridgeError: the address cannot be used, or the port is taken.
        """
        return _translate(lambda: self._open([str(urlsplit(url).hostname) for url in urls]))

    def join(self, meeting: Meeting) -> KeyedStore:
        """Return the store at a meeting that rank 0 has opened. On every rank.

        Raises:
            BridgeError: it cannot be reached.
        """
        where = meeting.host, meeting.port
        if where not in self._stores:
            who = f"trainer rank {self._ranks.rank}"
            self._stores[where] = _translate(lambda: connect_store(meeting, who, self._timeout))
        return self._stores[where]

    def _open(self, servers: Sequence[str]) -> Meeting:
        host, port = rendezvous_address(servers)
        elsewhere = next((server for server in servers if not is_here(server)), "")
        address = listening_address(host, elsewhere)
        if address not in self._hosted:
            wanted = Meeting(host, port if self._port is None else self._port, self._secret)
            movable = self._port is None and under_torchrun() and not elsewhere
            self._hosted[address] = self._host(wanted, address, movable)
        store = self._hosted[address]
        assert store.kept is not None, "this process hosts it"
        self._stores[host, store.kept.port] = store
        return Meeting(host, store.kept.port, self._secret)

    def _host(self, wanted: Meeting, address: str, movable: bool) -> KeyedStore:
        """Open the store; if it is movable and its port is taken, on another one.

        torchrun takes any free port, and nothing reserves the port after it. Servers on this
        machine learn the port from the trainer.
        """
        try:
            return host_store(wanted, self._timeout, address)
        except RendezvousError:
            if not movable:
                raise
        store = host_store(replace(wanted, port=0), self._timeout, address)
        assert store.kept is not None, "this process hosts it"
        logger.info(
            "[Bridge] port %d is taken; the servers meet this trainer on port %d",
            wanted.port, store.kept.port,
        )  # fmt: skip
        return store


def _translate(step: Callable[[], _T]) -> _T:
    try:
        return step()
    except RendezvousError as error:
        raise BridgeError(str(error)) from error


HANDED_BYTES = 256 << 20
"""Bytes that a rank puts together for the others at a time: a round is gathered in several steps
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
        """Return the lanes of each cohort: the same number for all, so that a server gets one
        number.
        """
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
    """Rows of one piece, from the trainer rank that holds them to the rank that sends them to vLLM.

    Attributes:
        owner, sender: trainer ranks; the same if nothing has to go anywhere.
        cohort, bucket: what the sender sends.
        piece: of that bucket.
        first, last: rows first … last - 1 of the piece, counted from its own first one.
        local: the element of the owner's part of the trainer's tensor at which they begin.
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

    @classmethod
    def of(
        cls,
        manifests: Sequence[Manifest],
        limit: int = BUCKET_BYTES,
        held_in: Callable[[FlatSlice], FlatSlice] = lambda item: item,
    ) -> Cuts:
        """
        Args:
            manifests: by vLLM rank.
            limit: bytes of a bucket.
            held_in: looks up where the trainer holds the elements of a slice.
        """
        layouts = tuple(tuple(map(held_in, flat_layout(manifest)[0])) for manifest in manifests)
        return cls(layouts, tuple(tuple(buckets(layout, limit)) for layout in layouts))

    def item(self, cohort: int, piece: Piece) -> FlatSlice:
        """The slice that a piece is of."""
        return self.layouts[cohort][piece.item]

    @staticmethod
    def in_place(item: FlatSlice, dtype: torch.dtype) -> bool:
        """Return whether a slice's rows lie contiguous, in the right dtype, in a whole parameter of
        `dtype`: columns do not. A checkpoint tensor may have a dtype of its own, or be a view.
        """
        contiguous = item.slice.source_strides == row_major(item.shape).strides
        return item.dtype == dtype and contiguous and not item.learned

    @property
    def num_bytes(self) -> int:
        """Return the bytes of weights, over all of vLLM's ranks."""
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
        row = math.prod(item.full_shape[1:])
        chunk = -(-item.full_shape[0] // world_size) * row
        step, *others = item.slice.source_strides
        reach = sum(
            (length - 1) * stride for length, stride in zip(item.shape[1:], others, strict=True)
        )
        start = item.slice.source_offset + piece.first * step
        for owner, first, last in _owners(start, step, piece.last - piece.first, chunk):
            local = start + first * step - owner * chunk
            if local + (last - first - 1) * step + reach >= chunk:
                raise BridgeError(
                    f"{item.name} of vLLM has rows that are spread over ranks in the trainer's "
                    f"{item.slice.source}: train this model on one rank"
                )
            yield Transfer(owner, sender, cohort, bucket, piece, first, last, local)


def _owners(start: int, step: int, rows: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Yield (owner, first row, last row + 1) for the rows of a piece.

    Args:
        start: element of the whole tensor at which the first row begins.
        step: elements from row to row.
        chunk: elements of the whole tensor that each rank holds.
    """
    if not step:  # one row, or one element for all rows
        yield start // chunk, 0, rows
        return
    first = 0
    while first < rows:
        owner = (start + first * step) // chunk
        last = min(rows, -(-((owner + 1) * chunk - start) // step))
        yield owner, first, last
        first = last


def packed_bytes(cuts: Cuts, transfer: Transfer, dtype: torch.dtype) -> int:
    """Bytes of a transfer that its owner cannot hand over from where they are, each aligned to 16."""
    item = cuts.item(transfer.cohort, transfer.piece)
    if transfer.owner == transfer.sender or cuts.in_place(item, dtype):
        return 0
    rows = transfer.piece.last - transfer.piece.first
    size = transfer.piece.num_bytes // rows * (transfer.last - transfer.first)
    return -(-size // 16) * 16


ROUTE_KEYS = ("gpu_uuids", "tp_degree")
"""Fields of /bridge/info that a route depends on."""


def route_to(info: Mapping[str, Any], gpus: Sequence[str]) -> Route:
    """Return the route of weights to a server.

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

    NCCL connects no two receivers on one GPU, so servers that share one come into different groups.
    By the other routes they may come into one.

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
    """Memory that a trainer rank sends from: two buffers for buckets, and one for rows that it
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
    if world_size > 1 and any(item.learned for layout in cuts.layouts for item in layout):
        handed = max(HANDED_BYTES, largest)  # what steps_of packs at most
    elif world_size > 1:
        for steps in steps_of(plan, cuts, dtype):
            for step in steps:
                packed = [0] * world_size
                for transfer in step:
                    packed[transfer.owner] += packed_bytes(cuts, transfer, dtype)
                handed = max(handed, *packed)
    return BufferBytes(largest, handed)


def bucket_bytes(cuts: Cuts, cohort: int, bucket: int, dtype: torch.dtype, packs_all: bool) -> int:
    """Return the bytes of a buffer for a bucket. Only parts that cannot be sent from their place
    are packed, or all of it.
    """
    one = cuts.buckets[cohort][bucket]
    if packs_all or any(not cuts.in_place(cuts.item(cohort, piece), dtype) for piece in one.pieces):
        return one.num_bytes
    return 0


_ASK_SECONDS = 0.1
_LOOK_SECONDS = 0.02


class CohortError(BridgeError):
    """The cohorts could not be formed; every rank raises the same.

    Attributes:
        missing: receivers that did not come, from 1; empty if it failed for another reason.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = list(missing)


class LossWatch:
    """A watch over an update: rank 0 asks in a thread whether it is lost, and informs the others
    through the store.

    It ends waits in a lane, where ranks cannot reach each other.
    """

    def __init__(self, ranks: Ranks, store: dist.Store, key: str, lost: Callable[[], str]) -> None:
        """
        Args:
            store: hosted by the trainer's rank 0.
            key: that nothing else is known by there.
            lost: asked on rank 0, by a thread of its own: why it has none, or an empty string.
        """
        self._ranks, self._store, self._key, self._lost = ranks, store, key, lost
        self._reason = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loss watch", daemon=True)

    def reason(self) -> str:
        """Return why everything is to be broken off; empty as long as nothing is."""
        return self._reason

    def __enter__(self) -> LossWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_ASK_SECONDS):
            try:
                if not self._ranks.is_main:
                    if self._store.check([self._key]):
                        self._reason = self._store.get(self._key).decode()
                elif reason := self._lost():
                    self._reason = reason
                    self._store.set(self._key, reason)
            except Exception as error:  # noqa: BLE001 - must not end without a word
                if self._ended.is_set():
                    return
                self._reason = (
                    f"whether the update goes on cannot be asked any more: {first_line(error)}"
                )
            if self._reason:
                return


class Cohort:
    """This process's lanes to the receivers of one layout, and what is needed to leave them
    together.

    A cohort that is closed can be formed again under another key, with other members. Collective
    but for `close`.
    """

    def __init__(
        self,
        ranks: Ranks,
        plan: SendPlan,
        device: torch.device,
        timeout: float,
        memory: SendMemory | None = None,
    ) -> None:
        """
        Args:
            timeout: seconds that a transfer may take.
            memory: that this process sends from, where receivers may read it.
        """
        self.ranks, self.plan, self.timeout = ranks, plan, timeout
        self.key = ""
        self._device, self._memory = device, memory
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._store: dist.Store | None = None
        self._watched = 0

    @property
    def formed(self) -> bool:
        """Return whether there are lanes to send over."""
        return self._store is not None

    def form(
        self,
        meeting: Meeting,
        key: str,
        members: int,
        route: Route,
        store: dist.Store,
        seconds: float,
        lost: Callable[[], str],
    ) -> None:
        """Wait for the receivers, which have the same orders, and form the lanes.

        Args:
            meeting: the store, as the receivers reach it.
            key: that no forming before has had.
            members: receivers of each cohort.
            route: how the weights travel.
            store: the same, hosted by rank 0.
            seconds: for the receivers to come, and again for the lanes to be formed.
            lost: asked on rank 0 by a thread: why nothing can come of it, or an empty string.

        Raises:
            CohortError: it did not work; the present receivers are informed. The cohort is closed.
        """
        self.close()
        own = self.plan.own_lanes(self.ranks.rank)
        places = [
            lane_places(meeting, key, r, [lane], SENDER, members, route)[0] for r, lane in own
        ]
        for place in places:
            store.set(place.offer, self._memory.offer if self._memory is not None else "")
        with LossWatch(self.ranks, store, f"lockstep/{key}/forming", lost) as watch:
            missing, why = self._wait_for_all(places, seconds, watch)
            told = self._agree([missing, why])
            absent = sorted({member for row, _ in told for member in row})
            reason = next((error for _, error in told if error), "")
            if absent or reason:
                shown = ", ".join(str(member - 1) for member in absent)
                reason = (
                    reason
                    or f"receiver(s) {shown} of {members} (numbered from 0) did not come within {seconds:g} s"
                )
                self._say(store, places, f"off: {reason}")
                raise CohortError(f"the cohorts {key} were not formed: {reason}", absent)
            for place in places:
                near = [
                    m for m in range(1, place.size) if store.get(place.here(m)) == NEAR.encode()
                ]
                self._say(store, [place], " ".join(map(str, [GO, *near])))
            lanes, why = self._form_lanes(places, seconds, watch)
            reason = next((error for _, error in self._agree([[], why]) if error), "")
            if reason:
                close_lanes(lanes)
                raise CohortError(f"the cohorts {key} were not formed: {reason}")
        self._lanes = dict(zip(own, lanes, strict=True))
        self._store, self.key = store, key

    def lane(self, cohort: int, bucket: int) -> Lane:
        """Return the lane of this process for a bucket."""
        return self._lanes[cohort, bucket % self.plan.lanes]

    @property
    def own_lanes(self) -> list[Lane]:
        """Return all lanes of this process."""
        return list(self._lanes.values())

    def watch(self, lost: Callable[[], str]) -> LossWatch:
        """Return a watch over the transfer that begins now."""
        assert self._store is not None
        self._watched += 1
        return LossWatch(
            self.ranks, self._store, f"lockstep/{self.key}/transfer{self._watched}", lost
        )

    def close(self) -> None:
        """Leave the lanes, and break off what is in flight. Safe to call twice."""
        close_lanes(self._lanes.values())
        self._lanes, self._store = {}, None

    def _wait_for_all(
        self, places: Sequence[LanePlace], seconds: float, watch: LossWatch
    ) -> tuple[list[int], str]:
        """Return the receivers that have not come in time, and another reason to give up."""
        if not places:
            return [], ""
        deadline = time.monotonic() + seconds
        try:
            store = connect_store(places[0].meeting, f"trainer rank {self.ranks.rank}", seconds)
            keys = {
                place.here(member): member for place in places for member in range(1, place.size)
            }
            while not store.check(list(keys)):
                if watch.reason() or time.monotonic() > deadline:
                    return sorted(
                        {member for key, member in keys.items() if not store.check([key])}
                    ), watch.reason()
                time.sleep(_LOOK_SECONDS)
            return [], watch.reason()
        except (RendezvousError, RuntimeError) as error:
            return [], f"trainer rank {self.ranks.rank}: {first_line(error)}"

    def _form_lanes(
        self, places: Sequence[LanePlace], seconds: float, watch: LossWatch
    ) -> tuple[list[Lane], str]:
        who = f"trainer rank {self.ranks.rank}"
        try:
            return form_lanes(
                places, self._device, self.timeout, seconds, watch.reason, who, self._memory
            ), ""
        except RendezvousError as error:
            return [], str(error)

    def _agree(self, mine: Any) -> list[Any]:
        return self.ranks.gather(mine, "forming the cohorts")

    @staticmethod
    def _say(store: dist.Store, places: Sequence[LanePlace], word: str) -> None:
        for place in places:
            store.set(place.word, word)


@dataclass(frozen=True)
class Exchange:
    """One step of a round, as this rank takes part in it. It is prepared once, since its many views
    cost more time than the GPU needs for what it does with them.

    Attributes:
        targets, sources: tensors that are copied, from and to this rank's memory.
        operations: what is sent to other ranks and received from them after the copies.
    """

    targets: list[Tensor]
    sources: list[Tensor]
    operations: list[dist.P2POp]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Add a copy."""
        self.targets.append(target)
        self.sources.append(source)

    def begin(self) -> list[Any]:
        """Copy, and begin to send and receive. Returns what is to be waited for."""
        if self.targets:
            with torch.no_grad():
                torch._foreach_copy_(self.targets, self.sources)
        return dist.batch_isend_irecv(self.operations) if self.operations else []


class WeightStream:
    """Sends the model's present weights to the receivers of one layout, as often as asked. Every
    method is collective.

    Attributes:
        buffer_bytes: bytes that this process sends from, as the memory plan counts them
            (`buffer_bytes`).
        num_bytes: weights that are sent to each server, over all its ranks.
        memory: that buckets are sent from, where receivers may read it; None over NCCL.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        manifests: Sequence[Manifest],
        plan: SendPlan,
        ranks: Ranks,
        device: torch.device,
        route: Route,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """
        Args:
            model: whole in one process, or sharded by FSDP2 over the ranks; it may be float32
                beside servers of 16 bits.
            manifests: of vLLM's ranks, by rank.
            plan: of the senders.
            device: this process's.
            route: how the weights travel.
            bucket_bytes: see pieces.buckets; the receivers'.
        """
        self._shards: Shards = getattr(model, "shards", None) or Shards()
        self._parameters = held_tensors(model)
        dtype = next(iter(self._parameters.values())).dtype
        self._served = manifests[0].entries[0].torch_dtype
        self._ranks, self._device = ranks, device
        self._cuts = cuts = Cuts.of(manifests, bucket_bytes, held_in(model))
        self.num_bytes = cuts.num_bytes
        self._gathers = ranks.world_size > 1
        self._rounds = plan.rounds([len(found) for found in cuts.buckets])
        self._enqueues = route is Route.NCCL
        sizes = buffer_bytes(
            tuple(manifests), ranks.world_size, dtype, not self._enqueues, bucket_bytes
        )
        self.memory: SendMemory | None = None
        if not self._enqueues:
            place = device if route is Route.CUDA_IPC else torch.device("cpu")
            self.memory = SendMemory([sizes.bucket] * 2, place, fast_for_gpus=device.type == "cuda")
        # Receivers read a bucket where it was packed; what is packed on a GPU for the host's memory
        # is copied there whole.
        self._copies_out = route is Route.GLOO and device.type == "cuda"
        self._buffers = (
            [torch.empty(sizes.bucket, dtype=torch.uint8, device=device) for _ in range(2)]
            if self.memory is None or self._copies_out
            else self.memory.buffers
        )
        self._handed = torch.empty(sizes.handed, dtype=torch.uint8, device=device)
        self.buffer_bytes = sizes.total
        self._steps: list[list[list[Transfer]]] = []
        self._exchanges: list[list[Exchange]] = []
        self._places: list[int] = []
        if self._gathers:
            mine = ranks.rank
            self._steps = [
                [[t for t in step if mine in (t.owner, t.sender)] for step in steps]
                for steps in steps_of(plan, cuts, dtype)
            ]
        self._dtype = dtype
        self._gather_stream = torch.cuda.Stream(device) if self._enqueues else None
        self._prepare()

    def rebind(self) -> None:
        """Lay the plan out again: the model's parameters lie elsewhere now."""
        self._prepare()

    def not_finite(self) -> str:
        """The first parameter that holds NaN or infinity, or would once it is rounded to the
        servers' dtype; empty if none.
        """
        local = [
            (name, self._shards.local(parameter)) for name, parameter in self._parameters.items()
        ]
        held = [(index, tensor) for index, (_, tensor) in enumerate(local) if tensor.numel()]
        bad: list[int] = []
        if held:
            largest = torch.stack(torch._foreach_norm([tensor for _, tensor in held], float("inf")))
            finite = largest.to(self._served).isfinite().tolist()
            bad = [index for (index, _), fine in zip(held, finite, strict=True) if not fine]
        found = self._ranks.gather(bad[:1], "looking for NaN in the weights")
        first = min((index for row in found for index in row), default=None)
        return "" if first is None else local[first][0]

    def send(self, cohort: Cohort, lost: Callable[[], str]) -> list[str]:
        """Send the weights.

        Args:
            cohort: formed.
            lost: asked on rank 0, by a thread: why the transfer is to be broken off everywhere, or
                an empty string.

        Returns:
            the checksum of each of vLLM's ranks, on every trainer rank.

        Raises:
            BridgeError: they did not arrive; the same on every rank. The cohort is closed.
            RankError: another trainer rank has ended.
        """
        if not cohort.formed:
            raise BridgeError("the cohorts are closed: form them before weights are sent")
        if self._gathers and self._places != [held.data_ptr() for held in self._local().values()]:
            self._prepare()
        self._sums.reset()
        with cohort.watch(lost) as watch:
            try:
                error = self._run(cohort, watch.reason)
            except RuntimeError as gone:
                cohort.close()
                raise self._ranks.lost("gathering the weights", gone) from gone
            if error:
                # frees the receivers of these lanes; the other ranks hear of it below
                cohort.close()
            told = self._ranks.gather(
                [error, [] if error else self._sums.rows()], "sending the weights"
            )
            broken_off = watch.reason()
        errors = [f"trainer rank {rank}: {why}" for rank, (why, _) in enumerate(told) if why]
        if errors:
            cohort.close()
            raise BridgeError("sending the weights failed: " + (broken_off or "; ".join(errors)))
        tables = [sums for _, sums in told]
        return [
            summary_of(self._rows[first:last], *(table[first:last] for table in tables)).checksum
            for first, last in zip(self._first_row, self._first_row[1:], strict=False)
        ]

    # -- made once

    def _prepare(self) -> None:
        """Lay out what this process sends in each round, and the sums over it."""
        self._rows: list[Row] = []
        self._first_row = [0]
        for layout in self._cuts.layouts:
            self._rows += [Row(item.name, tuple(item.shape), item.dtype) for item in layout]
            self._first_row.append(len(self._rows))
        self._pieces: list[list[Tensor]] = []
        self._packed: list[
            list[tuple[Tensor, Tensor]]
        ] = []  # what is copied into a buffer, and from where
        parts: list[Part] = []
        self._first_part = [0]
        for number, row in enumerate(self._rounds):
            pieces, packed = [], []
            cohort, bucket = row.get(self._ranks.rank, (0, -1))
            for piece in self._cuts.buckets[cohort][bucket].pieces if bucket >= 0 else ():
                tensor, source = self._place(number, cohort, piece)
                if source is not None:
                    packed.append((tensor, source))
                pieces.append(tensor)
                parts.append(Part(self._first_row[cohort] + piece.item, piece.start, tensor))
            self._pieces.append(pieces)
            self._packed.append(packed)
            self._first_part.append(len(parts))
        self._sums = WeightSums.of_parts(self._rows, parts, self._device)
        if self._gathers:
            local = self._local()
            self._places = [tensor.data_ptr() for tensor in local.values()]
            self._exchanges = [
                [self._exchange(number, step, local) for step in steps]
                for number, steps in enumerate(self._steps)
            ]

    def _local(self) -> dict[str, Tensor]:
        """Look up the part of each parameter that this rank holds."""
        return {
            name: self._shards.local(held)
            if isinstance(held, torch.nn.Parameter)
            else self._shards.take(name, held)  # a buffer is whole on each rank
            for name, held in self._parameters.items()
        }

    def _exchange(
        self, number: int, transfers: Sequence[Transfer], local: dict[str, Tensor]
    ) -> Exchange:
        """Prepare one step of a round: what this rank copies, hands to others and gets from them.

        Args:
            local: what this rank holds of each parameter.
        """
        me, used = self._ranks.rank, 0
        exchange = Exchange([], [], [])
        tags: Counter[tuple[int, int]] = Counter()
        for transfer in transfers:
            piece, rows = transfer.piece, transfer.last - transfer.first
            item = self._cuts.item(transfer.cohort, piece)
            target = source = torch.empty(0)
            if transfer.sender == me:
                bucket = piece.in_buffer(self._buffers[number % 2], item)
                target = bucket[transfer.first : transfer.last]
            if transfer.owner == me:
                mine, shape = local[item.slice.source], (rows, *item.shape[1:])
                start = mine.storage_offset() + transfer.local
                source = mine.as_strided(shape, item.slice.source_strides, start)
            if transfer.owner == transfer.sender:
                exchange.copy(target, source)
                continue
            size = packed_bytes(self._cuts, transfer, self._dtype)
            if transfer.owner == me and size:
                place = self._handed[
                    used : used + rows * (piece.num_bytes // (piece.last - piece.first))
                ]
                packed = place.view(item.dtype).view(rows, *item.shape[1:])
                exchange.copy(packed, source)
                source = packed
                used += size
            pair = (transfer.owner, transfer.sender)
            tags[pair] += 1
            operation, tensor, peer = (
                (dist.isend, source, transfer.sender)
                if transfer.owner == me
                else (dist.irecv, target, transfer.owner)
            )
            exchange.operations.append(
                dist.P2POp(operation, tensor.view(-1).view(torch.uint8), peer, tag=tags[pair])
            )
        return exchange

    def _place(self, number: int, cohort: int, piece: Piece) -> tuple[Tensor, Tensor | None]:
        """Return the tensor that is sent of a piece: a part of the parameter, or of a buffer. Also
        return the tensor to copy there first, if any.
        """
        item = self._cuts.item(cohort, piece)
        if self._gathers:
            return piece.in_buffer(self._buffers[number % 2], item), None
        source = piece.of(source_view(item, self._parameters[item.slice.source].data))
        if self._enqueues and self._cuts.in_place(item, source.dtype):
            return source, None
        return piece.in_buffer(self._buffers[number % 2], item), source

    # -- a transfer

    def _run(self, cohort: Cohort, lost: Callable[[], str]) -> str:
        """Gather and send, round by round. Every rank goes through all of it, so that no exchange
        misses one.

        Returns:
            why this rank's weights did not arrive; empty if they did.
        """
        deadline = time.monotonic() + cohort.timeout
        error = ""
        steps: list[tuple[Lane, Any]] = []
        streams = [lane.stream for lane in cohort.own_lanes if lane.stream is not None]
        if self._gather_stream is not None:
            for stream in (self._gather_stream, *streams):
                stream.wait_stream(torch.cuda.current_stream(self._device))
        packed: list[Any] = [None, None]
        sent: list[Any] = [None, None]
        for number in range(len(self._rounds) + 1):
            before = number - 1
            try:
                if number and not error and self._pieces[before]:
                    steps.append(self._begin(cohort, before, packed[before % 2]))
                    sent[before % 2] = steps[-1][1]
            except LaneBroken as broken:
                error = str(broken)
            if number < len(self._rounds):
                with self._gathering(sent[number % 2]):
                    rest = self._gather(number)
                    if self._enqueues:
                        rest()
                        packed[number % 2] = torch.cuda.Event()
                        packed[number % 2].record()
            if self._enqueues:
                continue
            if number:
                self._sums.add(self._first_part[before], self._first_part[number])
            if number < len(self._rounds):
                rest()
            error = error or self._waited(steps, deadline, lost)
        error = error or self._waited(steps, deadline, lost)
        if not error:
            for stream in streams:
                torch.cuda.current_stream(self._device).wait_stream(stream)
        return error

    def _begin(self, cohort: Cohort, number: int, packed: Any) -> tuple[Lane, Any]:
        """Send a round's bucket; over NCCL, behind the event of its packing, and have it summed up
        as well.
        """
        which, bucket = self._rounds[number][self._ranks.rank]
        lane = cohort.lane(which, bucket)
        size = self._cuts.buckets[which][bucket].num_bytes
        if self.memory is not None:
            buffer = self.memory.buffers[number % 2][:size]
            if self._copies_out:
                buffer.copy_(self._buffers[number % 2][:size])
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # others read it now
            return lane, lane.begin((), buffer)
        assert lane.stream is not None
        lane.stream.wait_event(packed)
        lane.begin(self._pieces[number], self._buffers[number % 2])
        with lane.on_stream():
            self._sums.add(self._first_part[number], self._first_part[number + 1])
            summed = torch.cuda.Event()  # the buffer is free behind this
            summed.record()
        return lane, summed

    @staticmethod
    def _waited(steps: list[tuple[Lane, Any]], deadline: float, lost: Callable[[], str]) -> str:
        """Wait for what is under way, and forget it. Returns why it did not arrive."""
        try:
            while steps:
                lane, step = steps.pop(0)
                lane.wait(step, deadline, lost)
        except LaneBroken as broken:
            return str(broken)
        return lost()

    @contextmanager
    def _gathering(self, free: Any) -> Iterator[None]:
        """Over NCCL: on the stream for that, behind the event after which a buffer is free."""
        if self._gather_stream is None:
            yield
            return
        with torch.cuda.stream(self._gather_stream):
            if free is not None:
                self._gather_stream.wait_event(free)
            yield

    # -- what the ranks hand one another

    def _gather(self, number: int) -> Callable[[], None]:
        """Begin to put a round's buckets together.

        Returns what is called for the rest; over NCCL it only enqueues.
        """
        with torch.no_grad():
            for target, source in self._packed[number]:
                target.copy_(source)
        if not self._gathers:
            return lambda: None
        steps = self._exchanges[number]
        begun = steps[0].begin()

        def rest() -> None:
            works = begun
            for step in (*steps[1:], None):
                for work in works:
                    work.wait()
                if step is not None:
                    works = step.begin()

        return rest
