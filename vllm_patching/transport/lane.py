"""One communicator of a cohort: a sender, which is member 0, and receivers, members 1 to n. Each of
them has all that it gets.

torch.distributed keeps one default group per process, and vLLM owns it: lanes are built directly,
on a store that the trainer hosts, each under a prefix that no other lane ever has. Nothing here
waits without a deadline, and nothing that is in flight is waited for when it is broken off: NCCL is
aborted, and what Gloo still does ends in memory that nobody else uses.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vllm_patching.protocol.messages import Route
from vllm_patching.transport.rendezvous import Meeting, first_line

logger = logging.getLogger(__name__)

SENDER = 0
"""The sender's number among a lane's members."""
GO = "go"
"""What the sender writes once every receiver has come, and behind it the numbers of those that are
NEAR; anything else is a reason why nothing is formed."""
NEAR, FAR = "near", "far"
"""What a receiver says as it comes: whether it can read the sender's memory."""

_LOOK_SECONDS = 0.05
_ASK_SECONDS = 0.25
_POLL_SECONDS = 0.0001
_SLACK_SECONDS = 5.0
_ABORT_SECONDS = 10.0


class LaneBroken(RuntimeError):
    """What was under way did not arrive.

    The lane is of no use any more; the message says which lane, whose, and why.
    """


def close_lanes(lanes: Collection[Lane]) -> None:
    """Close lanes of one process, and wait until they are off the GPU, at most 10 seconds.

    All of them are aborted at the same time. An abort frees memory, which waits for all kernels of
    the GPU, and the kernel of another lane may wait for a stopped member until its own abort.
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
    """For waits that nothing but their deadline ends."""
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
        """The key that a receiver sets when it has come."""
        return f"{self.key}/here/{member}"

    @property
    def offer(self) -> str:
        """The key under which the sender says what memory it sends from (see SendMemory.offer)."""
        return f"{self.key}/offer"

    @property
    def word(self) -> str:
        """The key under which the sender says GO and who reads its memory, or why not."""
        return f"{self.key}/word"


class Lane(ABC):
    """Made by `form_lane`."""

    needs_memory = True
    """Whether `begin` wants memory of the receiver's to receive into."""

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
            buffer: others: the whole bucket, uint8; nobody else may use it before `wait` has
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
        """Where a bucket is that was waited for, in [num_bytes] uint8. Receivers only.

        Args:
            buffer: what `begin` was given.

        Raises:
            LaneBroken: it cannot be read.
        """
        return buffer[:num_bytes]

    def taken(self) -> None:
        """The bucket that was waited for last has been copied: the sender may write to where it is.

        Receivers only.
        """
        return

    def rest(self) -> None:
        """A transfer is over: give back what nothing but transfers need."""
        return

    def on_stream(self) -> AbstractContextManager[Any]:
        """What is enqueued inside goes behind what the lane does."""
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
        return self._start(
            "broadcast", dist.BroadcastOptions(), buffer.cpu() if buffer.is_cuda else buffer
        )

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
        )  # ours comes first, and says more
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
            # It says which address has closed its connection, or that time is up; not whose it was.
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
