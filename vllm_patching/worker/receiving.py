"""The receiving half of the bridge in each rank: vLLM's workers, and processes that hold weights for
others.

A thread receives, so that the worker's main thread stays free. It owns the rendezvous with the
trainer, the process groups, the staging buffer and the time-outs. A transfer is one of two:

- overlapped: into the staging buffer while the model generates; the worker's main thread commits it
  between two steps;
- direct: into the live parameters, while the engine is paused and no step runs. It needs no second
  copy of the weights.

Arrived values are summed and searched for NaN in the same pass, bucket by bucket, during the
transfer. WeightReceiver's methods run on the main thread of the rank's process. Their names are
prefixed, since they share one space with vLLM's own. Nothing here needs vLLM.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_patching.protocol.checksum import Part, Row, WeightSummary, WeightSums
from vllm_patching.protocol.manifest import (
    BUCKET_BYTES,
    Bucket,
    FlatSlice,
    Manifest,
    buckets,
    flat_layout,
    flat_views,
    local_view,
)
from vllm_patching.protocol.messages import Check, CohortOrder, FirstStepAnswer, Room, Route
from vllm_patching.transport.addresses import REACH_SECONDS, reach
from vllm_patching.transport.lane import (
    Lane,
    LaneBroken,
    close_lanes,
    form_lanes,
    lane_places,
    nobody_lost,
)
from vllm_patching.transport.rendezvous import Meeting, PeerWatch
from vllm_patching.transport.shared_memory import SharedMemoryError, open_event, reached_in_time


class FirstStep:
    """The moment at which a vLLM worker begins its next step.

    The front end learns from an answer that the engine continues. That answer competes with the
    step for the interpreter, so the front end measures a longer pause. Call all methods on the
    worker's main thread.
    """

    def __init__(self, worker: Any) -> None:
        """
        Args:
            worker: has a method `execute_model`, looked up on it for each step.
        """
        self._worker = worker
        self.began: float | None = None
        """time.monotonic() in seconds, None as long as there has been no step since `watch`.
        Comparable within one host."""

    def watch(self) -> None:
        """Note the next step. Later steps cost nothing."""
        self.began = None
        self._worker.execute_model = self._note_and_execute

    def _note_and_execute(self, *args: Any, **kwargs: Any) -> Any:
        self.began = time.monotonic()
        del self._worker.execute_model  # uncovers the method of its class
        return self._worker.execute_model(*args, **kwargs)


@dataclass(frozen=True)
class CohortPlace:
    """The place where a receiver meets the senders to its rank.

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
            told: called with the bytes that have come, and whether the rank waits for more,
                whenever that changes.

        Returns:
            the result of a pass over them.

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
        """Through memory that is not the target's. Gloo's bytes come there first, since a
        broken-off transfer may still write. The sender's offered memory lies there too.
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
        """Wait until aborted operations have left the GPU: until then they may still write to the
        target.
        """
        while not all(lane.stream is None or lane.stream.query() for lane in self._lanes):
            if time.monotonic() > deadline + self.place.timeout:
                raise LaneBroken(
                    f"vLLM rank {self.place.tp_rank}: what was broken off is still on the GPU after {self.place.timeout:g} s; "
                    "restart the server"
                )
            time.sleep(0.001)


class Target:
    """The destination of a rank's weights, and their sums.

    Attributes:
        buckets: of the layout.
        sums: over the slices; pieces are added as they come.
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


@dataclass
class UpdaterStatus:
    """The state of the thread, as other processes see it.

    Attributes:
        phase: idle, joining, ready, receiving, received, leaving or failed.
        epoch: the trainer's epoch that it has joined; 0 before the first.
        cohort: the key of the cohort that it is in, or is joining; empty if none.
        version: the weight version that was received, or None.
        received_bytes: of the transfer under way, or of the last one.
        waits: it has asked for all that it can take now, and waits for it to come.
        checksum: of what was received.
        not_finite: name of the first parameter in it that holds NaN or infinity; empty if none
            does.
        error: what went wrong last, empty while all is well.
    """

    phase: str = "idle"
    epoch: int = 0
    cohort: str = ""
    version: int | None = None
    received_bytes: int = 0
    waits: bool = False
    checksum: str = ""
    not_finite: str = ""
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class _Command:
    status: UpdaterStatus
    called_off: threading.Event = field(default_factory=threading.Event, kw_only=True)


@dataclass(frozen=True)
class _Aim(_Command):
    direct: bool


@dataclass(frozen=True)
class _Cohort(_Command):
    place: CohortPlace


@dataclass(frozen=True)
class _Receive(_Command):
    version: int


@dataclass(frozen=True)
class _Leave(_Command):
    keep_staging: bool = False


class WeightUpdater:
    """One thread, fed with commands by the worker's main thread."""

    def __init__(
        self,
        tp_rank: int,
        layout: Sequence[FlatSlice],
        num_bytes: int,
        live: Sequence[tuple[str, torch.Tensor]],
        logger: logging.Logger,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """
        Args:
            tp_rank: this worker's.
            layout, num_bytes: of this rank's flat buffer, from manifest.flat_layout.
            live: for each slice of the layout its part of the live parameters, by name; contiguous.
            logger: the worker's logger, so that the lines appear in vLLM's log.
            bucket_bytes: see pieces.buckets; the trainer's.
        """
        self.name = f"WeightUpdater_TP{tp_rank}"
        self.num_bytes = num_bytes
        self.staging: torch.Tensor | None = None
        self._layout = layout
        self._buckets = buckets(layout, bucket_bytes)
        self._live = live
        self._device = live[0][1].device
        self._logger = logger
        self._status = UpdaterStatus()
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._cohort: ReceivingCohort | None = None
        self._target: Target | None = None
        self._watch: PeerWatch | None = None
        self._targets: Sequence[tuple[str, torch.Tensor]] = ()
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._at_rest = threading.Condition()
        self._open: list[_Command] = []  # asked and not done, the present one first
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._logger.info("[vLLM Patch] ✓ Weight updater thread started (name: %s)", self.name)

    @property
    def status(self) -> UpdaterStatus:
        if self._thread.is_alive() or self._status.phase == "idle":
            return self._status
        return UpdaterStatus(
            phase="failed",
            epoch=self._status.epoch,
            error=self._status.error or f"thread {self.name} has died",
        )

    @property
    def receives_directly(self) -> bool:
        """Return whether transfers go into the live weights."""
        return self._targets is self._live

    def aim_at(self, direct: bool) -> None:
        """Choose for the transfers to come: the live weights, or a staging buffer, which is made or
        given back accordingly. Leaves the present cohort. Returns at once; watch `status`.
        """
        self._call_off()
        self._submit(_Aim(UpdaterStatus(phase="leaving", epoch=self._status.epoch), direct))

    def join_cohort(self, place: CohortPlace) -> None:
        """Leave the present cohort, if any, and join another. Returns at once; watch `status`."""
        self._call_off()
        self._submit(
            _Cohort(UpdaterStatus(phase="joining", epoch=place.epoch, cohort=place.key), place)
        )

    def leave(self, keep_staging: bool = False) -> None:
        """Leave the present trainer, if any, and give the staging buffer back. Returns at once;
        `wait` for it.

        Args:
            keep_staging: only leave the cohort; the trainer is going to form another.
        """
        self._call_off()
        self._submit(_Leave(UpdaterStatus(phase="leaving", epoch=self._status.epoch), keep_staging))

    def receive(self, version: int) -> None:
        """Receive the weights of `version`. Returns at once; watch `status`."""
        now = self._status
        self._submit(
            _Receive(UpdaterStatus(phase="receiving", epoch=now.epoch, cohort=now.cohort), version)
        )

    def wait(self, seconds: float) -> UpdaterStatus:
        """Give the command in progress up to `seconds` to end; returns the status then."""
        with self._at_rest:
            self._at_rest.wait_for(lambda: not self._open, seconds)
        return self.status

    def trainer_gone(self) -> bool:
        """Return whether the process of the joined trainer has ended."""
        watch = self._watch
        return watch is not None and watch.gone()

    def discard(self, seconds: float) -> bool:
        """Call a transfer off, and forget what was received. Returns whether the thread has let go
        of its target by then. A cohort that it is about to meet is met.
        """
        with self._at_rest:
            for transfer in self._transfers():
                transfer.called_off.set()
            done = self._at_rest.wait_for(lambda: not self._transfers(), seconds)
        self._status.version = None
        if self._status.phase == "received":
            self._status.phase = "ready"
        return done

    def staged(self) -> list[torch.Tensor]:
        """For each slice of the layout, what was received in an overlapped transfer."""
        return [tensor for _, tensor in self._targets]

    def _transfers(self) -> list[_Command]:
        """Return the transfers that have not ended."""
        return [command for command in self._open if isinstance(command, _Receive)]

    def _call_off(self) -> None:
        """Call off all earlier commands."""
        with self._at_rest:
            for command in self._open:
                command.called_off.set()

    def _submit(self, command: _Command) -> None:
        with self._at_rest:
            self._open.append(command)
        self._status = command.status
        self._commands.put(command)

    def _run(self) -> None:
        stream: AbstractContextManager[Any] = (
            torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()
        )
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with stream:
            while True:
                self._obey(self._commands.get())
                with self._at_rest:
                    self._open.pop(0)
                    self._at_rest.notify_all()

    def _obey(self, command: _Command) -> None:
        # A failed command must not end the thread: the next trainer needs it. The reason is kept in
        # the status. Each command has its own status, so that a late end does not overwrite a later
        # command's.
        try:
            if isinstance(command, _Aim):
                self._leave()
                self.aim(command.direct)
                command.status.phase = "idle"
            elif isinstance(command, _Cohort):
                self._join_cohort(command)
            elif isinstance(command, _Receive):
                self._receive(command)
            elif isinstance(command, _Leave):
                self._leave()
                if not command.keep_staging:
                    self._drop_staging()
                command.status.phase = "idle"
        except Exception as error:  # noqa: BLE001
            self._logger.error(
                "[vLLM Patch] %s: %s failed: %s",
                self.name,
                type(command).__name__.strip("_").lower(),
                error,
            )
            self._logger.debug("%s", traceback.format_exc())
            command.status.phase = "failed"
            command.status.error = f"{self.name}: {error}"

    def _join_cohort(self, command: _Cohort) -> None:
        self._leave()
        place = command.place
        meeting = place.meeting
        reach(
            meeting.host,
            meeting.port,
            f"vLLM rank {place.tp_rank}",
            min(REACH_SECONDS, place.meeting_seconds / 2),
        )
        self._watch = PeerWatch(meeting, place.meeting_seconds)
        self._cohort = ReceivingCohort(place, self._device, self._lost)
        command.status.phase = "ready"
        how = (
            "directly into the live weights" if self.receives_directly else "into a staging buffer"
        )
        self._logger.info(
            "[vLLM Patch] %s joined the trainer (epoch %d, cohort %s, receiver %d of %d), receives %s",
            self.name, place.epoch, place.key, place.member, place.members, how,
        )  # fmt: skip

    def aim(self, direct: bool) -> None:
        """Choose where to receive into: the live weights, or a staging buffer, which is made or
        given back accordingly.
        """
        if direct:
            self._drop_staging()
            self._targets = self._live
        else:
            if self.staging is None:
                self.staging = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self._device)
            self._targets = [
                (item.name, view) for item, view in flat_views(self.staging, self._layout)
            ]
        self._target = Target(self._layout, self._buckets, self.staged())

    def _drop_staging(self) -> None:
        had, self.staging, self._targets, self._target = self.staging is not None, None, (), None
        if had and self._stream is not None:
            # PyTorch would keep the memory: to vLLM it would not look free, and a trainer beside it
            # could not have it.
            self._stream.synchronize()
            torch.cuda.empty_cache()

    def _receive(self, command: _Receive) -> None:
        cohort, target = self._cohort, self._target
        if cohort is None or target is None:
            raise RuntimeError("it is in no cohort; call /bridge/init and /bridge/cohort first")
        status = command.status

        def told(received: int, waits: bool) -> None:
            status.received_bytes, status.waits = received, waits

        try:
            summary = cohort.receive(target, self._lost, told)
        except LaneBroken:
            # It holds what did not arrive: the trainer forms another one.
            self._leave()
            raise
        finally:
            status.waits = False
        status.version, status.checksum, status.not_finite = (
            command.version,
            summary.checksum,
            summary.not_finite,
        )
        status.phase = "received"

    def _lost(self) -> str:
        if self._open[
            0
        ].called_off.is_set():  # asked by this thread alone, in the middle of a command
            return "it was called off"
        return "the trainer's process has ended" if self.trainer_gone() else ""

    def _leave(self) -> None:
        cohort, self._cohort = self._cohort, None
        if cohort is not None:
            cohort.close()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()


STAGING_MARGIN = 1 << 30
"""Bytes of GPU memory that a staging buffer must leave free for whatever vLLM still allocates."""
LEAVE_SECONDS = 2.0
"""Seconds for which a joining trainer waits until the previous one's memory here is free."""


class WeightReceiver:
    """Mixed into vLLM's worker.

    Attributes are made by `lockstep_open`, since vLLM never calls an __init__ of ours.
    """

    def lockstep_open(
        self,
        manifest: Manifest,
        parameters: Mapping[str, torch.Tensor],
        replica: int,
        logger: logging.Logger,
        updater: WeightUpdater | None = None,
    ) -> None:
        """Start the updater thread of a rank.

        Args:
            manifest: of the rank.
            parameters: what it holds, by name.
            replica: which of its server's engine cores it belongs to, from 0.
            logger: whose lines appear in the process's log.
            updater: the thread, if not an ordinary one.
        """
        self._lockstep_logger = logger
        self._lockstep_rank, self._lockstep_replica = manifest.tp_rank, replica
        self._lockstep_device = next(iter(parameters.values())).device
        layout, num_bytes = flat_layout(manifest)
        live = [(item.name, local_view(item, parameters[item.name].data)) for item in layout]
        self._lockstep_live = [tensor for _, tensor in live]
        self._lockstep_recompute: Callable[[], str] = str
        self._lockstep_sums = WeightSums(live)
        self._lockstep_written: torch.cuda.Event | None = None
        self._lockstep_writer = ("", 0.0)
        self._lockstep_updater = updater or WeightUpdater(
            manifest.tp_rank, layout, num_bytes, live, logger
        )
        self._lockstep_updater.start()
        self._lockstep_first_step = FirstStep(self)

    def lockstep_room(self) -> Room:
        """Bytes that a staging buffer needs, and bytes free for one (None on a CPU, where memory is
        not the question).
        """
        updater = self._lockstep_updater
        free = None
        if self._lockstep_device.type == "cuda":
            free = torch.cuda.mem_get_info(self._lockstep_device)[0] - STAGING_MARGIN
        return {"needed": 0 if updater.staging is not None else updater.num_bytes, "free": free}

    def lockstep_aim(self, direct: bool) -> None:
        """Choose where transfers go from now on: into the live parameters, or into a staging
        buffer. Leaves the cohort that the updater thread is in. Returns at once.
        """
        self._lockstep_updater.aim_at(direct)

    def lockstep_cohort(self, order: CohortOrder) -> None:
        """Have the updater thread leave its cohort and join another. Returns at once."""
        if not order["members"]:
            self._lockstep_updater.leave(keep_staging=True)
            return
        place = CohortPlace(
            Meeting(order["host"], order["port"], order["secret"]),
            order["key"],
            order["members"],
            order["index"] + self._lockstep_replica,
            order["lanes"],
            self._lockstep_rank,
            order["epoch"],
            Route(order["route"]),
            order["timeout"],
            order["timeout"],
        )
        self._lockstep_updater.join_cohort(place)

    def lockstep_leave(self) -> None:
        """Have the updater thread leave its trainer and give its staging buffer back: the next one
        writes by itself.
        """
        self._lockstep_updater.leave()
        self._lockstep_updater.wait(LEAVE_SECONDS)

    def lockstep_receive(self, version: int) -> None:
        """Have the updater thread receive the weights of `version`. Returns at once."""
        if self._lockstep_device.type == "cuda":
            # a direct transfer must not overtake a step that still reads the old weights
            torch.cuda.synchronize()
        self._lockstep_first_step.watch()
        self._lockstep_updater.receive(version)

    def lockstep_status(self, patience: float = 0.0) -> dict[str, Any]:
        """The updater thread's status, the rank and whether the trainer has ended; waits up to
        `patience` seconds for the thread's command to end.
        """
        updater = self._lockstep_updater
        status = updater.wait(patience).to_json()
        who = {"tp_rank": self._lockstep_rank, "replica": self._lockstep_replica}
        return {**who, "trainer_gone": updater.trainer_gone(), **status}

    def lockstep_commit(self) -> Check:
        """Copy what is staged into the live parameters, and check those."""
        with torch.no_grad():
            torch._foreach_copy_(self._lockstep_live, self._lockstep_updater.staged())
        return self.lockstep_check()

    def lockstep_first_step(self) -> FirstStepAnswer:
        """Return when this rank began its first step after the last transfer or check
        (time.monotonic(), or None).
        """
        return {"tp_rank": self._lockstep_rank, "began": self._lockstep_first_step.began}

    def lockstep_discard(self, patience: float) -> bool:
        """Forget what was received; a transfer in flight is called off.

        Returns whether it has ended by then.
        """
        return self._lockstep_updater.discard(patience)

    def lockstep_follow(self, events: list[str], trainer: str, seconds: float) -> str:
        """Have checks of what a trainer of a single copy wrote wait for what it has enqueued by the
        time that it asks for one.

        Args:
            events: handle of an event for each rank, which the trainer records behind its writes;
                none: nothing to wait for.
            trainer: for messages.
            seconds: that a check waits at most.

        Returns:
            empty, or why this rank cannot; then the trainer must wait itself before it asks.
        """
        self._lockstep_written, self._lockstep_writer = None, (trainer, seconds)
        try:
            if events:
                self._lockstep_written = open_event(
                    events[self._lockstep_rank], self._lockstep_device
                )
        except SharedMemoryError as error:
            self._lockstep_logger.warning("[vLLM Patch] rank %d: %s", self._lockstep_rank, error)
            return str(error)
        return ""

    def lockstep_check_written(self) -> Check:
        """Check as lockstep_check does, behind the writes of the trainer that is followed.

        Its process may have been killed after it recorded its event and before its GPU came there.
        So the wait has an end. Then `late` names what did not come, and the weights are not
        checked.
        """
        trainer, seconds = self._lockstep_writer
        late = ""
        try:
            if self._lockstep_written is not None and not reached_in_time(
                self._lockstep_written, seconds
            ):
                late = f"{trainer} has not finished its writes on the GPU within {seconds:g} s"
        except SharedMemoryError as error:
            late = f"whether {trainer} has finished its writes cannot be known: {error}"
        if late:
            # An answer and not an exception: vLLM would leave the other ranks' answers behind, for
            # the next call to find.
            return {"tp_rank": self._lockstep_rank, "checksum": "", "not_finite": "", "late": late}
        return self.lockstep_check()

    def lockstep_check(self) -> Check:
        """Checksum of the live parameters and the first of them that holds NaN or infinity (or an
        empty string).

        On a GPU it comes after every step of the engine.
        """
        if self._lockstep_device.type == "cuda":
            torch.cuda.synchronize()
        with torch.no_grad():
            parameters = self._lockstep_recompute()
        summary = self._lockstep_sums.all()
        self._lockstep_first_step.watch()
        return {
            "tp_rank": self._lockstep_rank,
            "checksum": summary.checksum,
            "not_finite": summary.not_finite,
            "parameters": parameters,
        }
