"""The thread that makes the next batch ready, and the copy of its bins to the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from example_trainer.batch.client import TrainedBatch
from example_trainer.batch.reader import PackedBatch
from example_trainer.batch.scatter import Minibatches
from example_trainer.errors import OutOfMemoryError, TrainerError

_LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class Prepared:
    """What the thread made of a batch: this rank's bins on its device, or the reason why there are
    none. `lease`, `queue_size` and `packed` are rank 0's alone.
    """

    lease: TrainedBatch | None = None
    queue_size: int = 0
    packed: PackedBatch | None = None
    minibatches: Minibatches = ()
    copied: torch.cuda.Event | None = None
    error: TrainerError | None = None


class Preparing:
    """The thread: it prepares one batch each time that one is asked for, and holds it until it is
    taken.

    Args:
        prepare: makes the batch to be trained on with the weights of a version; runs in the thread.
        last_version: the version at which the run ends; nothing is prepared ahead for later ones.
        ahead: when a batch is taken, go on with the next at once.
    """

    def __init__(self, prepare: Callable[[int], Prepared], last_version: int, ahead: bool) -> None:
        self._prepare, self._last_version, self._ahead = prepare, last_version, ahead
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        """Guards what follows."""
        self._wanted: int | None = (
            None  # the highest version at which the batch that is asked for may be trained on
        )
        self._prepared: Prepared | None = None
        self._ended: BaseException | None = None  # what ended the thread
        self._closed = False
        self._waiting_since: float | None = None

    @property
    def ready(self) -> bool:
        """Whether a batch is there."""
        return self._prepared is not None

    @property
    def closed(self) -> bool:
        """Whether nobody waits for batches any more."""
        return self._closed

    def want(self, version: int) -> None:
        """Ask for a batch, unless one is there or on its way."""
        with self._changed:
            if self._prepared is None and self._wanted is None:
                self._go_on(version)

    def take(self, version: int, seconds: float) -> Prepared | None:
        """The batch to train on with the weights of a version, when it is there; None if it is not
        within so many seconds.

        Raises:
            BaseException: what ended the thread.
        """
        with self._changed:
            if self._waiting_since is None:
                self._waiting_since = time.monotonic()
            self._changed.wait_for(lambda: self._prepared or self._ended, seconds)
            if self._prepared is None:
                if self._ended is not None:
                    raise self._ended
                return None
            prepared, self._prepared, self._waiting_since = self._prepared, None, None
            if self._ahead and version + 1 < self._last_version:
                self._go_on(version + 1)
            return prepared

    def waited(self) -> float:
        """How long the trainer has been waiting, not how long the thread has: that may be as long
        as a step takes.
        """
        with self._changed:
            if self._waiting_since is None:
                return 0.0
            return time.monotonic() - self._waiting_since

    def close(self, interrupt: Callable[[], None], seconds: float) -> bool:
        """End the thread. Whether it has ended within so many seconds.

        Args:
            interrupt: breaks off what it may be waiting for.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        interrupt()
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _go_on(self, version: int) -> None:
        """`_changed` is held."""
        self._wanted = version
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (version := self._next_wanted()) is not None:
                prepared = self._prepare(version)
                with self._changed:
                    self._prepared, self._wanted = prepared, None
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits in `take`
            with self._changed:
                self._ended = error
                self._changed.notify_all()

    def _next_wanted(self) -> int | None:
        """Wait until a batch is asked for; None when it is over.

        Ends with `close`, without which the process does not end.
        """
        with self._changed:
            while not self._closed and self._wanted is None:
                self._changed.wait(_LOOK_SECONDS)
            if self._closed:
                return None
            return self._wanted


class DeviceCopies:
    """Bins on their way to a device, on a stream of their own if it is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, prepared: Prepared, minibatches: Minibatches) -> Prepared:
        """With bins whose copy has begun, or the error that there is no room for them."""
        try:
            if self._stream is None:
                return replace(prepared, minibatches=self.handed_over(minibatches))
            with torch.cuda.stream(self._stream):
                there = self.handed_over(minibatches)
                for one in (one for bins in there for one in bins):
                    # made here: in the step, each would wait until the device has done all it was
                    # given
                    one.device_tensors()
                return replace(prepared, minibatches=there, copied=self._stream.record_event())
        except torch.OutOfMemoryError as error:
            told = str(error).splitlines()[0]
            return replace(
                prepared,
                error=OutOfMemoryError(f"no room on {self._device} for a batch's tokens: {told}"),
            )

    def handed_over(self, minibatches: Minibatches) -> Minibatches:
        """The same on the device."""
        return [[one.handed_to(self._device) for one in bins] for bins in minibatches]

    def end(self, prepared: Prepared) -> Minibatches:
        """The bins, for the stream that trains."""
        if prepared.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(prepared.copied)
            for tensor in (
                tensor
                for bins in prepared.minibatches
                for one in bins
                for tensor in one.device_tensors()
            ):
                tensor.record_stream(
                    stream
                )  # its memory was taken by the copying stream, and is used by this one
        return prepared.minibatches
