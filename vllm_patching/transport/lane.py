"""One communicator of a cohort: a sender (member 0), and receivers (members 1 to n) that each get all
it sends.

- torch.distributed keeps one default group per process, and vLLM owns it. So lanes are built
  directly, on a store that the trainer hosts, each under a prefix of its own.
- Each wait has a deadline, and a lane that is broken off waits for nothing in flight. NCCL is
  aborted, and Gloo's rest ends in memory that nothing else uses.
- A receiver on the sender's machine reads the sender's memory. In the host's memory that has no
  name (memfd). Another process opens it through /proc, and it ends with the last process that has
  it mapped. On a GPU it is opened through CUDA IPC. Gloo then carries a few bytes for each bucket:
  its place, and that it was taken.
- To form lanes, a receiver announces itself in all of them at the sender's store. The senders give
  their word once every receiver has come to every lane. Then the lanes are formed one after the
  other, in the same order in every process.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vllm_patching.protocol.manifest import ALIGNMENT
from vllm_patching.protocol.messages import Route
from vllm_patching.transport.addresses import RendezvousError, gloo_group
from vllm_patching.transport.rendezvous import (
    KeyedStore,
    Meeting,
    connect_store,
    first_line,
    quiet_nccl_watchdog,
)
from vllm_patching.transport.shared_memory import SharedMemoryError, export_cuda_ipc, open_handles

logger = logging.getLogger(__name__)

SENDER = 0
"""The sender's number among a lane's members."""
GO = "go"
"""The sender's word once every receiver has come, followed by the numbers of the NEAR ones. Any
other word is the reason why no lane is formed."""
NEAR, FAR = "near", "far"
"""A receiver's announcement: it can read the sender's memory, or cannot."""

_LOOK_SECONDS = 0.05
_ASK_SECONDS = 0.25
_POLL_SECONDS = 0.0001
_SLACK_SECONDS = 5.0
_ABORT_SECONDS = 10.0


class LaneBroken(RuntimeError):
    """A bucket did not arrive, and the lane is broken. The message names the lane, its owner and
    the reason.
    """


def close_lanes(lanes: Collection[Lane]) -> None:
    """Close lanes of one process, and wait until they are off the GPU, at most 10 seconds.

    All of them are aborted at the same time. An abort frees memory, which waits for all kernels of
    the GPU. The kernel of another lane may wait for a stopped member until its own abort.
    """
    for lane in lanes:
        lane.close()
    deadline = time.monotonic() + _ABORT_SECONDS
    for lane in lanes:
        if not lane.join(deadline):
            logger.warning(
                "[Bridge] %s: NCCL has not ended what was in flight within %g s; its abort goes on",
                lane.place.name,
                _ABORT_SECONDS,
            )


def nobody_lost() -> str:
    """Give no reason: for waits that only their deadline ends."""
    return ""


@dataclass(frozen=True)
class LanePlace:
    """One member's place in a lane.

    Attributes:
        meeting: the trainer's store.
        key: prefix of the lane's keys in it.
        member: 0 sends, the others receive.
        size: members, the sender among them.
        route: how the weights travel.
        name: for messages, such as `lane 1 of vLLM rank 0`.
    """

    meeting: Meeting
    key: str
    member: int
    size: int
    route: Route
    name: str

    def here(self, member: int) -> str:
        """Return the key that a receiver sets when it has come."""
        return f"{self.key}/here/{member}"

    @property
    def offer(self) -> str:
        """Return the key of the sender's memory (see SendMemory.offer)."""
        return f"{self.key}/offer"

    @property
    def word(self) -> str:
        """Return the key of the sender's word: GO and the receivers that read its memory, or a
        reason.
        """
        return f"{self.key}/word"


def lane_places(
    meeting: Meeting,
    key: str,
    tp_rank: int,
    lanes: Sequence[int],
    member: int,
    members: int,
    route: Route,
) -> list[LanePlace]:
    """Return the places of one process in lanes of a cohort, as both sides name them.

    Args:
        member: 0 for the sender, 1 to `members` for the receivers.
    """
    who = ""
    if member:
        who = f" (receiver {member - 1} of {members})"
    return [
        LanePlace(
            meeting, f"lockstep/{key}/rank{tp_rank}/lane{lane}", member, members + 1, route,
            f"lane {lane} of vLLM rank {tp_rank}{who}",
        )
        for lane in lanes
    ]  # fmt: skip


class Lane(ABC):
    """Made by `form_lanes`."""

    needs_memory = True
    """True if `begin` wants memory of the receiver's to receive into."""

    def __init__(self, place: LanePlace, group: Any, timeout: float) -> None:
        self.place = place
        self.stream: torch.cuda.Stream | None = None
        self.control: Any = (
            None  # groups and store that formed it, kept while another member may still use them
        )
        self._group = group
        self._timeout = timeout

    @abstractmethod
    def begin(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> Any:
        """Begin to broadcast one bucket. Returns what `wait` wants; on a GPU it is enqueued on the
        lane's stream.

        Args:
            pieces: NCCL: the bucket's, contiguous, wherever they lie.
            buffer: others: the whole bucket, uint8; the caller must not use it before `wait` has
                returned, or ever if that raises.

        Raises:
            LaneBroken: it cannot.
        """

    @abstractmethod
    def wait(self, step: Any, deadline: float, lost: Callable[[], str]) -> None:
        """Return when a step is done.

        Args:
            deadline: time.monotonic().
            lost: asked now and then: a reason why waiting is in vain, or an empty string.

        Raises:
            LaneBroken: `lost` gave a reason, the deadline has passed, or a member's connection has
                broken.
        """

    def arrived(self, step: Any, buffer: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """Return the place of a bucket that has arrived, as [num_bytes] uint8. Receivers only.

        Args:
            buffer: what `begin` was given.

        Raises:
            LaneBroken: it cannot be read.
        """
        return buffer[:num_bytes]

    def taken(self) -> None:
        """Let the sender overwrite the last bucket, which has been copied.

        Receivers only.
        """
        return

    def rest(self) -> None:
        """Free what only transfers need, at the end of one."""
        return

    def on_stream(self) -> AbstractContextManager[Any]:
        """Enqueue the block's work behind the lane's."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Break off whatever is in flight, and leave. Returns at once; safe to call twice."""

    def join(self, deadline: float) -> bool:
        """Wait until a closed lane is off the GPU, at most until `deadline` (time.monotonic()).

        Returns:
            whether it is.
        """
        return True

    def _broken(self, why: str) -> LaneBroken:
        return LaneBroken(f"{self.place.name}: {why}")


class GlooLane(Lane):
    """One message for each bucket, through the memory of both hosts."""

    def __init__(self, place: LanePlace, group: Any, timeout: float) -> None:
        super().__init__(place, group, timeout)
        self._works: list[Any] = []

    def begin(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> Any:
        # Through the host's memory, so it is copied there here, where the sender's GPU is known to
        # have packed it.
        return self._start("broadcast", dist.BroadcastOptions(), buffer.cpu())

    def collect(self, word: torch.Tensor) -> Any:
        """Begin to add a word of every receiver's to the sender's; `wait` for it, on a receiver
        until its own is on its way.

        Raises:
            LaneBroken: it cannot.
        """
        return self._start("reduce", dist.ReduceOptions(), word)

    def _start(self, operation: str, options: Any, tensor: torch.Tensor) -> Any:
        options.rootRank = SENDER
        options.timeout = timedelta(
            seconds=self._timeout + _SLACK_SECONDS
        )  # ours ends first, with a better message
        try:
            if self._group is None:
                raise RuntimeError("it was closed")
            work = getattr(self._group, operation)([tensor], options)
        except RuntimeError as error:
            raise self._broken(first_line(error)) from error
        self._works = [other for other in self._works if not other.is_completed()] + [work]
        return work

    def wait(self, step: Any, deadline: float, lost: Callable[[], str]) -> None:
        asked = time.monotonic()
        while not step.is_completed():
            # It raises when the look is over, and when the step has failed; which of them is asked
            # below, of what has ended.
            with suppress(RuntimeError):
                step.wait(timedelta(seconds=_LOOK_SECONDS))
            now = time.monotonic()
            reason = ""
            if now > asked + _ASK_SECONDS:
                reason, asked = lost(), now
            if (reason or now > deadline) and not step.is_completed():
                raise self._broken(reason or f"not done within {self._timeout:g} s")
        try:
            step.wait()
        except RuntimeError as error:
            # The error names the address that closed its connection, or the timeout, but not the
            # owner.
            raise self._broken(f"{lost() or 'a member has gone'} ({first_line(error)})") from error

    def close(self) -> None:
        group, control, self._group, self.control = self._group, self.control, None, None
        works = [work for work in self._works if not work.is_completed()]
        self._works = []
        if works:
            # Dropping the group would wait for them, up to their own deadline, and hold up
            # everything else in this process.
            ended = ((group, control), works, self._timeout + 2 * _SLACK_SECONDS)
            threading.Thread(target=_let_end, args=ended, name="lane ends", daemon=True).start()


def _let_end(kept: Any, works: Sequence[Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    del kept


class NcclLane(Lane):
    """Between GPUs: the pieces of a bucket in one launch, each from and to where it lies."""

    def __init__(self, place: LanePlace, group: Any, timeout: float, device: torch.device) -> None:
        super().__init__(place, group, timeout)
        self.stream = torch.cuda.Stream(device)
        self._abort: threading.Thread | None = None

    def begin(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        try:
            with torch.cuda.stream(self.stream):
                self._group._start_coalescing()
                for piece in pieces:
                    self._group.broadcast([piece], options)
                # orders the lane's stream behind it, and returns at once
                self._group._end_coalescing().wait()
                done = torch.cuda.Event()
                done.record()
        except RuntimeError as error:
            raise self._broken(first_line(error)) from error
        return done

    def wait(self, step: Any, deadline: float, lost: Callable[[], str]) -> None:
        # NCCL itself would wait for a dead member for ever: poll.
        asked = time.monotonic()
        while not step.query():
            now = time.monotonic()
            reason = ""
            if now > asked + _ASK_SECONDS:
                reason, asked = lost(), now
            if reason or now > deadline:
                raise self._broken(reason or f"not done within {self._timeout:g} s")
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        # The orderly shutdown waits for every member to do the same; one that goes on serving never
        # does. The group uses the store that it was formed by until it has ended.
        group, control, self._group, self.control = self._group, self.control, None, None
        if group is not None:
            self._abort = threading.Thread(
                target=_abort, args=(self.place.name, group, control), name="lane abort"
            )
            self._abort.start()

    def join(self, deadline: float) -> bool:
        if self._abort is not None:
            self._abort.join(max(0.0, deadline - time.monotonic()))
        return self._abort is None or not self._abort.is_alive()


def _abort(lane: str, group: Any, control: Any) -> None:
    """Abort a communicator. `control`, the store that it was formed by, lasts as long."""
    try:
        group.abort()
    except Exception as error:  # noqa: BLE001 - a thread must not end without a word
        logger.error(
            "[Bridge] %s: NCCL could not abort its communicator, whose GPU memory stays taken "
            "until this process ends: %s",
            lane,
            first_line(error),
        )
    del control


_NAME = "lockstep-weights"
_NONCE_BYTES = 32
_HEADER_BYTES = 4096
"""Before the first buffer, which is aligned as pages are."""
_CPU = torch.device("cpu")


class SendMemory:
    """Buffers of a sender that processes of this machine and user can read.

    Attributes:
        buffers: uint8, of the sizes that were asked for.
        offer: sent to receivers so that they can open the buffers; empty: they cannot.
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
        """Return where a part of a buffer begins, as a receiver counts."""
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
            OSError: it is not to be had here. The sender is on another machine or another user's,
                or has ended. Or it is a GPU's and this process does not see that.
        """
        told = json.loads(offer or "{}")
        # Memory that a GPU copies from stays open for as long as the lane is there: to open it
        # takes longer than to copy.
        self._kept: torch.Tensor | None = None
        if told.get("kind") == "cuda_ipc":
            if device.type != "cuda":
                raise OSError("it is on a GPU")
            try:
                self._kept = open_handles(told)[_NAME]
            except (SharedMemoryError, RuntimeError) as error:
                raise OSError(first_line(error)) from error
            return
        # The number of a process has no meaning in another container, which normally has another
        # network.
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
        # A file of another kind that this number belongs to must not even be opened.
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
        """Begin nothing: the sender's word for a bucket comes after ours for the previous one."""
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
    """Lock a part of the host's memory so that a GPU copies at full speed, until its owner ends."""
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
    """Return the network of this thread's sockets. Raises OSError where it is not known."""
    return os.readlink("/proc/thread-self/ns/net")


@dataclass(frozen=True)
class _Arrival:
    """A member that has come to a lane's store.

    Attributes:
        store: a connection of its own.
        offered: the sender's memory, for a receiver that can read it.
    """

    place: LanePlace
    store: KeyedStore
    offered: OfferedMemory | None


def _form_lane(
    arrival: _Arrival,
    device: torch.device,
    timeout: float,
    seconds: float,
    memory: SendMemory | None,
) -> Lane:
    """Form a lane; blocks, also inside torch. See form_lanes."""
    place, store, offered = arrival.place, arrival.store, arrival.offered
    near = _await_word(place, store, seconds)
    far = [member for member in range(1, place.size) if member not in near]
    under = dist.PrefixStore(place.key, store)
    under.set_timeout(timedelta(seconds=seconds))
    lane: Lane | None = None
    controls = []
    try:
        if place.member not in near and (far or not near):
            control, lane = _sent_lane(place, far, under, device, timeout, seconds)
            controls.append(control)
        if near and place.member in (SENDER, *near):
            control = _gloo(place, "near", near, under, seconds)
            controls.append(control)
            words = GlooLane(place, control, timeout)
            _log_near(place, near)
            if offered is not None:
                lane = NearReceiver(place, words, offered, timeout)
            else:
                assert memory is not None, "receivers are near where memory was offered"
                lane = NearSender(place, words, memory, lane, timeout)
        for control in controls:
            control.barrier().wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise RendezvousError(
            f"{place.name} was not formed by its {place.size} members within {seconds:g} s "
            f"({place.meeting.host}:{place.meeting.port}): {first_line(error)}"
        ) from error
    logger.info("[Bridge] ✓ All ranks synchronized and ready (%s)", place.name)
    assert lane is not None
    lane.control = [*controls, under, store]
    return lane


def _log_near(place: LanePlace, near: Sequence[int]) -> None:
    logger.info(
        "[Bridge] ✓ The weights are read where they are by %d of %d receivers (%s; with GPUs: "
        "[Bridge] ✓ NCCL group created)",
        len(near), place.size - 1, place.name,
    )  # fmt: skip


def _come(place: LanePlace, device: torch.device, seconds: float) -> _Arrival:
    """Connect to the sender's store; a receiver announces itself there.

    Raises:
        RendezvousError: the store cannot be reached, or the sender does not come to it.
    """
    if place.member == SENDER:
        store = connect_store(place.meeting, f"the sender of {place.name}", seconds)
        return _Arrival(place, store, None)
    store, offered = connect_store(place.meeting, place.name, seconds), None
    try:
        store.wait([place.offer], timedelta(seconds=seconds))
        offer = store.get(place.offer).decode()
        try:
            offered = OfferedMemory(offer, device) if offer else None
        except OSError as error:
            logger.info(
                "[Bridge] %s gets what is sent: the sender's memory cannot be read here (%s)",
                place.name,
                error,
            )
        store.set(place.here(place.member), FAR if offered is None else NEAR)
    except (RuntimeError, dist.DistError) as error:
        raise _unanswered(place, seconds, "the trainer", error) from error
    return _Arrival(place, store, offered)


def _await_word(place: LanePlace, store: KeyedStore, seconds: float) -> list[int]:
    """Return the receivers that read the sender's memory, by number.

    The sender has given its word before; see Cohort.

    Raises:
        RendezvousError: the word does not come, or is not GO.
    """
    try:
        store.wait([place.word], timedelta(seconds=seconds))
        word = store.get(place.word).decode()
    except (RuntimeError, dist.DistError) as error:
        awaited = f"the trainer's word that all {place.size - 1} receiver(s) have come"
        raise _unanswered(place, seconds, awaited, error) from error
    if word.split()[:1] != [GO]:
        raise RendezvousError(f"{place.name} is not formed: {word}")
    return [int(member) for member in word.split()[1:]]


def _unanswered(
    place: LanePlace, seconds: float, awaited: str, error: Exception
) -> RendezvousError:
    return RendezvousError(
        f"{place.name} waited {seconds:g} s at {place.meeting.host}:{place.meeting.port} for "
        f"{awaited} ({first_line(error)})"
    )


def _gloo(
    place: LanePlace, name: str, receivers: Sequence[int], under: dist.Store, seconds: float
) -> Any:
    """A group of the sender and some receivers."""
    rank, size = [SENDER, *receivers].index(place.member), len(receivers) + 1
    logger.info("[Bridge] Creating Gloo process group... (%s, %d members)", place.name, size)
    group = gloo_group(dist.PrefixStore(name, under), rank, size, place.meeting.host, seconds)
    logger.info("[Bridge] ✓ Gloo group created (%s, %d members)", place.name, size)
    return group


def _sent_lane(
    place: LanePlace,
    receivers: Sequence[int],
    under: dist.Store,
    device: torch.device,
    timeout: float,
    seconds: float,
) -> tuple[Any, Lane]:
    """A lane over the network, and the group by which its members met."""
    control = _gloo(place, "control", receivers, under, seconds)
    if place.route is not Route.NCCL:
        logger.info(
            "[Bridge] ✓ The weights go over it too (with GPUs: [Bridge] ✓ NCCL group created)"
        )
        return control, GlooLane(place, control, timeout)
    lane = _nccl_lane(place, dist.PrefixStore("data", under), device, timeout, seconds)
    logger.info("[Bridge] ✓ NCCL group created (%s, %d members)", place.name, place.size)
    return control, lane


def _nccl_lane(
    place: LanePlace, store: dist.Store, device: torch.device, timeout: float, seconds: float
) -> Lane:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout + 60)  # ours ends first, with a better message
    torch.cuda.set_device(device)
    with quiet_nccl_watchdog():
        group = dist.ProcessGroupNCCL(store, place.member, place.size, options)
    lane = NcclLane(place, group, timeout, device)
    # The connection is made and the kernels are loaded now, and not in the first update, beside a
    # running model.
    first = [torch.zeros(8, device=device) for _ in range(2)]
    assert lane.stream is not None
    lane.stream.wait_stream(torch.cuda.current_stream(device))
    lane.wait(lane.begin(first, first[0]), time.monotonic() + seconds, nobody_lost)
    return lane


def form_lanes(
    places: Sequence[LanePlace],
    device: torch.device,
    timeout: float,
    seconds: float,
    lost: Callable[[], str],
    what: str,
    memory: SendMemory | None = None,
) -> list[Lane]:
    """Form a process's lanes within a deadline; see `in_time`.

    A receiver comes to all of them first: no sender gives its word before every receiver has come
    to every lane. Then they are formed one after the other, in the order of cohorts and lanes that
    every process keeps. Two lanes of NCCL that are formed at the same time on a GPU may each wait
    for the other's resources.

    Args:
        timeout: seconds for each later step.
        seconds: for forming.
        memory: that the sender sends from, and has offered.

    Raises:
        RendezvousError: the store cannot be reached, the sender refuses, or members did not come.
            None of the lanes is open then.
    """

    def form() -> Iterator[Lane]:
        arrivals = [_come(place, device, seconds) for place in places]
        for arrival in arrivals:
            yield _form_lane(arrival, device, timeout, seconds, memory)

    return in_time(form, seconds + 1, lost, what)


def in_time(
    form: Callable[[], Iterator[Lane]], seconds: float, lost: Callable[[], str], what: str
) -> list[Lane]:
    """Form lanes in a thread, since torch's own waits have no end that can be relied on.

    A thread that is late is left behind; the lane that it may still form is closed at once.

    Raises:
        RendezvousError: one failed, `lost` gave a reason, or they were not done in time; none is
            open then.
    """
    forming = _Forming(form)
    threading.Thread(target=forming.run, name="bridge rendezvous", daemon=True).start()
    reason = forming.wait(seconds, lost)
    if reason:
        close_lanes(forming.lanes)
        raise RendezvousError(f"{what}: {reason}")
    return forming.lanes


class _Forming:
    """Lanes that a thread forms.

    Attributes:
        lanes: those formed so far.
    """

    def __init__(self, form: Callable[[], Iterator[Lane]]) -> None:
        self.lanes: list[Lane] = []
        self._form = form
        self._changed = threading.Condition()
        self._ended = self._given_up = False
        self._error = ""

    def run(self) -> None:
        """Form the lanes, up to the first error or until they are given up."""
        error = ""
        try:
            for lane in self._form():
                if not self._keep(lane):
                    break
        except Exception as failure:  # noqa: BLE001 - handed to the thread that waits
            error = str(failure) or type(failure).__name__
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def _keep(self, lane: Lane) -> bool:
        """Return whether the next lane is to be formed."""
        with self._changed:
            if not self._given_up:
                self.lanes.append(lane)
                return True
        logger.warning("[Bridge] %s was formed too late, and is closed", lane.place.name)
        lane.close()
        return False

    def wait(self, seconds: float, lost: Callable[[], str]) -> str:
        """Wait for all lanes. Return why they are given up; empty if all are formed."""
        deadline, asked, reason = time.monotonic() + seconds, time.monotonic(), ""
        with self._changed:
            while not reason and not self._ended:
                self._changed.wait(_LOOK_SECONDS)
                now, reason = time.monotonic(), self._error
                if not reason and now > deadline:
                    reason = f"not done within {seconds:g} s"
                elif not reason and now > asked + _ASK_SECONDS:
                    reason, asked = lost(), now
            reason = reason or self._error
            self._given_up = bool(reason)
        return reason
