"""A receiver's lanes, and how a rank's weights come in over them: bucket by bucket, summed up while
the rest is under way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_patching.protocol.checksum import Part, Row, WeightSummary, WeightSums
from vllm_patching.protocol.manifest import FlatSlice
from vllm_patching.protocol.messages import Route
from vllm_patching.protocol.pieces import Bucket
from vllm_patching.transport.forming import form_lanes
from vllm_patching.transport.lane import Lane, LaneBroken, LanePlace, close_lanes, nobody_lost
from vllm_patching.transport.rendezvous import Meeting


@dataclass(frozen=True)
class CohortPlace:
    """Where a receiver meets the senders to its rank.

    Attributes:
        meeting: the trainer's store.
        key: names this forming of the cohorts; no other has the same.
        members: receivers of each cohort.
        member: this receiver's number among them, from 0.
        lanes: how many senders there may be.
        tp_rank: the cohort.
        epoch: counts the trainers that have joined the server; for messages.
        route: how the weights travel, as the trainer chose.
        meeting_seconds: for forming.
        timeout: seconds for a whole transfer.
    """

    meeting: Meeting
    key: str
    members: int
    member: int
    lanes: int
    tp_rank: int
    epoch: int
    route: Route
    meeting_seconds: float
    timeout: float


def lane_places(
    meeting: Meeting,
    key: str,
    tp_rank: int,
    lanes: Sequence[int],
    member: int,
    members: int,
    route: Route,
) -> list[LanePlace]:
    """The places of one process in lanes of a cohort, as both sides name them.

    Args:
        member: 0 for the sender, 1 to `members` for the receivers.
    """
    return [
        LanePlace(
            meeting, f"lockstep/{key}/rank{tp_rank}/lane{lane}", member, members + 1, route,
            f"lane {lane} of vLLM rank {tp_rank}" + (f" (receiver {member - 1} of {members})" if member else ""),
        )
        for lane in lanes
    ]  # fmt: skip


class ReceivingCohort:
    """The lanes that one of vLLM's ranks receives over."""

    def __init__(
        self, place: CohortPlace, device: torch.device, lost: Callable[[], str] = nobody_lost
    ) -> None:
        """Form them; blocks until all members have come.

        Args:
            lost: asked now and then; why waiting is in vain, or an empty string.

        Raises:
            RendezvousError: it did not work within the deadline.
        """
        self.place = place
        self._device = device
        places = lane_places(
            place.meeting,
            place.key,
            place.tp_rank,
            range(place.lanes),
            place.member + 1,
            place.members,
            place.route,
        )
        what = (
            f"vLLM rank {place.tp_rank} could not join the cohort {place.key} (epoch {place.epoch})"
        )
        self._lanes = form_lanes(places, device, place.timeout, place.meeting_seconds, lost, what)

    def receive(
        self, target: Target, lost: Callable[[], str], told: Callable[[int, bool], None]
    ) -> WeightSummary:
        """Receive a rank's weights.

        Args:
            lost: as above.
            told: how many bytes have come, and whether it waits for others that it has asked for;
                whenever that changes.

        Returns:
            What a pass over them found.

        Raises:
            LaneBroken: they did not come. Nothing will be written to the target any more.
        """
        target.sums.reset()
        deadline = time.monotonic() + self.place.timeout
        run = self._enqueued if self.place.route is Route.NCCL else self._message_by_message
        try:
            run(target, deadline, lost, told)
        finally:
            for lane in self._lanes:
                lane.rest()
        return target.sums.read()

    def close(self) -> None:
        """Leave the lanes, and break off what is in flight."""
        close_lanes(self._lanes)

    def _message_by_message(
        self,
        target: Target,
        deadline: float,
        lost: Callable[[], str],
        told: Callable[[int, bool], None],
    ) -> None:
        """Through memory that is not the target's: what Gloo brings comes there first, since what
        is broken off may still be written to, and what the sender offers lies there.
        """
        largest = max((bucket.num_bytes for bucket in target.buckets), default=0)
        free: list[torch.Tensor] = []
        pending: deque[tuple[int, torch.Tensor, Lane, Any]] = deque()
        total = 0

        def settle() -> int:
            number, buffer, lane, step = pending.popleft()
            told(total, True)
            lane.wait(step, deadline, lost)
            told(total, False)
            if reason := lost():
                raise LaneBroken(f"{lane.place.name}: {reason}")
            target.take(number, lane.arrived(step, buffer, target.buckets[number].num_bytes))
            if self._device.type == "cuda":
                torch.cuda.current_stream(
                    self._device
                ).synchronize()  # the copy has only been enqueued
            lane.taken()
            target.add(number)
            if lane.needs_memory:
                free.append(buffer)
            return target.buckets[number].payload

        for number, bucket in enumerate(target.buckets):
            if len(pending) > len(self._lanes):
                total += settle()
            lane = self._lanes[number % len(self._lanes)]
            if lane.needs_memory:
                buffer = free.pop() if free else torch.empty(largest, dtype=torch.uint8)
            else:
                buffer = torch.empty(0, dtype=torch.uint8)
            pending.append((number, buffer, lane, lane.begin((), buffer[: bucket.num_bytes])))
        while pending:
            total += settle()
        told(total, False)

    def _enqueued(
        self,
        target: Target,
        deadline: float,
        lost: Callable[[], str],
        told: Callable[[int, bool], None],
    ) -> None:
        """NCCL: straight into the target, all of it handed to the GPU at once; each bucket is
        summed up behind its arrival.
        """
        current = torch.cuda.current_stream(self._device)
        for lane in self._lanes:
            assert lane.stream is not None
            lane.stream.wait_stream(current)
        steps: list[tuple[Lane, Any]] = []
        total = 0
        try:
            for number in range(len(target.buckets)):
                if reason := lost():
                    raise LaneBroken(f"vLLM rank {self.place.tp_rank}: {reason}")
                lane = self._lanes[number % len(self._lanes)]
                steps.append((lane, lane.begin(target.pieces(number), torch.empty(0))))
                with lane.on_stream():
                    target.add(number)
            for (lane, step), bucket in zip(steps, target.buckets, strict=True):
                told(total, True)
                lane.wait(step, deadline, lost)
                total += bucket.payload
            told(total, False)
        except LaneBroken:
            self.close()
            self._let_go(deadline)
            raise
        for lane in self._lanes:
            assert lane.stream is not None
            current.wait_stream(lane.stream)

    def _let_go(self, deadline: float) -> None:
        """Until what was aborted has left the GPU, it may still write to the target."""
        while not all(lane.stream is None or lane.stream.query() for lane in self._lanes):
            if time.monotonic() > deadline + self.place.timeout:
                raise LaneBroken(
                    f"vLLM rank {self.place.tp_rank}: what was broken off is still on the GPU after {self.place.timeout:g} s; "
                    "restart the server"
                )
            time.sleep(0.001)


class Target:
    """Where a rank's weights go, and their sums.

    Attributes:
        buckets: of the layout.
        sums: over the slices, of which the pieces are added as they come.
    """

    def __init__(
        self, layout: Sequence[FlatSlice], buckets: Sequence[Bucket], slices: Sequence[torch.Tensor]
    ) -> None:
        """
        Args:
            layout, buckets: of the rank.
            slices: for each slice of the layout the contiguous tensor that it is received into.
        """
        self.buckets = buckets
        self._layout = layout
        self._pieces = [
            [piece.of(slices[piece.item]) for piece in bucket.pieces] for bucket in buckets
        ]
        rows = [Row(item.name, tuple(item.shape), item.dtype) for item in layout]
        parts, self._first = [], [0]
        for bucket, tensors in zip(buckets, self._pieces, strict=True):
            parts += [
                Part(piece.item, piece.start, t)
                for piece, t in zip(bucket.pieces, tensors, strict=True)
            ]
            self._first.append(len(parts))
        self.sums = WeightSums.of_parts(rows, parts, slices[0].device)
        if slices[0].device.type == "cuda":
            self.sums.all()  # compiles the kernel now, and not in the first update

    def pieces(self, number: int) -> list[torch.Tensor]:
        """Where the pieces of a bucket go."""
        return self._pieces[number]

    def take(self, number: int, buffer: torch.Tensor) -> None:
        """Copy a bucket that has come in a buffer to its place."""
        with torch.no_grad():
            for piece, tensor in zip(
                self.buckets[number].pieces, self._pieces[number], strict=True
            ):
                tensor.copy_(piece.in_buffer(buffer, self._layout[piece.item]))

    def add(self, number: int) -> None:
        """Sum up a bucket that has come."""
        self.sums.add(self._first[number], self._first[number + 1])
