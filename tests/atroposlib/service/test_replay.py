"""In which order groups are used, and how often."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import Group, Limits, QueueFullError, ValidatedGroup
from atroposlib.service.scheduling import in_order_of_use
from atroposlib.service.schemas import ReplayOptions
from tests.atroposlib.service.trainers import registered

from .conftest import Service, group, marks, trainer


def started(replay: dict[str, Any], staleness: int, limits: Limits | None = None) -> RolloutQueue:
    queue = RolloutQueue(limits)
    queue.register(
        registered(
            1,
            "g",
            "p",
            4,
            128,
            "c",
            5,
            0,
            100,
            max_staleness=staleness,
            ack_batches=True,
            replay=replay,
        )
    )
    return queue


def post(queue: RolloutQueue, version: int = 0, env_id: int | None = None) -> int:
    queue.check([ValidatedGroup(b"{}", 2, 10, env_id, ((None, version),))])
    queue.add(ValidatedGroup(b"{}", 2, 10, env_id, ((None, version),)), 0.0)
    return queue.next_seq - 1


def learn(queue: RolloutQueue) -> list[int] | None:
    lease = queue.next_batch(0.0)
    if lease is None:
        return None
    queue.ack(lease.batch_id)
    return [entry.seq for entry in lease.groups]


def waiting(seq: int, version: int = 0, uses: int = 0) -> Group:
    return Group(seq, -1, 2, 10, 2, ((0, version),), version=version, uses=uses)


def test_a_group_is_used_again_only_where_nothing_new_waits() -> None:
    queue = started({"max_reuse": 2}, staleness=5)
    for _ in range(3):
        post(queue)
    assert learn(queue) == [0, 1]
    assert learn(queue) == [0, 2], "the one that is new, and the oldest of the others"
    post(queue)
    post(queue)
    assert learn(queue) == [3, 4]
    assert [learn(queue) for _ in range(3)] == [[1, 2], [3, 4], None], "and then no more"
    assert (queue.uses, queue.groups_used, queue.held_groups) == (10, 5, 0)


def test_a_group_that_is_out_is_in_no_other_batch() -> None:
    queue = started({"max_reuse": 9}, staleness=9)
    for _ in range(3):
        post(queue)
    first = queue.next_batch(0.0)
    assert first is not None
    assert queue.next_batch(0.0, received=first.batch_id) is None, "only one is left"
    queue.ack(first.batch_id, keep=True)
    assert queue.next_batch(0.0, received=first.batch_id) is None, (
        "it may come to the next trainer again"
    )
    queue.ack(first.batch_id)
    assert learn(queue) == [0, 2]


def test_what_a_trainer_could_not_learn_from_is_not_tried_again() -> None:
    queue = started({"max_reuse": 9}, staleness=9)
    post(queue)
    post(queue)
    lease = queue.next_batch(0.0)
    assert lease is not None
    queue.ack(lease.batch_id, skipped="no memory")
    assert (queue.held_groups, queue.uses) == (0, 0)


def test_recent_is_the_newest_weights_first_and_drops_by_age() -> None:
    queue = started({"policy": "recent", "max_reuse": 9}, staleness=1)
    old = [post(queue, 0), post(queue, 0)]
    new = [post(queue, 1), post(queue, 1), post(queue, 1)]
    assert learn(queue) == new[1:]
    assert learn(queue) == [new[0], new[2]], "of the same weights those that were not used yet"
    assert [entry.seq for entry in queue.lines] == new, "what never was used is too old now"
    assert queue.drops == {("stale", 16): len(old)}
    assert learn(queue) == new[:2]
    assert queue.drops == {("stale", 16): len(old), ("stale_after_use", 16): 3}


def test_uniform_follows_from_seed_batch_and_numbers_and_is_fair() -> None:
    line = [waiting(seq) for seq in range(6)]
    replay = ReplayOptions(policy="uniform", max_reuse=4, seed=7)
    first: Counter[int] = Counter()
    for batch in range(3000):
        order = [entry.seq for entry in in_order_of_use(replay, line, batch)]
        assert sorted(order) == list(range(6)), "each once"
        assert order == [
            entry.seq
            for entry in in_order_of_use(
                ReplayOptions(policy="uniform", max_reuse=9, seed=7), reversed(line), batch
            )
        ]
        without = [entry.seq for entry in in_order_of_use(replay, line[1:], batch)]
        assert without == [seq for seq in order if seq], "what else waits changes nothing"
        first.update(order[:2])
    assert all(abs(count - 1000) < 5 * (3000 * 2 / 9) ** 0.5 for count in first.values()), first
    assert in_order_of_use(replay, line, 1) != in_order_of_use(
        ReplayOptions(policy="uniform", max_reuse=4, seed=8), line, 1
    )


@settings(deadline=None)
@given(
    st.sampled_from(["fifo", "recent", "uniform"]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.integers(0, 5), min_size=1, max_size=20),
)
def test_no_policy_uses_a_group_too_often_twice_at_once_or_too_late(
    policy: str, staleness: int, reuse: int, posts: list[int]
) -> None:
    queue = started({"policy": policy, "max_reuse": reuse}, staleness)
    version: dict[int, int] = {}
    uses: Counter[int] = Counter()
    for count in posts:
        for _ in range(count):
            version[post(queue, queue.sampling_version())] = queue.sampling_version()
        at = queue.sampling_version()
        batch = learn(queue)
        if batch is not None:
            assert len(set(batch)) == len(batch) == 2
            assert all(at - version[seq] <= staleness for seq in batch)
            uses.update(batch)
    assert max(uses.values(), default=0) <= reuse
    assert (queue.uses, queue.groups_used) == (uses.total(), len(uses))


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 4))
def test_who_posts_what_is_wanted_has_nothing_dropped_that_was_not_used(
    staleness: int, reuse: int
) -> None:
    queue = started({"max_reuse": reuse}, staleness)
    queue.next_batch(0.0)
    environment = queue.register_env("task", 1.0, 2, 128, None, 0.0)
    assert environment is not None
    for _ in range(12):
        for _ in range(queue.groups_wanted(environment.env_id, 0.0)):
            post(queue, queue.sampling_version(), environment.env_id)
        assert learn(queue) is not None
    assert {reason for reason, _ in queue.drops} <= {"stale_after_use"}


def test_new_groups_take_the_place_of_used_ones_where_there_is_no_room() -> None:
    queue = started({"max_reuse": 3}, staleness=9, limits=Limits(max_groups=4))
    for _ in range(4):
        post(queue)
    assert learn(queue) == [0, 1]
    post(queue)
    assert queue.drops == {("replaced", 16): 1}
    assert [entry.seq for entry in queue.lines] == [1, 2, 3, 4]
    post(queue)
    with pytest.raises(QueueFullError, match="4 groups"):
        post(queue)


def test_a_trainer_that_reuses_less_gets_nothing_again() -> None:
    queue = started({"max_reuse": 3}, staleness=9)
    for _ in range(2):
        post(queue)
    assert learn(queue) == [0, 1]
    assert queue.next_batch(0.0) is not None
    queue.register(
        registered(2, "g", "p", 4, 128, "c", 5, 1, 100, max_staleness=9, ack_batches=True)
    )
    assert queue.next_batch(0.0) is None
    assert queue.drops == {("used_up", 16): 2}


def test_uses_are_counted_over_kills_of_service_and_trainer(tmp_path: Path) -> None:
    service = Service(tmp_path, "--store", str(tmp_path / "a.db")).start()
    replay = {"policy": "uniform", "max_reuse": 2, "seed": 3}
    wanted = trainer(batch_size=8, ack_batches=True, max_staleness=50, replay=replay)
    used: Counter[int] = Counter()
    try:
        service.post("/register", wanted)
        for mark in range(4):
            service.post("/scored_data", group(mark=mark))
        for step in range(4):
            answer = service.get("/batch")
            assert answer["uses"] == [used[mark] for mark in marks(answer["batch"])]
            if step == 1:
                service.signal(signal.SIGKILL)
                service.start()
            if step == 2:
                service.post("/register", {**wanted, "starting_step": step})
            assert service.get("/batch") == answer, "it comes again as it was"
            service.post("/batch/ack", {"batch_id": answer["batch_id"], "weight_version": step + 1})
            if step == 2:
                service.signal(signal.SIGKILL)
                service.start()
            used.update(marks(answer["batch"]))
        assert set(used.values()) == {2}
        assert service.get("/batch")["batch"] is None
        told = service.get("/stats")["replay"]
        assert told == {**replay, "uses": 8, "groups_used": 4, "waiting_to_be_used_again": 0}
        assert "rollout_group_uses_total 8.0" in service.http.get("/metrics").text
        refusals = [
            {"replay": {"max_reuse": 2}, "max_staleness": 0},
            {"replay": {"policy": "recent"}},
            {"replay": {"max_reuse": 0}},
        ]
        for fields in refusals:
            assert service.http.post("/register", json=trainer(**fields)).status_code == 422
    finally:
        service.signal(signal.SIGKILL)
