"""Lanes are formed in order, within a deadline, and none stays open when one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from vllm_patching.protocol.messages import Route
from vllm_patching.transport.addresses import RendezvousError
from vllm_patching.transport.lane import (
    GO,
    SENDER,
    GlooLane,
    Lane,
    LaneBroken,
    LanePlace,
    NcclLane,
    close_lanes,
    form_lanes,
    in_time,
    lane_places,
    nobody_lost,
)
from vllm_patching.transport.rendezvous import Meeting, host_store


class Still(Lane):
    """A lane that records when it is closed."""

    def __init__(self, name: str) -> None:
        super().__init__(
            LanePlace(Meeting("localhost", 1, ""), name, 0, 2, "none", name), None, 1.0
        )
        self.closed = threading.Event()

    def begin(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> Any:
        raise NotImplementedError

    def wait(self, step: Any, deadline: float, lost: Callable[[], str]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed.set()


def test_lanes_keep_their_order_up_to_the_first_that_fails() -> None:
    lanes = [Still("a"), Still("b"), Still("c")]
    begun: list[str] = []

    def form() -> Iterator[Lane]:
        for lane in lanes:
            begun.append(lane.place.name)
            if lane.place.name == "b" and fails:
                raise RendezvousError("b has no members")
            yield lane

    fails = False
    assert in_time(form, 120, nobody_lost, "test") == lanes
    assert begun == ["a", "b", "c"]
    begun.clear()
    fails = True
    with pytest.raises(RendezvousError, match="test: b has no members"):
        in_time(form, 120, nobody_lost, "test")
    assert (begun, lanes[0].closed.is_set()) == (["a", "b"], True)


def test_a_lane_that_is_formed_after_everyone_has_gone_is_closed() -> None:
    late, go = Still("late"), threading.Event()

    def form() -> Iterator[Lane]:
        assert go.wait(120)
        yield late

    with pytest.raises(RendezvousError, match="test: the server has gone"):
        in_time(form, 120, lambda: "the server has gone", "test")
    assert not late.closed.is_set()
    go.set()
    assert late.closed.wait(120)

    def never() -> Iterator[Lane]:
        go.clear()
        go.wait(120)
        return iter(())

    with pytest.raises(RendezvousError, match=r"not done within 0\.1 s"):
        in_time(never, 0.1, nobody_lost, "test")


def test_a_receiver_comes_to_all_lanes_before_it_waits_in_one() -> None:
    """As in Cohort, no sender gives its word before the receiver has come to every lane."""
    seconds, numbers = 120.0, range(3)
    store = host_store(Meeting("localhost", 0, "s3cret"), seconds)
    assert store.kept is not None
    meeting = Meeting("localhost", store.kept.port, "s3cret")
    senders = lane_places(meeting, "key", 0, numbers, SENDER, 1, Route.GLOO)
    for place in senders:
        store.set(place.offer, "")
    own = lane_places(meeting, "key", 0, numbers, 1, 1, Route.GLOO)
    cpu = torch.device("cpu")
    with ThreadPoolExecutor() as pool:
        receiver = pool.submit(form_lanes, own, cpu, seconds, seconds, nobody_lost, "the receiver")
        store.wait([place.here(1) for place in senders], timedelta(seconds=seconds))
        for place in senders:
            store.set(place.word, GO)
        sent = [
            pool.submit(form_lanes, [place], cpu, seconds, seconds, nobody_lost, "a sender")
            for place in senders
        ]
        formed = [*receiver.result(), *(lane for one in sent for lane in one.result())]
    assert [lane.place for lane in formed] == [*own, *senders]
    close_lanes(formed)


class Step:
    """Something under way in Gloo, which ends in the moment in which a look at it is over."""

    def __init__(self, error: str = "") -> None:
        self.looks, self._error = 0, error

    def is_completed(self) -> bool:
        return self.looks > 0

    def wait(self, timeout: Any = None) -> bool:
        if not self.looks:
            self.looks += 1
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)
        return True


def test_what_arrives_as_a_look_ends_has_arrived() -> None:
    lane = GlooLane(
        LanePlace(Meeting("localhost", 1, ""), "key", 1, 2, Route.GLOO, "lane 0 of vLLM rank 0"),
        None,
        30.0,
    )
    step = Step()
    lane.wait(step, time.monotonic() + 120, nobody_lost)
    assert step.looks == 1
    with pytest.raises(
        LaneBroken, match=r"lane 0 of vLLM rank 0: a member has gone \(Connection closed by peer\)"
    ):
        lane.wait(Step("Connection closed by peer"), time.monotonic() + 120, nobody_lost)


class Communicator:
    """A communicator whose abort ends when `aborts_begun` communicators are being aborted."""

    def __init__(self, aborts_begun: threading.Barrier) -> None:
        self._aborts_begun = aborts_begun

    def abort(self) -> None:
        self._aborts_begun.wait(120)


def nccl_lane(name: str, group: Any) -> NcclLane:
    place = LanePlace(Meeting("localhost", 1, ""), name, 0, 2, "nccl", name)
    return NcclLane(place, group, 30.0, torch.device("cuda", 0))


def test_lanes_of_one_process_are_aborted_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The abort of one waits for the kernels of the others, which end by their own aborts.
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    begun = threading.Barrier(2)
    lanes = [nccl_lane(name, Communicator(begun)) for name in ("lane 0", "lane 1")]
    close_lanes(lanes)
    close_lanes(lanes)
    assert not begun.broken
    assert not caplog.records


def test_an_abort_that_fails_or_goes_on_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr("vllm_patching.transport.lane._ABORT_SECONDS", 0.0)
    never, alone = threading.Barrier(2), threading.Barrier(2)
    alone.abort()
    lanes = [nccl_lane("lane 0", Communicator(never)), nccl_lane("lane 1", Communicator(alone))]
    close_lanes(lanes[:1])
    assert "lane 0: NCCL has not ended what was in flight" in caplog.text
    never.abort()
    lanes[1].close()
    assert all(lane.join(time.monotonic() + 120) for lane in lanes)
    assert "lane 1: NCCL could not abort its communicator" in caplog.text
