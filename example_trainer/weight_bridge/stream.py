"""An update's weights on their way: bucket by bucket gathered, packed, sent and summed up, through
two buffers of bounded size.

While one bucket is on its way to the servers, the rows of the next come together from the trainer's
ranks (FSDP2), in the other buffer. One process that holds whole parameters sends what lies
contiguous in them from where it is, over NCCL; every other route wants a bucket in one piece. A
tensor-parallel trainer never gets here: its weights are vLLM's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from example_trainer.errors import BridgeError
from example_trainer.models.shards import Shards
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.cohorts import Cohort
from example_trainer.weight_bridge.send_plan import (
    Cuts,
    SendPlan,
    Transfer,
    buffer_bytes,
    packed_bytes,
    steps_of,
)
from vllm_patching.protocol.checksum import Part, Row, WeightSums, summary_of
from vllm_patching.protocol.manifest import BUCKET_BYTES, Manifest, Piece, source_view
from vllm_patching.protocol.messages import Route
from vllm_patching.transport.lane import Lane, LaneBroken, SendMemory


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
        buffer_bytes: what this process keeps to send from, as `send_plan.buffer_bytes` told the
            memory plan.
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
            plan: who sends.
            device: this process's.
            route: how the weights travel.
            bucket_bytes: see pieces.buckets; the receivers'.
        """
        self._shards: Shards = getattr(model, "shards", None) or Shards()
        self._parameters = dict(model.named_parameters())
        dtype = next(iter(self._parameters.values())).dtype
        self._served = manifests[0].entries[0].torch_dtype
        self._ranks, self._device = ranks, device
        self._cuts = cuts = Cuts.of(manifests, bucket_bytes)
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
        """The model's parameters lie elsewhere now."""
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
        return {name: self._shards.local(held) for name, held in self._parameters.items()}

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
                source = local[item.name][transfer.local : transfer.local + rows]
                if item.slice.dim == 1:
                    source = source.narrow(1, item.slice.source_start, item.slice.length)
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
        """What is sent of a piece: a part of the parameter, or of a buffer; and what is copied
        there first, if anything is.
        """
        item = self._cuts.item(cohort, piece)
        if self._gathers:
            return piece.in_buffer(self._buffers[number % 2], item), None
        source = piece.of(source_view(item, self._parameters[item.name].data))
        if self._enqueues and self._cuts.in_place(cohort, item, source.dtype):
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
