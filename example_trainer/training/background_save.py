"""Saving while training goes on: the state of one step is held still, and a thread of each rank
writes it or hands it on.

Masters and moments change in `MasterAdamW.step` alone. So they are copied to host memory while the
next batch is forwarded and goes backward, and the next step waits until that has been done, which
it usually has. Where the host has no room for a copy, they are read where they are, and the next
step waits until they have been written.

With several ranks each copies its own part, which needs nobody else; the parts meet on rank 0 one
tensor at a time, over a process group of their own, so that nothing waits for the disk and no rank
needs memory for the whole.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from example_trainer.errors import CheckpointError, TrainerError
from example_trainer.parallel.ranks import Ranks
from example_trainer.training.host_memory import HostArena, free_host_memory
from example_trainer.training.optimizer import MasterAdamW

logger = logging.getLogger(__name__)

STALLED_SECONDS = 600.0
"""After so long without any progress a save counts as failed."""
_SHARE_OF_FREE_MEMORY = {"cuda": 0.7, "cpu": 0.25}
"""How much of it a copy may take, by the device that trains: on a CPU, training itself needs it."""
_SENT_AT_ONCE = 64 << 20
"""Elements in one message between ranks."""

Write = Callable[[Iterator[tuple[str, Tensor]], Callable[[], None]], None]


class HostCopy:
    """The host memory that states are copied into, taken once and used for every checkpoint.

    Args:
        optimizer: whose state it is for.
        ranks_here: processes that share this machine's memory.
        weights_only: checkpoints hold no optimizer state, so the masters alone are copied.
    """

    def __init__(
        self, optimizer: MasterAdamW, ranks_here: int = 1, weights_only: bool = False
    ) -> None:
        self._optimizer, self._ranks_here, self._weights_only = optimizer, ranks_here, weights_only
        self._tensors: dict[str, Tensor] | None = None
        self._lock, self._taken = threading.Lock(), False

    def prepare(self) -> None:
        """Begin to take the memory, in a thread, so that the first checkpoint need not wait for it."""
        threading.Thread(target=self.tensors, name="memory for checkpoints", daemon=True).start()

    def tensors(self) -> dict[str, Tensor] | None:
        """The tensors to copy into, by key; None if the machine has too little memory to spare.

        Takes seconds for each 10 GB when called first.
        """
        with self._lock:
            if not self._taken:
                self._taken = True
                self._take()
        return self._tensors

    def _take(self) -> None:
        state = self._optimizer.state_dict()
        if self._weights_only:
            state = {key: tensor for key, tensor in state.items() if key.startswith("master.")}
        needed, free = (
            sum(tensor.nbytes for tensor in state.values()),
            free_host_memory()[0] // self._ranks_here,
        )
        reason = f"{free / 1e9:.1f} GB of memory are free"
        if needed <= _SHARE_OF_FREE_MEMORY[self._optimizer.device.type] * free:
            try:
                found: dict[str, Tensor] = {}
                for dtype in {tensor.dtype for tensor in state.values()}:
                    shapes = {
                        key: tuple(tensor.shape)
                        for key, tensor in state.items()
                        if tensor.dtype == dtype
                    }
                    found |= HostArena(shapes, self._optimizer.device, dtype).tensors
                self._tensors = found
                return
            except TrainerError as error:
                reason = str(error)
        logger.warning(
            "Checkpoints are written without a copy, which takes %.1f GB (%s): an optimizer step that comes meanwhile waits "
            "until they are on the disk", needed / 1e9, reason,
        )  # fmt: skip


class BackgroundSave:
    """One checkpoint on its way to the disk.

    Args:
        what: is saved, for messages.
        optimizer: its state is that of the checkpoint; it is told to wait for the reading.
        memory: to copy into.
        keys: of the state, in the order in which the tensors are wanted; a key may come twice. The
            same on every rank.
        write: called in a thread of rank 0, with the whole tensors in host memory, one at a time,
            and with what it shall call again and again while there is progress.
        ranks, group: of the trainer, and the group over which the parts meet; None for one rank.
    """

    def __init__(
        self,
        what: str,
        optimizer: MasterAdamW,
        memory: HostCopy,
        keys: Sequence[str],
        write: Write,
        ranks: Ranks,
        group: Any,
    ) -> None:
        self.what = what
        self._optimizer, self._memory, self._keys, self._write = optimizer, memory, keys, write
        self._ranks, self._group = ranks, group
        state = optimizer.state_dict()
        self._state = {key: state[key] for key in keys}
        self._error: BaseException | None = None
        self._read, self._done = threading.Event(), threading.Event()
        self._moved_at = time.monotonic()
        device = optimizer.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(
                torch.cuda.current_stream(device)
            )  # the step that made this state
        optimizer.wait_for_readers = self._wait_until_read
        self._thread = threading.Thread(target=self._run, name=f"saving {what}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank's part of it has ended, well or not."""
        return self._done.is_set()

    def moved(self) -> None:
        """Note that there is progress."""
        self._moved_at = time.monotonic()

    def result(self) -> None:
        """Wait until it has ended, and raise what it failed with.

        Raises:
            CheckpointError: it could not be written, or has made no progress for too long.
        """
        self._wait(self._done)
        self._thread.join(timeout=STALLED_SECONDS)  # it has nothing left to do
        if self._error is not None:
            raise self._error

    def _wait(self, event: threading.Event) -> None:
        while not event.wait(1.0):
            if time.monotonic() - self._moved_at > STALLED_SECONDS:
                raise CheckpointError(
                    f"writing {self.what} has made no progress for {STALLED_SECONDS:.0f} s; look at the disk of --save-path"
                )

    def _wait_until_read(self) -> None:
        self._wait(self._read)

    def _run(self) -> None:
        try:
            if self._stream is None:
                self._save()
            else:
                with torch.cuda.device(self._optimizer.device), torch.cuda.stream(self._stream):
                    self._save()
        except BaseException as error:  # noqa: BLE001 - raised where the checkpoint is waited for
            self._error = error
        finally:
            self._read.set()
            self._done.set()

    def _save(self) -> None:
        copies = self._memory.tensors()
        if copies is not None:
            for key, tensor in self._state.items():
                copies[key].copy_(tensor, non_blocking=True)
                self.moved()
            if self._stream is not None:
                self._stream.synchronize()
            self._state = copies
            self._read.set()
        if not self._ranks.is_main:
            self._hand_on()
            return
        tensors = self._gathered()
        try:
            self._write(tensors, self.moved)
        finally:
            deque(tensors, maxlen=0)  # the other ranks send, whether or not rank 0 can write

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        shards = self._optimizer.shards
        for key in self._keys:
            name, parts, kind = (
                key.partition(".")[2],
                [self._state[key].cpu()],
                self._optimizer.kind_of(key),
            )
            for rank in range(1, self._ranks.world_size):
                part = torch.empty(shards.local_shape(name, rank, kind.block), dtype=kind.dtype)
                self._exchange(part, partial(self._receive, rank))
                parts.append(part)
            yield key, shards.joined(name, parts, kind.block)

    def _hand_on(self) -> None:
        for key in self._keys:
            self._exchange(
                self._state[key].cpu().contiguous(),
                lambda message: self._group.send([message], 0, 0),
            )

    def _receive(self, rank: int, message: Tensor) -> Any:
        return self._group.recv([message], rank, 0)

    def _exchange(self, tensor: Tensor, start: Callable[[Tensor], Any]) -> None:
        for message in tensor.view(-1).split(_SENT_AT_ONCE) if tensor.numel() else ():
            try:
                start(message).wait()
            except RuntimeError as error:
                raise self._ranks.lost(f"writing {self.what}", error) from error
            self.moved()
