"""How the members of a lane meet: each says at the sender's store that it is there, hears that all
are, and connects.

A receiver that can reads the sender's memory (shared_lane.py); the others get what is sent over the
network.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from vllm_patching.protocol.messages import Route
from vllm_patching.transport.addresses import RendezvousError, gloo_group
from vllm_patching.transport.lane import (
    FAR,
    GO,
    NEAR,
    SENDER,
    GlooLane,
    Lane,
    LanePlace,
    NcclLane,
    close_lanes,
    nobody_lost,
)
from vllm_patching.transport.rendezvous import connect_store, first_line, quiet_nccl_watchdog
from vllm_patching.transport.shared_lane import NearReceiver, NearSender, OfferedMemory, SendMemory

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
_ASK_SECONDS = 0.25


def form_lane(
    place: LanePlace,
    device: torch.device,
    timeout: float,
    seconds: float,
    memory: SendMemory | None = None,
) -> Lane:
    """Form a lane; blocks, also inside torch: call it through `in_time`.

    A receiver says that it is here, and waits for the sender's word. The sender gives it before
    (see Cohort).

    Args:
        timeout: seconds for each later step.
        seconds: for forming.
        memory: that the sender sends from, and has offered.

    Raises:
        RendezvousError: the store cannot be reached, the sender says why not, or members did not
            come.
    """
    who = f"the sender of {place.name}" if place.member == SENDER else place.name
    store = connect_store(place.meeting, who, seconds)
    offered = _come(place, store, device, seconds) if place.member != SENDER else None
    near = [int(member) for member in store.get(place.word).decode().split()[1:]]
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
            logger.info(
                "[Bridge] ✓ The weights are read where they are by %d of %d receivers (%s; with GPUs: "
                "[Bridge] ✓ NCCL group created)",
                len(near), place.size - 1, place.name,
            )  # fmt: skip
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


def _come(
    place: LanePlace, store: dist.Store, device: torch.device, seconds: float
) -> OfferedMemory | None:
    """Say that a receiver is here, and wait for the sender's word.

    Returns the sender's memory, if it is to be had here.
    """
    offered = None
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
        store.wait([place.word], timedelta(seconds=seconds))
    except (RuntimeError, dist.DistError) as error:
        raise RendezvousError(
            f"{place.name} waited {seconds:g} s at {place.meeting.host}:{place.meeting.port} for the trainer to say that all "
            f"{place.size - 1} receiver(s) have come ({first_line(error)})"
        ) from error
    word = store.get(place.word).decode()
    if word.split()[:1] != [GO]:
        raise RendezvousError(f"{place.name} is not formed: {word}")
    return offered


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
    options._timeout = timedelta(seconds=2 * timeout + 60)  # ours comes first, and says more
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
    """Form a process's lanes within a deadline; see `form_lane` and `in_time`.

    NCCL's one after the other, in the order of cohorts and lanes that every process keeps: two that
    are formed at the same time on a GPU may each wait for what the other holds there.
    """
    works = [partial(form_lane, place, device, timeout, seconds, memory) for place in places]
    return in_time(
        works,
        seconds + 1,
        lost,
        what,
        one_by_one=any(place.route is Route.NCCL for place in places),
    )


def in_time(
    works: Sequence[Callable[[], Lane]],
    seconds: float,
    lost: Callable[[], str],
    what: str,
    one_by_one: bool = False,
) -> list[Lane]:
    """Form lanes, each in a thread of its own, since torch's own waits have no end that can be
    relied on.

    A thread that is late is left behind; the lane that it may still form is closed at once.

    Args:
        one_by_one: all in one thread, in their order.

    Raises:
        RendezvousError: one failed, `lost` gave a reason, or they were not done in time; none is
            open then.
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

    jobs: list[Callable[[], None]] = (
        [form_all] if one_by_one else [partial(form, index) for index in range(len(works))]
    )
    for number, job in enumerate(jobs):
        threading.Thread(target=job, name=f"bridge rendezvous {number}", daemon=True).start()
    deadline, asked = time.monotonic() + seconds, time.monotonic()
    reason = ""
    with changed:
        while not reason and any(outcome is None for outcome in outcomes):
            changed.wait(_LOOK_SECONDS)
            now = time.monotonic()
            failed = next(
                (outcome for outcome in outcomes if isinstance(outcome, BaseException)), None
            )
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
        close_lanes(lanes)
        raise RendezvousError(f"{what}: {reason}")
    return lanes
