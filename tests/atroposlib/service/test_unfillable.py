"""Groups that no batch can hold: found as a search over all choices finds them, named, and dropped
before they starve a run.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atroposlib.service.pending_groups import MAX_SIZES, REASON, fillable_sizes
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import NOBODY, BatchTooSmallError, Limits, QueueFullError
from atroposlib.service.store import Snapshot
from tests.atroposlib.service.test_queue import draft, env, registration, started, take
from tests.atroposlib.service.trainers import stored

SIZES = st.integers(1, 9)


def by_search(waiting: Counter[int], supply: set[int], targets: set[int]) -> set[int]:
    """The same, from every choice of counts."""
    most = max(targets, default=0)
    sizes = sorted(set(waiting) | supply)
    counts = [
        range((most // size if size in supply else min(waiting[size], most // size)) + 1)
        for size in sizes
    ]
    found: set[int] = set()
    for choice in product(*counts):
        if sum(count * size for count, size in zip(choice, sizes, strict=True)) in targets:
            found |= {size for count, size in zip(choice, sizes, strict=True) if count}
    return found


@given(
    st.lists(SIZES, max_size=5),
    st.sets(SIZES, max_size=2),
    st.sets(st.integers(1, 14), min_size=1, max_size=3),
)
def test_the_sizes_that_can_fill_are_found(
    sizes: list[int], supply: set[int], targets: set[int]
) -> None:
    waiting = Counter(sizes)
    assert fillable_sizes(waiting, supply, targets) == by_search(waiting, supply, targets)


def test_many_sizes_are_not_looked_at() -> None:
    many = dict.fromkeys(range(2, 2 * MAX_SIZES + 4, 2), 1)
    assert fillable_sizes(many, set(), [101]) == set(many), (
        "none of them adds up to an odd number, but none is dropped"
    )


@given(st.lists(st.tuples(SIZES, st.integers(0, 2)), max_size=25), st.data())
def test_nothing_that_could_be_used_is_dropped(
    posts: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Every group that the bound drops is in no batch of the same posts without a bound, if no size
    is new.
    """
    bounded, free = (started(8, Limits(max_groups=6) if bound else None) for bound in (True, False))
    for queue in (bounded, free):
        env(queue, 3)
        env(queue, 4)
        for size, line in posts:
            queue.posted_sizes.add([0, 1, NOBODY][line], size)
    dropped: set[int] = set()
    used: set[int] = set()
    twins: dict[int, int] = {}
    for size, line in posts:
        one = draft(size, [0, 1, None][line])
        try:
            bounded.check([one])
            free.check([one])
        except (QueueFullError, BatchTooSmallError):
            continue
        before = held(bounded)
        twins[bounded.next_seq] = free.next_seq
        bounded.add(one, 0.0)
        free.add(one, 0.0)
        dropped |= (before | {bounded.next_seq - 1}) - held(bounded)
        if data.draw(st.booleans()):
            used |= set(take(free) or [])
            take(bounded)
    assert bounded.drops.total() == len(dropped)
    assert not {twins[seq] for seq in dropped} & used


def held(queue: RolloutQueue) -> set[int]:
    return {group.seq for group in queue._held()}


def waiting_line(queue: RolloutQueue, now: float = 0.0) -> str:
    assert queue.next_batch(now) is None
    return queue.waiting or ""


def test_a_group_size_that_never_fits_is_named_and_gives_way() -> None:
    queue = started(8, Limits(max_groups=20))
    threes = env(queue, 3)
    for _ in range(20):
        post(queue, draft(3, threes))
    assert (
        "20 groups of task_0 (group_size 3) can be part of no batch of 8 (20 of 3 sequences)"
        in waiting_line(queue)
    )
    assert len(queue.news) == 1
    assert queue.drops.total() == 0, "nothing is dropped while there is space"
    fours = env(queue, 4)
    for _ in range(2):
        post(queue, draft(4, fours))
    assert take(queue) == [20, 21], "the useful environment is not kept out"
    assert {reason for reason, _ in queue.drops} == {REASON}
    assert queue.drops.total() == 2


def test_an_environment_whose_size_completes_batches_saves_the_others() -> None:
    queue = started(8, Limits(max_groups=4))
    for _ in range(4):
        post(queue, draft(3))
    assert "can be part of no batch" in waiting_line(queue)
    twos = env(queue, 2)
    assert "can be part of no batch" not in waiting_line(queue), "3 + 3 + 2"
    post(queue, draft(2, twos))
    assert take(queue) == [0, 1, 4]
    assert not queue.drops


def test_groups_of_other_sizes_do_not_stop_the_sampling_of_their_environment() -> None:
    queue = started(8, max_staleness=1)
    fours = env(queue, 4)
    wanted = queue.groups_wanted(fours, 0.0)
    for _ in range(8):
        post(queue, draft(3, fours, version=0))
    assert queue.groups_wanted(fours, 0.0) == wanted, "they will never be trained on"
    post(queue, draft(1, fours, version=0))
    assert queue.groups_wanted(fours, 0.0) < wanted, "with a group of 1, groups of 3 add up to 4"


def test_a_reserved_share_is_not_waited_for_if_only_unfillable_groups_come() -> None:
    queue = started(8)
    reserving, other = env(queue, 4, allocation=0.5), env(queue, 4)
    for _ in range(3):
        post(queue, draft(3, reserving))
        post(queue, draft(4, other))
    assert take(queue) == [1, 3]
    post(queue, draft(4, reserving))
    post(queue, draft(4, other))
    assert take(queue) is not None


def test_a_restart_remembers_which_sizes_may_still_come() -> None:
    queue = started(8)
    fours = env(queue, 4)
    before = queue.take_changes()
    for size in (3, 1, 3):
        post(queue, draft(size, fours))
    snapshot = stored(before, queue.take_changes())
    groups = snapshot.records["group"]
    snapshot.records["group"] = {queue.buffers[fours][0].seq: groups[2]}
    again = RolloutQueue(None, snapshot)
    assert [group.size for group in again.buffers[fours]] == [3]
    assert not again.unfillable().lines(), "a group of 1 may come again"
    state = snapshot.of("state")[0]
    forgetful = RolloutQueue(
        None, Snapshot(snapshot.records | {"state": {0: state | {"sizes_posted": []}}})
    )
    assert forgetful.unfillable().lines() == [fours]


def test_a_trainer_with_another_batch_size_uses_what_was_unfillable() -> None:
    queue = started(8)
    for _ in range(3):
        post(queue, draft(3))
    assert "can be part of no batch" in waiting_line(queue)
    queue.register(registration(9, uuid=2))
    assert take(queue) == [0, 1, 2]


def post(queue: RolloutQueue, one: Any) -> None:
    queue.check([one])
    queue.add(one, 0.0)
