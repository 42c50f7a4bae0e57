"""The thread in each vLLM worker that receives weights, so that the worker's main thread stays
free.

It owns the rendezvous with the trainer, the process groups, the staging buffer and the time-outs. A
transfer is one of two:

- overlapped: into the staging buffer while the model generates; the worker's main thread commits it
  between two steps;
- direct: into the live parameters, while the engine is paused and no step runs. It needs no second
  copy of the weights.

Either way what has arrived is summed and searched for NaN in the same pass, bucket by bucket, while
the rest is under way.
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_patching.protocol.manifest import FlatSlice, flat_views
from vllm_patching.protocol.pieces import BUCKET_BYTES, buckets
from vllm_patching.transport.addresses import REACH_SECONDS, reach
from vllm_patching.transport.cohort import CohortPlace, ReceivingCohort, Target
from vllm_patching.transport.lane import LaneBroken
from vllm_patching.transport.rendezvous import PeerWatch


@dataclass
class UpdaterStatus:
    """What the thread is doing, as told to the other processes.

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
        """Whether transfers go into the live weights."""
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
        """Whether the process of the trainer that was joined has ended."""
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
        """Those that have not ended."""
        return [command for command in self._open if isinstance(command, _Receive)]

    def _call_off(self) -> None:
        """What has been asked so far is of no use any more."""
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
        # A failed command must not end the thread: the next trainer needs it. The reason is kept
        # for whoever asks. Each command has a status of its own, so that one which ends late says
        # nothing about what was asked since.
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
