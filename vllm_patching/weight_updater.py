"""The thread in each vLLM worker that receives weights, so that the worker's main thread goes on generating.

It owns the rendezvous with the trainer, the process groups, the staging buffer and the time-outs. It never writes a live
parameter: what it has received waits in the staging buffer until the worker's main thread commits it between two steps.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_patching.distributed_utils import TRAINER_RANK, BridgeGroups, Rendezvous, join_store
from vllm_patching.manifest import FlatSlice, Manifest, flat_layout

BUCKET_BYTES = 64 << 20
"""Bytes per message. Both sides cut the flat buffer at multiples of this."""

_HEARTBEAT_SECONDS = 1.0


@dataclass
class UpdaterStatus:
    """What the thread is doing, as told to the other processes.

    Attributes:
        phase: idle, joining, ready, receiving, staged or failed.
        epoch: the trainer's epoch that it has joined; 0 before the first.
        staged_version: the weight version in the staging buffer, or None.
        error: what went wrong last, empty while all is well.
        heartbeat: time.time() of the thread's last sign of life.
        receive_seconds: how long the last transfer took from its first byte's request to its last.
    """

    phase: str = "idle"
    epoch: int = 0
    staged_version: int | None = None
    error: str = ""
    heartbeat: float = field(default_factory=time.time)
    receive_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class _Join:
    status: UpdaterStatus
    rendezvous: Rendezvous


@dataclass(frozen=True)
class _Receive:
    status: UpdaterStatus
    version: int


class WeightUpdater:
    """One thread, fed with commands by the worker's main thread."""

    def __init__(self, manifest: Manifest, device: torch.device, logger: logging.Logger) -> None:
        """
        Args:
            manifest: what this rank holds; decides the staging buffer's layout.
            device: where the parameters live; the staging buffer is made there, at the first join.
            logger: the worker's logger, so that the lines appear in vLLM's log.
        """
        self.name = f"WeightUpdater_TP{manifest.tp_rank}"
        self.layout: list[FlatSlice]
        self.layout, self.num_bytes = flat_layout(manifest)
        self.staging: torch.Tensor | None = None
        self._device = device
        self._logger = logger
        self._status = UpdaterStatus()
        self._commands: queue.SimpleQueue[_Join | _Receive] = queue.SimpleQueue()
        self._groups: BridgeGroups | None = None
        self._called_off = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._logger.info("[vLLM Patch] ✓ Weight updater thread started (name: %s)", self.name)

    @property
    def status(self) -> UpdaterStatus:
        if self._thread.is_alive() or self._status.phase == "idle":
            return self._status
        return UpdaterStatus(
            phase="failed", epoch=self._status.epoch, error=self._status.error or f"thread {self.name} has died"
        )

    def join(self, rendezvous: Rendezvous) -> None:
        """Leave the present trainer, if any, and meet the one at `rendezvous`. Returns at once; watch `status`."""
        self._called_off.set()
        self._status = UpdaterStatus(phase="joining", epoch=rendezvous.epoch)
        self._commands.put(_Join(self._status, rendezvous))

    def receive(self, version: int) -> None:
        """Fill the staging buffer with the weights of `version`. Returns at once; watch `status`."""
        self._status = UpdaterStatus(phase="receiving", epoch=self._status.epoch)
        self._called_off.clear()
        self._commands.put(_Receive(self._status, version))

    def discard(self) -> None:
        """Forget what is staged; a transfer in flight is called off."""
        self._called_off.set()
        self._status.staged_version = None
        if self._status.phase == "staged":
            self._status.phase = "ready"

    def _run(self) -> None:
        while True:
            self._status.heartbeat = time.time()
            try:
                command = self._commands.get(timeout=_HEARTBEAT_SECONDS)
            except queue.Empty:
                continue
            # A failed command must not end the thread: the next trainer needs it. The reason is kept for whoever asks. Each
            # command has a status of its own, so that one which ends late says nothing about what was asked since.
            try:
                if isinstance(command, _Join):
                    self._join(command)
                else:
                    self._receive(command)
            except Exception as error:  # noqa: BLE001
                self._logger.error(
                    "[vLLM Patch] %s: %s failed: %s", self.name, type(command).__name__.strip("_").lower(), error
                )
                self._logger.debug("%s", traceback.format_exc())
                command.status.phase = "failed"
                command.status.error = f"{self.name}: {error}"

    def _join(self, command: _Join) -> None:
        self._leave()
        if self.staging is None:
            self.staging = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self._device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._groups = BridgeGroups(command.rendezvous, join_store(command.rendezvous), self._device)
        command.status.phase = "ready"
        self._logger.info("[vLLM Patch] %s joined the trainer (epoch %d)", self.name, command.rendezvous.epoch)

    def _receive(self, command: _Receive) -> None:
        if self._groups is None or self.staging is None:
            raise RuntimeError("no trainer has joined; call /bridge/init first")
        started = time.perf_counter()
        for start in range(0, self.num_bytes, BUCKET_BYTES):
            self._groups.receive(self.staging[start : start + BUCKET_BYTES], TRAINER_RANK, self._called_off.is_set)
            command.status.heartbeat = time.time()
        command.status.receive_seconds = time.perf_counter() - started
        command.status.staged_version = command.version
        command.status.phase = "staged"

    def _leave(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.close()
