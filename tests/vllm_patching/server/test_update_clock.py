"""The times of an update, by a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_patching.server import bridge
from vllm_patching.server.bridge import FIRST_STEP_SECONDS, UpdateClock

MARKS = ("paused", "transferred", "committed", "verified", "serving")


class Hands:
    """The value of time.monotonic()."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    made = Hands()
    monkeypatch.setattr(bridge, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


def take(clock: UpdateClock, hands: Hands, in_flight: bool = True) -> None:
    """A whole direct update: each phase a second after the one before, paused at the second."""
    clock.begin()
    for mark in MARKS:
        hands.now += 1
        clock.reach(mark)
    hands.now += 1
    clock.resumed(asked=hands.now - 0.25, in_flight=in_flight)


def test_the_phases_of_an_update(hands: Hands) -> None:
    clock = UpdateClock(8.0)
    take(clock, hands)
    assert clock.seconds == {f"to_{mark}": 1.0 for mark in MARKS} | {"halted": 5.0, "resume": 0.25}
    assert str(clock).endswith("to_serving 1000.0 ms, halted 5000.0 ms, resume 250.0 ms")


def test_the_engine_stalled_until_its_first_step(hands: Hands) -> None:
    clock = UpdateClock(8.0)
    assert not clock.wants_first_step
    take(clock, hands)
    told = clock.seconds
    clock.stepped(None)
    assert "stalled" not in told
    assert clock.wants_first_step
    clock.stepped(hands.now - 0.5)  # the step began before the answer to resume was there
    assert told["stalled"] == 4.5
    assert not clock.wants_first_step
    take(clock, hands)
    assert told["stalled"] == 4.5, "the figures of an update are its own"
    assert "stalled" not in clock.seconds


def test_nobody_asks_for_the_step_of_an_idle_engine_or_of_an_update_that_is_over(
    hands: Hands,
) -> None:
    clock = UpdateClock(8.0)
    take(clock, hands, in_flight=False)
    assert not clock.wants_first_step
    take(clock, hands)
    hands.now += FIRST_STEP_SECONDS
    assert not clock.wants_first_step
    take(clock, hands)
    clock.begin()
    assert not clock.wants_first_step


def test_a_phase_is_late_after_its_own_time(hands: Hands) -> None:
    clock = UpdateClock(8.0)
    clock.begin()
    hands.now += 7.9
    assert not clock.is_late
    clock.reach("paused")
    hands.now += 7.9
    assert not clock.is_late
    hands.now += 0.2
    assert clock.is_late
