"""Which server a request goes to, as pure functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.inference.generation import Weights
from atroposlib.inference.pool import MAX_PAUSE, SETTLING_SECONDS, Choice, Load, Look
from atroposlib.inference.vllm_client import read_look

IDLE = Load(0, 8)
WELL = Look(weights=Weights(1, 1), in_flight=0)


def pool_choice(*looks: Look, at: float = 0.0) -> Choice[int]:
    """Servers 0, 1, … each seen as the look says."""
    made: Choice[int] = Choice()
    for number, look in enumerate(looks):
        made.looked(number, at, at, look)
    return made


def chosen(made: Choice[int], now: float, *loads: Load, **more: Any) -> int | None:
    return made.choose(list(enumerate(loads)), now, **more)


# ---- what is chosen ----


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Choice[int], list[tuple[int, Load]], float]:
    """Servers in any standing, with any load, at any time."""
    made: Choice[int] = Choice()
    times = sorted(draw(st.lists(st.floats(0, 60), min_size=1, max_size=12)))
    count = draw(st.integers(1, 5))
    for now in times:
        server = draw(st.integers(0, count - 1))
        match draw(st.sampled_from(["look", "wrong", "refused", "failed", "answered"])):
            case "look":
                weights = draw(st.none() | st.builds(Weights, st.integers(0, 2), st.integers(0, 3)))
                made.looked(
                    server,
                    now,
                    now,
                    Look(weights=weights, in_flight=draw(st.none() | st.integers(0, 20))),
                )
            case "wrong":
                made.looked(server, now, now, Look(wrong="silent"))
            case "refused":
                made.refused(server, now, now, "503")
            case "failed":
                made.failed(server, now, now)
            case _:
                made.answered(server, now)
    loads = [(server, Load(draw(st.integers(0, 10)), 8)) for server in range(count)]
    return made, loads, times[-1] + draw(st.floats(0, 40))


@settings(max_examples=300, deadline=None)
@given(fleets(), st.sets(st.integers(0, 4)), st.none() | st.integers(0, 4))
def test_the_best_one_that_can_be_asked_is_asked(
    fleet: tuple[Choice[int], list[tuple[int, Load]], float],
    tried: set[int],
    preferred: int | None,
) -> None:
    made, loads, now = fleet
    server = made.choose(loads, now, preferred, tried)
    can = [key for key, _ in loads if not made.of(key).away]
    if server is None:
        assert not can, "it waits only when all are away"
        return
    assert server in can
    untried = [key for key in can if key not in tried]
    assert server not in tried or not untried
    pool = untried or can
    calm = [key for key in pool if now >= made.of(key).avoid_until]
    assert server in calm or not calm, "one that fails is left alone as long as another does not"
    if not calm:
        assert made.of(server).avoid_until == min(made.of(key).avoid_until for key in pool)
        return
    settled = made.settled_weights(now)

    def fresh(key: int) -> bool:
        weights = made.of(key).weights
        return settled is None or weights is None or weights >= settled

    good = [key for key in calm if fresh(key)]
    if good:
        assert server in good
    else:
        newest = max(made.of(key).weights or Weights(0, 0) for key in calm)
        assert made.of(server).weights == newest
        good = [key for key in calm if made.of(key).weights == newest]
    if preferred in good:
        assert server == preferred
        return
    of = dict(loads)
    room = [key for key in good if of[key].ours < of[key].most]
    assert server in room or not room
    assert made.of(server).load(of[server].ours) == min(
        made.of(key).load(of[key].ours) for key in room or good
    )


def test_new_weights_draw_requests_only_once_the_others_should_have_them() -> None:
    made = pool_choice(WELL, WELL)
    made.looked(0, 10.0, 10.0, Look(weights=Weights(1, 2), in_flight=5))
    now = 10.0 + SETTLING_SECONDS / 2
    assert chosen(made, now, IDLE, IDLE) == 1, "it may be a moment late only, and has less to do"
    now = 10.0 + SETTLING_SECONDS
    assert chosen(made, now, IDLE, IDLE) == 0
    made.looked(1, now, now, Look(weights=Weights(1, 2), in_flight=0))
    assert chosen(made, now, IDLE, IDLE) == 1


def test_a_server_that_stays_behind_is_noticed_while_versions_fly_by() -> None:
    made = pool_choice(WELL, WELL)
    for step in range(40):
        made.looked(0, step * 0.5, step * 0.5, Look(weights=Weights(1, step + 2), in_flight=9))
        made.looked(1, step * 0.5, step * 0.5, WELL)
    assert chosen(made, 20.0, IDLE, IDLE) == 0
    assert len(made._newest) < 10, "what is old is forgotten"


def test_a_later_life_of_the_trainer_is_fresher_whatever_its_version() -> None:
    made = pool_choice(Look(weights=Weights(5, 17)), Look(weights=Weights(6, 11)))
    assert chosen(made, SETTLING_SECONDS, IDLE, IDLE) == 1


def test_requests_of_others_count_and_ours_are_not_counted_twice() -> None:
    made: Choice[int] = Choice()
    made.looked(0, 0.0, 0.0, Look(in_flight=6), ours=4)
    made.looked(1, 0.0, 0.0, Look(in_flight=5), ours=0)
    assert made.of(0).load(4) == 6
    assert made.of(0).load(1) == 3
    assert made.of(1).load(3) == 8
    assert chosen(made, 0.0, Load(1, 8), Load(3, 8)) == 0


# ---- failures ----


def test_a_server_that_fails_at_once_gets_trials_and_no_more() -> None:
    """One of three answers 500 in no time, with good health, so that it always has the least to do."""
    made = pool_choice(WELL, WELL, WELL)
    now, sent = 0.0, [0, 0, 0]
    while now < 300.0:
        made.looked(0, now, now, WELL)
        server = chosen(made, now, Load(0, 8), Load(4, 8), Load(5, 8))
        assert server is not None
        sent[server] += 1
        made.sent(server, now)
        if server == 0:
            made.failed(0, now, now)
        else:
            made.answered(server, now)
        now += 0.05
    assert sent[0] <= math.log2(MAX_PAUSE) + 2 + 300.0 / MAX_PAUSE
    made.answered(0, now)
    assert chosen(made, now, Load(0, 8), Load(4, 8), Load(5, 8)) == 0, (
        "one answer, and it is as the others"
    )


def test_what_fails_together_counts_once_and_a_trial_is_one_request() -> None:
    made = pool_choice(WELL, WELL)
    for _ in range(500):
        made.failed(0, 1.0, 2.0)
    assert made.of(0).failures == 1
    after = 2.0 + made.of(0).pause
    assert chosen(made, after, Load(0, 8), Load(4, 8)) == 0
    made.sent(0, after)
    assert chosen(made, after, Load(1, 8), Load(4, 8)) == 1, "the others wait for what comes of it"
    made.answered(0, 1.5)
    assert made.of(0).failures == 1, "what was sent before it failed says nothing of now"
    made.answered(0, after)
    assert made.of(0).failures == 0


def test_a_server_that_comes_back_is_asked_at_once() -> None:
    made = pool_choice(WELL, WELL)
    for second in range(10):
        made.refused(0, float(second), float(second), "connection refused")
        made.looked(0, float(second), float(second), Look(wrong="no answer"))
    assert chosen(made, 10.0, IDLE, IDLE) == 1
    made.looked(0, 10.0, 10.1, WELL)
    assert chosen(made, 10.1, Load(0, 8), Load(1, 8)) == 0


def test_one_that_refuses_with_good_health_is_not_asked_all_the_time() -> None:
    made = pool_choice(WELL, WELL)
    asked = 0
    for tick in range(600):
        now = tick * 0.5
        made.looked(0, now, now, WELL)
        if chosen(made, now, Load(0, 8), Load(4, 8)) == 0:
            asked += 1
            made.sent(0, now)
            made.refused(0, now, now, "503")
    assert asked <= math.log2(MAX_PAUSE) + 2 + 300.0 / MAX_PAUSE


def test_a_look_that_was_sent_before_a_refusal_does_not_outweigh_it() -> None:
    made = pool_choice(WELL)
    made.refused(0, 1.0, 2.0, "503")
    made.looked(0, 1.5, 2.5, WELL)
    assert made.of(0).away
    made.looked(0, 2.5, 2.6, WELL)
    assert not made.of(0).away


def test_requests_are_moved_only_when_another_server_can_take_them() -> None:
    made = pool_choice(Look(wrong="silent"), WELL, at=10.0)
    assert made.lost([0, 1], 24.0, 15.0) == []
    made.looked(0, 20.0, 20.0, Look(wrong="silent for longer"))
    assert made.lost([0, 1], 25.0, 15.0) == [0], "it has been away since it was first seen so"
    made.looked(1, 25.0, 25.0, Look(wrong="silent"))
    assert made.lost([0, 1], 90.0, 15.0) == []


# ---- what a server says ----


def test_a_look_is_read() -> None:
    told = {
        "instance": "a",
        "weight_version": 3,
        "weight_epoch": 9,
        "serving": True,
        "trouble": "",
        "in_flight": 4,
    }
    assert read_look(told) == Look("", Weights(9, 3), 4)
    assert (
        read_look(told | {"serving": False, "trouble": "quarantined: late"}).wrong
        == "quarantined: late"
    )
    assert read_look(told | {"serving": False}).wrong
    assert read_look({}) == Look()
    assert read_look({"weight_version": True, "weight_epoch": None, "in_flight": "many"}) == Look()
    with pytest.raises(ValueError, match="/weights answered"):
        read_look(["serving"])
