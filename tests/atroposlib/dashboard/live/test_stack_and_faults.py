"""The service's view of its stack: faults in words with a remedy, and events between two polls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atroposlib.dashboard.events import (
    DROPS_SECONDS,
    Drops,
    events_between,
)
from atroposlib.dashboard.live.servers import Server
from atroposlib.dashboard.live.stack import TrainerContact, stack_of, without_clocks
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import Limits, ValidatedGroup
from atroposlib.service.schemas import Registration
from tests.atroposlib.service.trainers import registered

URL = "http://localhost:9001"
GOOD = {"instance": "one", "weight_version": 1, "weight_epoch": 5, "serving": True, "in_flight": 3}


def registration(uuid: int = 1, start: int = 0) -> Registration:
    return registered(uuid, "g", "p", 8, 128, "c", 5, start, 100, model="m", max_staleness=1)


def look(queue: RolloutQueue, *servers: Server, now: float = 0.0, **contact: Any) -> dict[str, Any]:
    return stack_of(
        queue, [server.row({}) for server in servers], 1000.0 + now, now, TrainerContact(**contact)
    )


def faults(stack: dict[str, Any]) -> dict[str, str]:
    assert all(fault["remedy"] and fault["text"].endswith(".") for fault in stack["faults"])
    return {fault["part"]: fault["severity"] for fault in stack["faults"]}


def kinds_of(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The kinds of events between two rows of a server."""
    stack = stack_of(RolloutQueue(), [after], 9.0, 9.0)
    return [event.kind for event in events_between(None, stack, {URL: before})]


def running() -> RolloutQueue:
    queue = RolloutQueue(Limits(max_groups=10))
    queue.register(registration())
    queue.next_batch(0.0, None, None)
    queue.register_env("task", 1.0, 4, 128, None, 0.0, None)
    return queue


def draft(env_id: int | None = None, version: int = 0) -> ValidatedGroup:
    return ValidatedGroup(b"{}", 4, 3, env_id=env_id, weights=((None, version),))


def test_each_fault_names_its_part() -> None:
    queue = running()
    assert faults(look(queue)) == {}
    queue.next_batch(0.0, None, None)
    assert faults(look(queue, now=500.0)) == {"environment task_0": "error"}
    for _ in range(10):
        queue.add(draft(0), 500.0)
    assert faults(look(queue, now=500.0)) == {"queue": "warning"}
    lease = queue.next_batch(500.0, None, None)
    assert lease is not None
    queue.sent(lease, complete=True)
    assert faults(look(queue, now=501.0, seconds_since_step=5000.0)) == {
        "queue": "warning",
        "trainer": "error",
    }
    silent, bad, away = Server(URL), Server("http://b:1"), Server("http://c:1")
    silent.missed(1.0, "connection refused")
    bad.answer(1.0, GOOD | {"serving": False, "trouble": "in quarantine"}, None)
    row = away.row({"standing": "away", "reason": "timed out", "since": 3.0})
    stack = stack_of(RolloutQueue(), [silent.row({}), bad.row({}), row], 0.0, 0.0)
    assert set(faults(stack)) == {f"server {URL}", "server http://b:1", "server http://c:1"}
    queue.end(1)
    assert "trainer" not in faults(look(queue, now=502.0, seconds_since_step=5000.0)), (
        "an end is no fault"
    )


def test_a_trainer_that_should_speak_and_does_not_is_named() -> None:
    queue = running()
    assert faults(look(queue, seconds_silent=100.0)) == {}
    assert faults(look(queue, seconds_silent=300.0)) == {"trainer": "warning"}
    for _ in range(2):
        queue.add(draft(0), 0.0)
    lease = queue.next_batch(0.0, None, None)
    assert lease is not None
    queue.sent(lease, complete=True)
    assert faults(look(queue, seconds_silent=300.0)) == {}, "it may compute for long"
    assert faults(look(queue, seconds_silent=300.0, publishes=True)) == {"trainer": "error"}, (
        "its keeper speaks meanwhile"
    )
    (mute,) = look(queue, seconds_silent=65.0, publishes=True)["faults"]
    assert mute["text"] == "The trainer has sent nothing for a minute."
    assert "scripts/start.sh --resume trainer" in mute["remedy"]
    queue.limits = replace(queue.limits, silent_after=5.0)
    (mute,) = look(queue, seconds_silent=6.0, publishes=True)["faults"]
    assert mute["text"] == "The trainer has sent nothing for 6 s."


def test_how_long_a_server_is_silent_is_told_by_its_last_answer_whoever_heard_it() -> None:
    server = Server(URL)
    server.answer(100.0, GOOD, None)
    server.answer(200.0, GOOD, None)
    for now in (201.0, 202.0):
        server.missed(now, "connection refused")
    trained = {"url": URL, "standing": "good", "since": 50.0}
    (fault,) = stack_of(RolloutQueue(), [server.row(trained)], 300.0, 0.0)["faults"]
    assert (fault["part"], fault["since"]) == (f"server {URL}", 200.0), (
        "and not since the trainer took it for good"
    )
    assert "connection refused" in fault["text"]
    after = Server.remembered(URL, server.row({}))  # by the next process of the service
    after.missed(400.0, "connection refused")
    assert (after.health, after.since, after.weight_version) == ("silent", 200.0, 1)
    assert kinds_of(server.row({}), after.row({})) == []
    after.answer(500.0, GOOD | {"instance": "two"}, {"failures": 0})
    kinds = kinds_of(server.row({}), after.row({}))
    assert (after.since, kinds) == (500.0, ["server_back", "server_restarted"])
    died = Server.remembered(
        URL, Server.remembered(URL, {"health": "good", "answered": 7.0}).row({})
    )
    for now in (8.0, 9.0):
        died.missed(now, "connection refused")
    assert (died.health, died.since) == ("silent", 7.0)
    assert Server.remembered(URL, {"health": [], "since": "x", "weight_version": 1.5}).row(
        {}
    ) == Server(URL).row({})


def test_what_happens_is_told_once() -> None:
    queue = RolloutQueue()
    before = look(queue)
    assert events_between(None, before, {}) == []
    queue.register(registration())
    queue.next_batch(0.0, None, None)
    queue.register_env("task", 1.0, 4, 128, None, 0.0, None)
    after = look(queue)
    assert [event.kind for event in events_between(before, after, {})] == [
        "trainer_registered",
        "environment_joined",
    ]
    assert events_between(after, after, {}) == []
    quiet = look(queue, now=61.0)
    assert [event.kind for event in events_between(after, quiet, {})] == ["environment_silent"]
    assert without_clocks(after) == without_clocks(look(queue, now=30.0)), (
        "seconds that pass are no news"
    )
    queue.status_env(0, 62.0)
    queue.register(registration(2, start=5))
    back = look(queue, now=62.0)
    assert [event.kind for event in events_between(quiet, back, {})] == [
        "resumed",
        "environment_back",
    ]
    queue.disconnect_env(0)
    queue.end(2)
    end = events_between(back, look(queue, now=63.0), {})
    assert [(event.kind, event.severity) for event in end] == [
        ("run_ended", "info"),
        ("environment_left", "info"),
    ]


def test_drops_are_told_together() -> None:
    queue, drops = running(), Drops()
    assert drops.events(look(queue)) == []
    queue.drops["stale", 64] += 3
    queue.drops["stale", 128] += 1
    (event,) = drops.events(look(queue, now=1.0))
    assert event.text == "4 groups dropped: stale"
    assert "--max-staleness" in (event.remedy or "")
    queue.drops["stale", 64] += 1
    assert drops.events(look(queue, now=2.0)) == []
    (event,) = drops.events(look(queue, now=2.0 + DROPS_SECONDS))
    assert event.text == "1 group dropped: stale"
    queue.reset()
    assert drops.events(look(queue, now=50.0)) == []


def test_what_a_server_says_and_does() -> None:
    server = Server(URL)

    def seen() -> dict[str, Any]:
        return server.row({})

    def kinds(before: dict[str, Any]) -> list[str]:
        return kinds_of(before, seen())

    bridge = {
        "checksums": ["a", "b"],
        "failures": 0,
        "last_update": {"to_paused": 0.5, "stalled": 2.0, "halted": 1.0, "x": "y"},
    }
    server.answer(1.0, GOOD, bridge)
    assert (server.health, server.longest_gap(), server.history[0]["checksum"]) == (
        "good",
        (2.0, 1.0),
        "a",
    )
    assert server.weights()["last_update"] == {"paused": 0.5, "stalled": 2.0, "halted": 1.0}
    before = seen()
    server.missed(2.0, "no answer in 4 s")
    assert (server.health, kinds(before)) == ("good", []), "a busy one may miss one question"
    server.missed(3.0, "no answer in 4 s")
    assert (server.since, kinds(before)) == (1.0, ["server_lost"])
    lost = seen()
    server.answer(4.0, GOOD | {"instance": "two", "weight_version": 2}, bridge | {"failures": 9})
    assert kinds(lost) == ["server_back", "server_restarted"], (
        "what it counted before its start is not compared"
    )
    before = seen()
    server.answer(
        5.0,
        GOOD | {"instance": "two", "weight_version": 2},
        bridge | {"failures": 10, "last_error": "shape"},
    )
    assert kinds(before) == ["refused_update"]
    assert [version["version"] for version in server.history] == [1, 2]
    for version, seconds in (
        (3, {"halted": 4.0}),
        (3, {"halted": 4.0, "stalled": 3.0}),
        (4, {"halted": 1.0}),
    ):
        server.answer(
            5.0 + version,
            GOOD | {"instance": "two", "weight_version": version},
            {"last_update": seconds},
        )
    assert (server.history[2]["gap"], server.longest_gap()) == (3.0, (3.0, 8.0)), (
        "the true one comes later"
    )
    again = Server.remembered(URL, seen(), server.history)
    assert (again.history, again.longest_gap()) == (server.history, (3.0, 8.0))


def test_what_a_server_says_in_the_middle_of_an_update_or_in_other_words() -> None:
    moving = Server(URL)
    moving.answer(1.0, GOOD, {"weight_version": 2, "weight_epoch": 5, "checksums": ["of 2"]})
    assert [(one["version"], one["checksum"]) for one in moving.history] == [(2, "of 2")], (
        "an update was in between"
    )
    server = Server(URL)
    server.answer(
        6.0,
        {"weight_version": "none", "in_flight": None},
        {"checksums": 5, "last_update": [1], "updates": True},
    )
    assert (server.health, server.weight_version, server.bridge["checksums"]) == ("good", None, [])


def test_a_store_without_space_is_a_fault_and_one_without_its_reserve_a_warning() -> None:
    figures = {
        "path": "/disk/a.db",
        "free_bytes": 1,
        "reserve_bytes": 64 << 20,
        "reserve_is_whole": True,
    }

    def faults(**changed: object) -> list[tuple[str, str, str]]:
        stack = stack_of(
            RolloutQueue(), [], 0.0, 0.0, store=figures | {"refusing_posts": None} | changed
        )
        return [(fault["part"], fault["severity"], fault["text"]) for fault in stack["faults"]]

    assert faults() == []
    assert faults(refusing_posts="store /disk/a.db: 0.0 MB are free") == [
        ("service", "error", "store /disk/a.db: 0.0 MB are free")
    ]
    assert faults(reserve_is_whole=False) == [
        ("service", "warning", "The reserve of 67 MB beside /disk/a.db is not there.")
    ]
    first, second = (
        stack_of(RolloutQueue(), [], 0.0, 0.0, store=figures | {"free_bytes": free})
        for free in (1, 2)
    )
    assert without_clocks(first) == without_clocks(second), "its free space alone is no news"
