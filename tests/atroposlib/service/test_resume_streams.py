"""Kills of any process at any time: a resumed run ends with the weights of an undisturbed one. See
exact_world.
"""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atroposlib.envs.runner.exact_resume import ResumeWindow
from atroposlib.service.group_reader import read_groups
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import Group, ValidatedGroup
from atroposlib.service.run_state import Streams
from tests.atroposlib.service.exact_world import STREAM, World
from tests.atroposlib.service.trainers import registered

STEPS = 5


def uninterrupted(seed: int = 0) -> tuple[str, list[str]]:
    rng = random.Random(seed)
    with closing(World(STEPS, 1)) as world:
        return world.finish(lambda: rng.randrange(10_000))


EXPECTED = uninterrupted()


def test_whoever_is_ready_first_a_run_repeats() -> None:
    assert len(EXPECTED[1]) == 3 * STEPS
    for seed in range(1, 6):
        assert uninterrupted(seed) == EXPECTED


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10_000),
    interval=st.sampled_from([1, 1, 2, 3]),
    lasting=st.booleans(),
    deaths=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 100)), max_size=6),
)
def test_a_run_that_is_killed_and_resumed_is_the_run_that_nobody_killed(
    seed: int, interval: int, lasting: bool, deaths: list[tuple[int, int]]
) -> None:
    rng = random.Random(seed)
    with closing(World(STEPS, interval, lasting)) as world:
        for pause, which in deaths:
            for _ in range(pause):
                world.happen(rng.randrange(10_000))
            world.die(which)
        assert world.finish(lambda: rng.randrange(10_000)) == EXPECTED


def group(seq: int) -> Group:
    return Group(seq, 0, 4, 9, 1, ((0, 0),))


def test_an_item_is_answered_once_and_never_behind_its_batch() -> None:
    streams = Streams()
    streams.open(STREAM, {STREAM: 4})
    draft = ValidatedGroup(b"{}", 4, 9, stream=STREAM, item=5, life=streams.life)
    assert streams.refusal(draft) is None
    streams.add(draft, 7)
    again = streams.refusal(draft)
    assert again is not None
    assert again.status == "received", "a post that came twice"
    streams.hand_out([group(7)])
    assert streams.after([group(7)]) == {STREAM: 6}
    late = streams.refusal(ValidatedGroup(b"{}", 4, 9, stream=STREAM, item=4, life=streams.life))
    assert late is not None
    assert "begins at 6" in str(late.reason)
    earlier = streams.refusal(
        ValidatedGroup(b"{}", 4, 9, stream=STREAM, item=6, life="of another trainer")
    )
    assert earlier is not None
    assert "set back to item" in str(earlier.reason)
    unknown = streams.refusal(ValidatedGroup(b"{}", 4, 9, stream="other", item=0))
    assert unknown is not None
    assert unknown.status == "dropped"
    assert streams.refusal(ValidatedGroup(b"{}", 4, 9)) is None


def test_what_is_lost_before_it_was_in_a_batch_is_done_again() -> None:
    streams, window = Streams(), ResumeWindow()
    streams.open(STREAM, None)
    assert window.update((streams.status(STREAM) or {}) | {"version": 0})
    window.begin(0)
    streams.add(ValidatedGroup(b"{}", 4, 9, stream=STREAM, item=0), 0)
    window.finish(0, done=True)
    assert window.next_number() == 1
    streams.forget([group(0)])
    assert window.update((streams.status(STREAM) or {}) | {"version": 0}), "something was lost"
    assert window.next_number() == 0
    assert Streams(streams.stored()).status(STREAM) == streams.status(STREAM)


def test_what_cannot_be_resumed_exactly_is_told_to_the_environment() -> None:
    def began(**fields: Any) -> tuple[RolloutQueue, int]:
        queue = RolloutQueue()
        queue.register(registered(1, "g", "p", 8, 128, "c", 5, 0, 100, max_staleness=0, **fields))
        queue.next_batch(0.0)
        return queue, come(queue, STREAM, 0.0)

    def come(queue: RolloutQueue, stream: str | None, now: float) -> int:
        environment = queue.register_env("task", 1.0, 4, 128, None, now, stream)
        assert environment is not None
        return environment.env_id

    queue, first = began()
    earlier = come(queue, None, 0.0)
    second = come(queue, STREAM, 1.0)
    assert "inexact" not in queue.status_env(second, 2.0)["stream"], (
        "its former life has left, and the other was not heard of since"
    )
    queue.status_env(earlier, 3.0)
    assert "task_1 fills batches too" in queue.status_env(second, 4.0)["stream"]["inexact"]
    queue.disconnect_env(earlier)
    assert "inexact" not in queue.status_env(second, 5.0)["stream"]
    assert "stream" not in queue.status_env(come(queue, None, 5.0), 6.0)
    assert first != second
    queue, first = began(replay={"policy": "uniform", "max_reuse": 1, "seed": 5})
    assert "start it without --replay" in queue.status_env(first, 1.0)["stream"]["inexact"]


def test_a_group_says_its_item_and_a_field_of_a_clients_own_says_nothing() -> None:
    def item_of(fields: str) -> tuple[str | None, int | None]:
        (draft,) = read_groups(
            b'{"tokens":[[1,2]],"masks":[[-100,2]],"scores":[1]%s}' % fields.encode(), many=False
        )
        return draft.stream, draft.item

    assert item_of(',"stream":"a","stream_item":3,"stream_life":"1.0"') == ("a", 3)
    for own in (
        ',"stream":true',
        ',"stream":"a"',
        ',"stream":"a","stream_item":-1,"stream_life":"1.0"',
        ',"stream":"a","stream_item":3',
        "",
    ):
        assert item_of(own) == (None, None)


def test_what_gives_no_group_with_other_weights_than_the_trainers_is_done_again() -> None:
    window = ResumeWindow()
    window.update({"life": "a", "begin": 3, "settled": [], "version": 2})
    for number, versions in ((3, [2, 2]), (4, [2, 0]), (5, [])):
        window.begin(number)
        window.mark_without_group(number, versions)
        window.finish(number, done=True)
    assert window.next_number() == 4
    window.begin(4)
    assert window.next_number() == 6, "where nothing is known of the weights it is settled"
