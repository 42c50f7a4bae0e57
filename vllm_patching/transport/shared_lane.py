"""A lane inside one machine: the receivers read the sender's memory, and nothing of the weights
goes through a socket.

In the host's memory it has no name (memfd): another process opens it through /proc, and it ends
with the last process that has it mapped, however that ends. A receiver whose weights are there too
maps it for the time of a transfer alone. On a GPU it is opened through CUDA IPC, by processes that
see that GPU. What goes over Gloo are a few bytes for each bucket: where it lies, and that it was
taken.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_patching.protocol.manifest import ALIGNMENT
from vllm_patching.transport.lane import GlooLane, Lane, LanePlace
from vllm_patching.transport.rendezvous import first_line
from vllm_patching.transport.shared_memory import SharedMemoryError, export_cuda_ipc, open_handles

logger = logging.getLogger(__name__)

_NAME = "lockstep-weights"
_NONCE_BYTES = 32
_HEADER_BYTES = 4096
"""Before the first buffer, which is aligned as pages are."""
_CPU = torch.device("cpu")


class SendMemory:
    """Buffers of a sender that processes of this machine and user can read.

    Attributes:
        buffers: uint8, of the sizes that were asked for.
        offer: what a receiver is told, so that it can open them; empty: it cannot.
    """

    def __init__(
        self, sizes: Sequence[int], device: torch.device = _CPU, fast_for_gpus: bool = False
    ) -> None:
        """Takes the memory now, all of it. Where the system has none to share, the buffers are this
        process's own.

        Args:
            device: where the memory is.
            fast_for_gpus: lock what is in the host's memory, so that this process's GPU copies to
                it at full speed.
        """
        starts = [_HEADER_BYTES]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        self.num_bytes, self.offer = starts[-1], ""
        try:
            self._memory = self._shared() if device.type == "cpu" else self._on_gpu(device)
        except (OSError, SharedMemoryError) as error:
            logger.info(
                "[Bridge] receivers on this machine are sent to, since no memory can be shared with them: %s",
                error,
            )
            self._memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        if fast_for_gpus and device.type == "cpu":
            _lock_pages(self, self._memory)
        self.buffers = [
            self._memory[start : start + size] for start, size in zip(starts, sizes, strict=False)
        ]

    def offset_of(self, buffer: torch.Tensor) -> int:
        """Where a part of one of the buffers begins, as a receiver counts."""
        return buffer.data_ptr() - self._memory.data_ptr()

    def _shared(self) -> torch.Tensor:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        # Reserves the pages now: too little memory is an error here, not a SIGBUS in an update.
        os.posix_fallocate(descriptor, 0, self.num_bytes)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        os.pwrite(descriptor, nonce, 0)
        memory = _mapped(f"/proc/self/fd/{descriptor}", self.num_bytes)
        place = {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "num_bytes": self.num_bytes}
        self.offer = json.dumps({**place, "nonce": nonce.hex(), "network": _network()})
        return memory

    def _on_gpu(self, device: torch.device) -> torch.Tensor:
        memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        try:
            self.offer = json.dumps(export_cuda_ipc({_NAME: memory}))
        except RuntimeError as error:
            raise SharedMemoryError(first_line(error)) from error
        return memory


class OfferedMemory:
    """A sender's memory, as a receiver opens it."""

    def __init__(self, offer: str, device: torch.device = _CPU) -> None:
        """
        Args:
            device: where the receiver copies it to.

        Raises:
            OSError: it is not to be had here: the sender is on another machine or another user's,
                or has ended, or it is a GPU's and this process does not see that.
        """
        told = json.loads(offer or "{}")
        # What a GPU copies from stays open for as long as the lane is there: to open it takes
        # longer than to copy.
        self._kept: torch.Tensor | None = None
        if told.get("kind") == "cuda_ipc":
            if device.type != "cuda":
                raise OSError("it is on a GPU")
            try:
                self._kept = open_handles(told)[_NAME]
            except (SharedMemoryError, RuntimeError) as error:
                raise OSError(first_line(error)) from error
            return
        # The number of a process says nothing in another container, whose network is another one as
        # a rule.
        if not told or told["network"] != _network():
            raise OSError("it is on another machine")
        self._path, self._num_bytes, self._nonce = (
            str(told["path"]),
            int(told["num_bytes"]),
            str(told["nonce"]),
        )
        memory = self.map()
        if device.type == "cuda":
            self._kept = memory
            _lock_pages(self, memory)

    def map(self) -> torch.Tensor:
        """All of it. Raises OSError as above."""
        if self._kept is not None:
            return self._kept
        # Whatever else this number belongs to must not even be opened.
        if not os.readlink(self._path).startswith(f"/memfd:{_NAME}"):
            raise OSError(f"{self._path} is another process's")
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            if (
                os.pread(descriptor, _NONCE_BYTES, 0).hex() != self._nonce
                or os.fstat(descriptor).st_size < self._num_bytes
            ):
                raise OSError(f"{self._path} is another sender's")
            return _mapped(f"/proc/self/fd/{descriptor}", self._num_bytes)
        finally:
            os.close(descriptor)


class NearSender(Lane):
    """The sender's end, to receivers on its machine, and over another lane to those elsewhere."""

    def __init__(
        self, place: LanePlace, near: GlooLane, memory: SendMemory, far: Lane | None, timeout: float
    ) -> None:
        """
        Args:
            near: to the receivers that read `memory`.
            far: to the others, if there are any.
        """
        super().__init__(place, None, timeout)
        self._near, self._memory, self._far = near, memory, far

    def begin(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> Any:
        """See Lane.begin; `buffer` is of the memory."""
        where, taken = (
            torch.tensor([self._memory.offset_of(buffer)]),
            torch.zeros(1, dtype=torch.int64),
        )
        steps: list[tuple[Lane, Any, Any]] = [
            (self._near, self._near.begin((), where), where),
            (self._near, self._near.collect(taken), taken),
        ]
        if self._far is not None:
            steps.append((self._far, self._far.begin(pieces, buffer), buffer))
        return steps

    def wait(self, step: Any, deadline: float, lost: Callable[[], str]) -> None:
        for lane, work, _ in step:
            lane.wait(work, deadline, lost)

    def close(self) -> None:
        self._near.close()
        if self._far is not None:
            self._far.close()


class NearReceiver(Lane):
    """A receiver's end, on the sender's machine."""

    needs_memory = False

    def __init__(
        self, place: LanePlace, near: GlooLane, offered: OfferedMemory, timeout: float
    ) -> None:
        super().__init__(place, None, timeout)
        self._near, self._offered = near, offered
        self._mapped: torch.Tensor | None = None

    def begin(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> Any:
        """Nothing yet: the sender's word for a bucket comes behind ours for the one before."""
        return torch.zeros(1, dtype=torch.int64)

    def wait(self, step: Any, deadline: float, lost: Callable[[], str]) -> None:
        self._near.wait(self._near.begin((), step), deadline, lost)

    def arrived(self, step: Any, buffer: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """See Lane.arrived: where the sender has it."""
        try:
            memory = self._mapped = self._offered.map() if self._mapped is None else self._mapped
        except OSError as error:
            raise self._broken(
                f"the sender's memory cannot be opened any more ({error})"
            ) from error
        start = int(step)
        if start < _HEADER_BYTES or start + num_bytes > memory.numel():
            raise self._broken(
                f"{num_bytes} bytes at {start} are not in the sender's memory of {memory.numel()}"
            )
        return memory[start : start + num_bytes]

    def taken(self) -> None:
        """See Lane.taken."""
        self._near.collect(torch.zeros(1, dtype=torch.int64))

    def rest(self) -> None:
        """See Lane.rest."""
        self._mapped = None

    def close(self) -> None:
        self._near.close()
        self._mapped = None


def _lock_pages(owner: object, memory: torch.Tensor) -> None:
    """Have a GPU copy from and to a part of the host's memory at full speed, until its owner is
    gone.
    """
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code:
        logger.info(
            "[Bridge] copies take longer: memory cannot be locked for the GPU (CUDA error %d)", code
        )
        return
    weakref.finalize(owner, runtime.cudaHostUnregister, memory.data_ptr())


def _mapped(path: str, num_bytes: int) -> torch.Tensor:
    try:
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error


def _network() -> str:
    """The network that this thread's sockets are in. Raises OSError where that cannot be told."""
    return os.readlink("/proc/thread-self/ns/net")
