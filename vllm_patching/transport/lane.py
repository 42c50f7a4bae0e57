"""One communicator of a cohort: a sender, which is member 0, and receivers, members 1 to n. Each of them has all that it gets.

torch.distributed keeps one default group per process, and vLLM owns it: lanes are built directly, on a store that the trainer
hosts, each under a prefix that no other lane ever has. Nothing here waits without a deadline, and nothing that is in flight is
waited for when it is broken off: NCCL is aborted, and what Gloo still does ends in memory that nobody else uses.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vllm_patching.transport.addresses import RendezvousError, gloo_group
from vllm_patching.transport.rendezvous import connect_store, first_line, quiet_nccl_watchdog

logger = logging.getLogger(__name__)

T = TypeVar("T")

SENDER = 0
"""The sender's number among a lane's members."""
GO = "go"
"""What the sender writes once every receiver has come; anything else is a reason why nothing is formed."""

_LOOK_SECONDS = 0.05
_ASK_SECONDS = 0.25
_POLL_SECONDS = 0.0001
_SLACK_SECONDS = 5.0


class LaneBroken(RuntimeError):
    """What was under way did not arrive. The lane is of no use any more; the message says which lane, whose, and why."""


def nobody_lost() -> str:
    """For waits that nothing but their deadline ends."""
    return ""


@dataclass(frozen=True)
class LanePlace:
    """One member's place in a lane.

    Attributes:
        host, port: of the trainer's store.
        key: prefix of the lane's keys in it.
        member: 0 sends, the others receive.
        size: members, the sender among them.
        backend: `nccl` or `gloo`.
        name: for messages, such as `lane 1 of vLLM rank 0`.
    """

    host: str
    port: int
    key: str
    member: int
    size: int
    backend: str
    name: str

    def here(self, member: int) -> str:
        """The key that a receiver sets when it has come."""
        return f"{self.key}/here/{member}"

    @property
    def word(self) -> str:
        """The key under which the sender says GO, or why not."""
        return f"{self.key}/word"


class Lane(ABC):
    """Made by `form_lane`."""

    def __init__(self, place: LanePlace, group: Any, timeout: float) -> None:
        self.place = place
        self.stream: torch.cuda.Stream | None = None
        self.control: Any = None  # what its members met by, kept for as long as another one may still be at it
        self._group = group
        self._timeout = timeout

    @abstractmethod
    def begin(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> Any:
        """Begin to broadcast one bucket. Returns what `wait` wants; on a GPU it is enqueued on the lane's stream.

        Args:
            pieces: NCCL: the bucket's, contiguous, wherever they lie.
            buffer: Gloo: the whole bucket, uint8; nobody else may use it before `wait` has returned, or ever if that raises.

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
            LaneBroken: `lost` gave a reason, the deadline has passed, or a member's connection has broken.
        """

    def on_stream(self) -> AbstractContextManager[Any]:
        """What is enqueued inside goes behind what the lane does."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Break off whatever is in flight, and leave. Returns at once; safe to call twice."""

    def _broken(self, why: str) -> LaneBroken:
        return LaneBroken(f"{self.place.name}: {why}")


class GlooLane(Lane):
    """Between CPUs: one message for each bucket."""

    def __init__(self, place: LanePlace, group: Any, timeout: float) -> None:
        super().__init__(place, group, timeout)
        self._works: list[Any] = []

    def begin(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        options.timeout = timedelta(seconds=self._timeout + _SLACK_SECONDS)  # ours comes first, and says more
        try:
            work = self._group.broadcast([buffer], options)
        except RuntimeError as error:
            raise self._broken(first_line(error)) from error
        self._works = [other for other in self._works if not other.is_completed()] + [work]
        return work

    def wait(self, step: Any, deadline: float, lost: Callable[[], str]) -> None:
        asked = time.monotonic()
        while not step.is_completed():
            # It raises when the look is over, and when the step has failed; which of them is asked below, of what has ended.
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
        group, self._group, self.control = self._group, None, None
        works = [work for work in self._works if not work.is_completed()]
        self._works = []
        if works:
            # Dropping the group would wait for them, up to their own deadline, and hold up everything else in this process.
            threading.Thread(
                target=_let_end, args=(group, works, self._timeout + 2 * _SLACK_SECONDS), name="lane ends", daemon=True
            ).start()


def _let_end(group: Any, works: Sequence[Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    del group


class NcclLane(Lane):
    """Between GPUs: the pieces of a bucket in one launch, each from and to where it lies."""

    def __init__(self, place: LanePlace, group: Any, timeout: float, device: torch.device) -> None:
        super().__init__(place, group, timeout)
        self.stream = torch.cuda.Stream(device)

    def begin(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        try:
            with torch.cuda.stream(self.stream):
                self._group._start_coalescing()
                for piece in pieces:
                    self._group.broadcast([piece], options)
                self._group._end_coalescing().wait()  # orders the lane's stream behind it, and returns at once
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
                self.close()
                raise self._broken(reason or f"not done within {self._timeout:g} s")
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        # The orderly shutdown waits for every member to do the same; one that goes on serving never does.
        group, self._group, self.control = self._group, None, None
        if group is not None:
            group.abort()


def form_lane(place: LanePlace, device: torch.device, timeout: float, seconds: float) -> Lane:
    """Form a lane; blocks, also inside torch: call it through `in_time`.

    A receiver says that it is here, and waits for the sender's word. The sender gives it before (see Cohort).

    Args:
        timeout: seconds for each later step.
        seconds: for forming.

    Raises:
        RendezvousError: the store cannot be reached, the sender says why not, or members did not come.
    """
    who = f"the sender of {place.name}" if place.member == SENDER else place.name
    store = connect_store(place.host, place.port, who, seconds)
    if place.member != SENDER:
        store.set(place.here(place.member), "")
        try:
            store.wait([place.word], timedelta(seconds=seconds))
        except (RuntimeError, dist.DistError) as error:
            raise RendezvousError(
                f"{place.name} waited {seconds:g} s at {place.host}:{place.port} for the trainer to say that all "
                f"{place.size - 1} receiver(s) have come ({first_line(error)})"
            ) from error
        word = store.get(place.word).decode()
        if word != GO:
            raise RendezvousError(f"{place.name} is not formed: {word}")
    under = dist.PrefixStore(place.key, store)
    under.set_timeout(timedelta(seconds=seconds))
    try:
        logger.info("[Bridge] Creating Gloo process group... (%s, %d members)", place.name, place.size)
        control = gloo_group(dist.PrefixStore("control", under), place.member, place.size, place.host, seconds)
        logger.info("[Bridge] ✓ Gloo group created (%s, %d members)", place.name, place.size)
        lane: Lane
        if place.backend == "nccl":
            lane = _nccl_lane(place, dist.PrefixStore("data", under), device, timeout, seconds)
            logger.info("[Bridge] ✓ NCCL group created (%s, %d members)", place.name, place.size)
        else:
            lane = GlooLane(place, control, timeout)
            logger.info("[Bridge] ✓ The weights go over it too (with GPUs: [Bridge] ✓ NCCL group created)")
        control.barrier().wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise RendezvousError(
            f"{place.name} was not formed by its {place.size} members within {seconds:g} s "
            f"({place.host}:{place.port}): {first_line(error)}"
        ) from error
    logger.info("[Bridge] ✓ All ranks synchronized and ready (%s)", place.name)
    lane.control = control
    return lane


def _nccl_lane(place: LanePlace, store: dist.Store, device: torch.device, timeout: float, seconds: float) -> Lane:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout + 60)  # ours comes first, and says more
    torch.cuda.set_device(device)
    with quiet_nccl_watchdog():
        group = dist.ProcessGroupNCCL(store, place.member, place.size, options)
    lane = NcclLane(place, group, timeout, device)
    # The connection is made and the kernels are loaded now, and not in the first update, beside a running model.
    first = [torch.zeros(8, device=device) for _ in range(2)]
    assert lane.stream is not None
    lane.stream.wait_stream(torch.cuda.current_stream(device))
    lane.wait(lane.begin(first, first[0]), time.monotonic() + seconds, nobody_lost)
    return lane


def form_lanes(
    places: Sequence[LanePlace], device: torch.device, timeout: float, seconds: float, lost: Callable[[], str], what: str
) -> list[Lane]:
    """Form a process's lanes within a deadline; see `form_lane` and `in_time`.

    NCCL's one after the other, in the order of cohorts and lanes that every process keeps: two that are formed at the same time
    on a GPU may each wait for what the other holds there.
    """
    works = [partial(form_lane, place, device, timeout, seconds) for place in places]
    return in_time(works, seconds + 1, lost, what, one_by_one=any(place.backend == "nccl" for place in places))


def in_time(
    works: Sequence[Callable[[], Lane]], seconds: float, lost: Callable[[], str], what: str, one_by_one: bool = False
) -> list[Lane]:
    """Form lanes, each in a thread of its own, since torch's own waits have no end that can be relied on.

    A thread that is late is left behind; the lane that it may still form is closed at once.

    Args:
        one_by_one: all in one thread, in their order.

    Raises:
        RendezvousError: one failed, `lost` gave a reason, or they were not done in time; none is open then.
    """
    outcomes: list[Lane | BaseException | None] = [None] * len(works)
    changed = threading.Condition()
    given_up = False

    def form(index: int) -> None:
        outcome: Lane | BaseException
        try:
            outcome = works[index]()
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits
            outcome = error
        with changed:
            outcomes[index] = outcome
            late = given_up
            changed.notify_all()
        if late and isinstance(outcome, Lane):
            logger.warning("[Bridge] %s was formed too late, and is closed", outcome.place.name)
            outcome.close()

    def form_all() -> None:
        for index in range(len(works)):
            form(index)
            if given_up or not isinstance(outcomes[index], Lane):
                return

    jobs: list[Callable[[], None]] = [form_all] if one_by_one else [partial(form, index) for index in range(len(works))]
    for number, job in enumerate(jobs):
        threading.Thread(target=job, name=f"bridge rendezvous {number}", daemon=True).start()
    deadline, asked = time.monotonic() + seconds, time.monotonic()
    reason = ""
    with changed:
        while not reason and any(outcome is None for outcome in outcomes):
            changed.wait(_LOOK_SECONDS)
            now = time.monotonic()
            failed = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
            if failed is not None:
                reason = str(failed)
            elif now > deadline:
                reason = f"not done within {seconds:g} s"
            elif now > asked + _ASK_SECONDS:
                reason, asked = lost(), now
        failed = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
        reason = reason or (str(failed) if failed is not None else "")
        given_up = bool(reason)
        lanes = [outcome for outcome in outcomes if isinstance(outcome, Lane)]
    if reason:
        for lane in lanes:
            lane.close()
        raise RendezvousError(f"{what}: {reason}")
    return lanes
