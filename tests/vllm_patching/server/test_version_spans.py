"""Times and versions of an update: by a clock that the test moves, as spans, and in the server's timeline."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_patching.protocol.timeline import Timeline
from vllm_patching.server import bridge
from vllm_patching.server.bridge import FIRST_STEP_SECONDS, UpdateClock
from vllm_patching.server.engine_calls import EngineState
from vllm_patching.server.state import Span, VersionSpans, Weights
from vllm_patching.server.timeline import FollowRequests, ServerTimeline


def spans_of(*pairs: tuple[int, int]) -> list[Span]:
    """Expected spans from (version, tokens), all of the checkpoint's epoch."""
    return [Span(Weights(0, version), tokens) for version, tokens in pairs]


def test_a_request_without_an_update_has_one_span() -> None:
    spans = VersionSpans()
    spans.start("a")
    assert spans.finish("a", 5) == spans_of((0, 5))


def test_a_request_across_two_updates() -> None:
    spans = VersionSpans()
    spans.start("a")
    spans.switch(Weights(0, 1), {"a": 3})
    spans.start("b")
    spans.switch(Weights(0, 4), {"a": 3, "b": 0})
    assert spans.finish("a", 10) == spans_of((0, 3), (4, 7))
    assert spans.finish("b", 2) == spans_of((4, 2))


def test_a_request_that_ended_with_the_old_weights_keeps_their_version() -> None:
    spans = VersionSpans(2)
    spans.start("a")
    spans.switch(Weights(0, 3), {"a": 6})
    assert spans.finish("a", 6) == spans_of((2, 6))


def test_a_switch_waits_for_the_first_output_that_left_the_engine_after_it() -> None:
    spans = VersionSpans()
    for name in ("running", "ended", "unknown"):
        spans.start(name)
    spans.known("running")
    spans.known("ended")
    spans.switch_at(10.0, Weights(0, 1))
    spans.outputs_of(9.9, lambda: {"running": 2, "ended": 4})
    assert spans.version == 0
    # By now `ended` has got its last token, and its caller has not fetched it; `unknown` has not
    # reached the engine.
    spans.outputs_of(10.1, lambda: {"running": 3})
    spans.outputs_of(10.2, dict)
    assert spans.version == 1
    assert spans.finish("running", 8) == spans_of((0, 3), (1, 5))
    assert spans.finish("ended", 6) == spans_of((0, 6))
    assert spans.finish("unknown", 2) == spans_of((1, 2))


def test_a_request_fetched_before_any_new_output_is_of_the_old_version() -> None:
    spans = VersionSpans(3)
    spans.start("a")
    spans.known("a")
    spans.switch_at(1.0, Weights(0, 4))
    spans.switch_at(2.0, Weights(0, 5))
    assert spans.finish("a", 7) == spans_of((3, 7))
    spans.start("b")
    spans.outputs_of(5.0, lambda: {"b": 0})
    assert spans.finish("b", 1) == spans_of((5, 1))


def test_without_requests_a_switch_is_at_once() -> None:
    spans = VersionSpans()
    spans.switch_at(1.0, Weights(0, 1))
    assert spans.version == 1


def test_a_trainer_that_resumes_goes_back_in_versions_and_on_in_epochs() -> None:
    spans = VersionSpans(17, 100)
    spans.start("a")
    spans.switch(Weights(200, 10), {"a": 5})
    result = spans.finish("a", 9)
    assert result == [Span(Weights(100, 17), 5), Span(Weights(200, 10), 4)]
    assert (spans.version, spans.weights.epoch) == (10, 200)


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(0, 20))
def test_spans_cover_all_tokens_in_order(increments: list[int], last: int) -> None:
    spans = VersionSpans()
    spans.start("a")
    count = 0
    for version, more in enumerate(increments):
        count += more
        spans.switch(Weights(0, version + 1), {"a": count})
    result = spans.finish("a", count + last)
    assert sum(span.tokens for span in result) == count + last
    versions = [span.weights.version for span in result]
    assert versions == sorted(set(versions))
    assert result


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


def test_generating_is_interrupted_while_the_engine_stands_still(tmp_path: Path) -> None:
    timeline = ServerTimeline(Timeline(tmp_path / "t.jsonl", "generator", "here"))
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        arrived.set()
        await go_on.wait()
        if scope["path"] == "/broken":
            raise ConnectionError("the client has gone")

    follow = FollowRequests(app, timeline)

    def ask(method: str, path: str) -> asyncio.Task[None]:
        scope = {"type": "http", "method": method, "path": path, "root_path": ""}
        return asyncio.create_task(follow(scope, None, None))

    async def serve() -> None:
        ignored = [ask("GET", "/health"), ask("POST", "/bridge/begin")]
        await asyncio.wait_for(arrived.wait(), 60)
        arrived.clear()
        requests = [ask("POST", "/generate"), ask("POST", "/broken")]
        await asyncio.wait_for(arrived.wait(), 60)
        begun = time.monotonic()
        for state in (
            EngineState.UNKNOWN,
            EngineState.PAUSED,
            EngineState.UNKNOWN,
            EngineState.RUNNING,
        ):
            timeline.engine(state)
        timeline.updated(begun, 7)
        go_on.set()
        await asyncio.gather(*ignored, *requests, return_exceptions=True)

    asyncio.run(serve())
    timeline.engine(
        EngineState.PAUSED
    )  # as for a turn of the trainer's, which a stop of the server ends
    timeline.close()
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert rows[0]["role"] == "generator"
    assert [row["what"] for row in rows[1:]] == [
        "generating",
        "halted",
        "update",
        "generating",
        "halted",
    ]
    generating, halted, update, again, _ = rows[1:]
    assert (generating["end"], halted["end"]) == (halted["begin"], again["begin"])
    assert update["version"] == 7
    assert (
        generating["begin"] <= update["begin"] <= halted["begin"] <= update["end"] <= again["end"]
    )
