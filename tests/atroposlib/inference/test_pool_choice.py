"""Which server a request goes to, as pure functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.inference.client import (
    MAX_PAUSE,
    SETTLING_SECONDS,
    Choice,
    HealthReport,
    Load,
    read_health,
)
from atroposlib.inference.generation import Weights

IDLE = Load(0, 8)
WELL = HealthReport(weights=Weights(1, 1), in_flight=0)


def choice_after(*looks: HealthReport, at: float = 0.0) -> Choice[int]:
    """Return servers 0, 1, … each with this health."""
    choice: Choice[int] = Choice()
    for number, look in enumerate(looks):
        choice.polled(number, at, at, look)
    return choice


def chosen(choice: Choice[int], now: float, *loads: Load, **more: Any) -> int | None:
    return choice.choose(list(enumerate(loads)), now, **more)


# ---- what is chosen ----


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Choice[int], list[tuple[int, Load]], float]:
    """Servers in any standing, with any load, at any time."""
    choice: Choice[int] = Choice()
    times = sorted(draw(st.lists(st.floats(0, 60), min_size=1, max_size=12)))
    count = draw(st.integers(1, 5))
    for now in times:
        server = draw(st.integers(0, count - 1))
        match draw(st.sampled_from(["look", "wrong", "refused", "failed", "answered"])):
            case "look":
                weights = draw(st.none() | st.builds(Weights, st.integers(0, 2), st.integers(0, 3)))
                choice.polled(
                    server,
                    now,
                    now,
                    HealthReport(weights=weights, in_flight=draw(st.none() | st.integers(0, 20))),
                )
            case "wrong":
                choice.polled(server, now, now, HealthReport(wrong="silent"))
            case "refused":
                choice.refused(server, now, now, "503")
            case "failed":
                choice.failed(server, now, now)
            case _:
                choice.answered(server, now)
    loads = [(server, Load(draw(st.integers(0, 10)), 8)) for server in range(count)]
    return choice, loads, times[-1] + draw(st.floats(0, 40))


@settings(max_examples=300, deadline=None)
@given(fleets(), st.sets(st.integers(0, 4)), st.none() | st.integers(0, 4))
def test_the_best_one_that_can_be_asked_is_asked(
    fleet: tuple[Choice[int], list[tuple[int, Load]], float],
    tried: set[int],
    preferred: int | None,
) -> None:
    choice, loads, now = fleet
    server = choice.choose(loads, now, preferred, tried)
    can = [key for key, _ in loads if not choice.of(key).away]
    if server is None:
        assert not can, "it waits only when all are away"
        return
    assert server in can
    untried = [key for key in can if key not in tried]
    assert server not in tried or not untried
    pool = untried or can
    calm = [key for key in pool if now >= choice.of(key).avoid_until]
    assert server in calm or not calm, "one that fails is left alone as long as another does not"
    if not calm:
        assert choice.of(server).avoid_until == min(choice.of(key).avoid_until for key in pool)
        return
    settled = choice.settled_weights(now)

    def fresh(key: int) -> bool:
        weights = choice.of(key).weights
        return settled is None or weights is None or weights >= settled

    good = [key for key in calm if fresh(key)]
    if good:
        assert server in good
    else:
        newest = max(choice.of(key).weights or Weights(0, 0) for key in calm)
        assert choice.of(server).weights == newest
        good = [key for key in calm if choice.of(key).weights == newest]
    if preferred in good:
        assert server == preferred
        return
    of = dict(loads)
    room = [key for key in good if of[key].ours < of[key].most]
    assert server in room or not room
    assert choice.of(server).load(of[server].ours) == min(
        choice.of(key).load(of[key].ours) for key in room or good
    )


def test_new_weights_draw_requests_only_once_the_others_should_have_them() -> None:
    choice = choice_after(WELL, WELL)
    choice.polled(0, 10.0, 10.0, HealthReport(weights=Weights(1, 2), in_flight=5))
    now = 10.0 + SETTLING_SECONDS / 2
    assert chosen(choice, now, IDLE, IDLE) == 1, "it may be a moment late only, and has less to do"
    now = 10.0 + SETTLING_SECONDS
    assert chosen(choice, now, IDLE, IDLE) == 0
    choice.polled(1, now, now, HealthReport(weights=Weights(1, 2), in_flight=0))
    assert chosen(choice, now, IDLE, IDLE) == 1


def test_a_server_that_stays_behind_is_noticed_while_versions_fly_by() -> None:
    choice = choice_after(WELL, WELL)
    for step in range(40):
        choice.polled(
            0, step * 0.5, step * 0.5, HealthReport(weights=Weights(1, step + 2), in_flight=9)
        )
        choice.polled(1, step * 0.5, step * 0.5, WELL)
    assert chosen(choice, 20.0, IDLE, IDLE) == 0
    assert len(choice._newest) < 10, "what is old is forgotten"


def test_a_later_life_of_the_trainer_is_fresher_whatever_its_version() -> None:
    choice = choice_after(
        HealthReport(weights=Weights(5, 17)), HealthReport(weights=Weights(6, 11))
    )
    assert chosen(choice, SETTLING_SECONDS, IDLE, IDLE) == 1


def test_requests_of_others_count_and_ours_are_not_counted_twice() -> None:
    choice: Choice[int] = Choice()
    choice.polled(0, 0.0, 0.0, HealthReport(in_flight=6), ours=4)
    choice.polled(1, 0.0, 0.0, HealthReport(in_flight=5), ours=0)
    assert choice.of(0).load(4) == 6
    assert choice.of(0).load(1) == 3
    assert choice.of(1).load(3) == 8
    assert chosen(choice, 0.0, Load(1, 8), Load(3, 8)) == 0


# ---- failures ----


def test_a_server_that_fails_at_once_gets_trials_and_no_more() -> None:
    """One of three answers 500 in no time, with good health, so that it always has the least to do."""
    choice = choice_after(WELL, WELL, WELL)
    now, sent = 0.0, [0, 0, 0]
    while now < 300.0:
        choice.polled(0, now, now, WELL)
        server = chosen(choice, now, Load(0, 8), Load(4, 8), Load(5, 8))
        assert server is not None
        sent[server] += 1
        choice.sent(server, now)
        if server == 0:
            choice.failed(0, now, now)
        else:
            choice.answered(server, now)
        now += 0.05
    assert sent[0] <= math.log2(MAX_PAUSE) + 2 + 300.0 / MAX_PAUSE
    choice.answered(0, now)
    assert chosen(choice, now, Load(0, 8), Load(4, 8), Load(5, 8)) == 0, (
        "one answer, and it is as the others"
    )


def test_what_fails_together_counts_once_and_a_trial_is_one_request() -> None:
    choice = choice_after(WELL, WELL)
    for _ in range(500):
        choice.failed(0, 1.0, 2.0)
    assert choice.of(0).failures == 1
    after = 2.0 + choice.of(0).pause
    assert chosen(choice, after, Load(0, 8), Load(4, 8)) == 0
    choice.sent(0, after)
    assert chosen(choice, after, Load(1, 8), Load(4, 8)) == 1, (
        "the others wait for what comes of it"
    )
    choice.answered(0, 1.5)
    assert choice.of(0).failures == 1, "what was sent before it failed says nothing of now"
    choice.answered(0, after)
    assert choice.of(0).failures == 0


def test_a_server_that_comes_back_is_asked_at_once() -> None:
    choice = choice_after(WELL, WELL)
    for second in range(10):
        choice.refused(0, float(second), float(second), "connection refused")
        choice.polled(0, float(second), float(second), HealthReport(wrong="no answer"))
    assert chosen(choice, 10.0, IDLE, IDLE) == 1
    choice.polled(0, 10.0, 10.1, WELL)
    assert chosen(choice, 10.1, Load(0, 8), Load(1, 8)) == 0


def test_one_that_refuses_with_good_health_is_not_asked_all_the_time() -> None:
    choice = choice_after(WELL, WELL)
    asked = 0
    for tick in range(600):
        now = tick * 0.5
        choice.polled(0, now, now, WELL)
        if chosen(choice, now, Load(0, 8), Load(4, 8)) == 0:
            asked += 1
            choice.sent(0, now)
            choice.refused(0, now, now, "503")
    assert asked <= math.log2(MAX_PAUSE) + 2 + 300.0 / MAX_PAUSE


def test_a_poll_that_was_sent_before_a_refusal_does_not_outweigh_it() -> None:
    choice = choice_after(WELL)
    choice.refused(0, 1.0, 2.0, "503")
    choice.polled(0, 1.5, 2.5, WELL)
    assert choice.of(0).away
    choice.polled(0, 2.5, 2.6, WELL)
    assert not choice.of(0).away


def test_requests_are_moved_only_when_another_server_can_take_them() -> None:
    choice = choice_after(HealthReport(wrong="silent"), WELL, at=10.0)
    assert choice.overdue([0, 1], 24.0, 15.0) == []
    choice.polled(0, 20.0, 20.0, HealthReport(wrong="silent for longer"))
    assert choice.overdue([0, 1], 25.0, 15.0) == [0], "it has been away since it was first seen so"
    choice.polled(1, 25.0, 25.0, HealthReport(wrong="silent"))
    assert choice.overdue([0, 1], 90.0, 15.0) == []


# ---- answers of a server ----


def test_a_health_report_is_read() -> None:
    told = {
        "instance": "a",
        "weight_version": 3,
        "weight_epoch": 9,
        "serving": True,
        "trouble": "",
        "in_flight": 4,
    }
    assert read_health(told) == HealthReport("", Weights(9, 3), 4)
    assert (
        read_health(told | {"serving": False, "trouble": "quarantined: late"}).wrong
        == "quarantined: late"
    )
    assert read_health(told | {"serving": False}).wrong
    assert read_health({}) == HealthReport()
    assert (
        read_health({"weight_version": True, "weight_epoch": None, "in_flight": "many"})
        == HealthReport()
    )
    with pytest.raises(ValueError, match="/weights answered"):
        read_health(["serving"])
