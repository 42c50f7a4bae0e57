"""The rules of the queue, without any I/O."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import (
    BatchTooSmallError,
    Lease,
    Limits,
    NotRegisteredError,
    QueueFullError,
    SupersededError,
    UnknownBatchError,
    UnknownEnvironmentError,
    ValidatedGroup,
)
from atroposlib.service.run_state import MAX_WARNINGS
from atroposlib.service.schemas import Registration
from tests.atroposlib.service.trainers import registered


def registration(batch_size: int = 8, uuid: int = 1, **fields: Any) -> Registration:
    return registered(
        uuid, "g", "p", batch_size, 128, "c", 5, fields.pop("starting_step", 0), 100, **fields
    )


def draft(
    size: int = 4, env_id: int | None = None, version: int | None = None, **fields: Any
) -> ValidatedGroup:
    weights = () if version is None else ((None, version),)
    return ValidatedGroup(b"{}", size, fields.pop("longest", 10), env_id, weights, **fields)


def started(batch_size: int = 8, limits: Limits | None = None, **fields: Any) -> RolloutQueue:
    queue = RolloutQueue(limits)
    queue.register(registration(batch_size, **fields))
    assert queue.next_batch(0.0) is None
    return queue


def env(
    queue: RolloutQueue, group_size: int = 4, weight: float = 1.0, allocation: float | None = None
) -> int:
    environment = queue.register_env("task", weight, group_size, 128, allocation, 0.0)
    assert environment is not None
    return environment.env_id


def take(queue: RolloutQueue, now: float = 0.0) -> list[int] | None:
    """Hand out a batch whose answer arrives; the sequence numbers of its groups."""
    lease = queue.next_batch(now)
    if lease is None:
        return None
    queue.sending(lease)
    queue.sent(lease, complete=True)
    return [group.seq for group in lease.groups]


def lines_of(queue: RolloutQueue, lease: Lease | None) -> list[int]:
    assert lease is not None
    return [group.line for group in lease.groups]


@given(st.lists(st.integers(1, 8), max_size=30))
def test_batches_are_exact_whole_and_oldest_first(sizes: list[int]) -> None:
    queue = started(8)
    for size in sizes:
        queue.add(draft(size), 0.0)
    seen: list[int] = []
    while (batch := take(queue)) is not None:
        assert sum(sizes[seq] for seq in batch) == 8
        assert batch == sorted(batch)
        seen += batch
    assert len(seen) == len(set(seen)), "nothing twice"
    assert sorted(seen + [group.seq for group in queue.lines]) == list(range(len(sizes))), (
        "nothing lost"
    )


@given(st.integers(1, 40))
def test_groups_of_one_size_leave_in_the_order_in_which_they_came(count: int) -> None:
    queue = started(8)
    for _ in range(count):
        queue.add(draft(4), 0.0)
    order = [seq for batch in iter(lambda: take(queue), None) for seq in batch]
    assert order == list(range(count // 2 * 2))


def test_an_odd_group_is_not_starved_by_even_ones() -> None:
    queue = started(8)
    for size in (3, 4, 4, 4, 4, 5):
        queue.add(draft(size), 0.0)
    assert take(queue) == [0, 5], "the oldest goes as soon as anything completes it"


def test_a_group_larger_than_a_batch_is_refused_and_blocks_nothing() -> None:
    queue = started(8)
    with pytest.raises(BatchTooSmallError, match=r"9 sequences.*batch_size is 8"):
        queue.check([draft(4), draft(9)])
    queue.check([draft(8)])
    queue.add(draft(8), 0.0)
    assert take(queue) == [0]


def test_data_before_the_trainer_waits_for_it_and_what_cannot_fit_is_dropped() -> None:
    queue = RolloutQueue()
    queue.add(draft(99, longest=100), 0.0)
    queue.add(draft(8), 0.0)
    with pytest.raises(NotRegisteredError):
        queue.next_batch(0.0)
    queue.register(registration(8))
    assert take(queue) == [1]
    assert queue.drops == {("larger_than_batch", 128): 1}


def test_a_second_registration_takes_effect_and_inherits_the_data() -> None:
    queue = started(8)
    queue.add(draft(4), 0.0)
    queue.register(registration(4, uuid=2, starting_step=7))
    assert queue.current_step == 7
    assert take(queue) == [0]
    with pytest.raises(SupersededError, match="yours is 1"):
        queue.next_batch(0.0, uuid=1)


# ---- leases ----


def test_a_trainer_that_never_acks_is_done_with_what_arrived() -> None:
    queue = started(4)
    queue.add(draft(4), 0.0)
    queue.add(draft(4), 0.0)
    assert take(queue) == [0]
    assert take(queue) == [1]
    assert take(queue) is None
    assert queue.held_groups == 0


def test_a_batch_whose_answer_broke_off_is_sent_again_to_a_trainer_that_never_acks() -> None:
    queue = started(4)
    queue.add(draft(4), 0.0)
    lease = queue.next_batch(0.0)
    assert lease is not None
    queue.sending(lease)
    assert queue.next_batch(0.0) is None, "while it is being sent it is nobody else's"
    queue.sent(lease, complete=False)
    assert take(queue) == [0]
    assert take(queue) is None


def test_an_acking_trainer_gets_the_same_batch_until_it_acks() -> None:
    queue = started(4, ack_batches=True)
    queue.add(draft(4), 0.0)
    queue.add(draft(4), 0.0)
    first, again = queue.next_batch(0.0), queue.next_batch(0.0)
    assert first is again is not None
    assert queue.current_step == 1
    second = queue.next_batch(0.0, received=first.batch_id)
    assert second is not None
    assert second.batch_id == first.batch_id + 1, "a trainer that fetches ahead says what it has"
    assert queue.ack(first.batch_id, version=1) == 1
    assert queue.ack(first.batch_id, version=1) == 0, "acknowledging twice does nothing more"
    assert queue.ack(None) == 1
    assert queue.held_groups == 0
    with pytest.raises(UnknownBatchError, match="never handed out"):
        queue.ack(99)


@pytest.mark.parametrize("acks", [True, False])
def test_a_trainer_that_dies_and_registers_again_gets_its_batch_again(acks: bool) -> None:
    queue = started(4, ack_batches=acks)
    for _ in range(2):
        queue.add(draft(4), 0.0)
    assert take(queue) == [0]
    queue.register(registration(4, uuid=2, ack_batches=acks))
    assert take(queue) == [0]
    if acks:
        queue.ack(None)
    assert take(queue) == [1]


def test_a_new_batch_size_dissolves_the_batches_that_were_out() -> None:
    queue = started(8)
    for _ in range(3):
        queue.add(draft(4), 0.0)
    assert take(queue) == [0, 1]
    queue.register(registration(4, uuid=2))
    assert [take(queue) for _ in range(4)] == [[0], [1], [2], None]


# ---- staleness ----


def test_nothing_older_than_max_staleness_is_handed_out_and_drops_are_counted_by_length() -> None:
    queue = started(4, max_staleness=1, starting_step=5)
    queue.add(draft(4, version=4, longest=33), 0.0)
    queue.add(draft(4, version=4, longest=65), 0.0)
    queue.add(draft(4, version=5), 0.0)
    assert queue.add(draft(4, version=3, longest=5), 0.0).status == "dropped"
    assert take(queue) == [0]
    queue.ack(None, version=6)
    assert take(queue) == [2]
    assert queue.drops == {("stale", 8): 1, ("stale", 128): 1}
    assert queue.held_groups == 1


def test_a_group_without_versions_ages_from_its_arrival() -> None:
    queue = started(4, max_staleness=0)
    queue.add(draft(4), 0.0)
    queue.add(draft(4), 0.0)
    assert take(queue) == [0]
    queue.ack(None, version=1)
    assert take(queue) is None
    assert queue.drops == {("stale", 16): 1}


def test_a_returned_batch_that_became_too_old_is_not_handed_out() -> None:
    queue = started(8, max_staleness=1)
    queue.add(draft(4, version=0), 0.0)
    queue.add(draft(4, version=3), 0.0)
    assert take(queue) == [0, 1]
    queue.register(registration(8, uuid=2, max_staleness=1, starting_step=3))
    assert take(queue) is None
    queue.add(draft(4, version=3), 0.0)
    assert take(queue) == [1, 2], "what is still young enough goes on"


@settings(deadline=None)
@given(
    st.integers(0, 4),
    st.lists(st.sampled_from([0.2, 0.5, 1.0, 2.0, 3.0, 5.0]), min_size=1, max_size=4),
    st.integers(1, 8),
)
@example(
    3, [3.0, 1.0, 1.0], 2
)  # whole groups can put an environment above its share by more than one of them
@example(1, [2.0, 5.0, 1.0, 1.0], 8)
def test_environments_that_post_what_is_wanted_have_nothing_dropped(
    staleness: int, weights: list[float], groups_per_batch: int
) -> None:
    queue = started(4 * groups_per_batch, max_staleness=staleness, ack_batches=True)
    envs = [env(queue, weight=weight) for weight in weights]
    for version in range(1, 12):
        for env_id in envs:
            for _ in range(queue.groups_wanted(env_id, 0.0)):
                queue.add(draft(4, env_id, version=queue.sampling_version()), 0.0)
        lease = queue.next_batch(0.0)
        assert lease is not None, "what is wanted is enough for a batch"
        assert all(group.version >= version - 1 - staleness for group in lease.groups)
        queue.ack(lease.batch_id, version)
    assert not queue.drops


# ---- shares ----


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=4))
def test_weights_are_honoured_within_a_group_per_environment(weights: list[float]) -> None:
    queue = started(16)
    envs = [env(queue, weight=weight) for weight in weights]
    served: Counter[int] = Counter()
    for _ in range(40):
        for env_id in envs:
            while queue.lines.sequences[env_id] < 32:
                queue.add(draft(4, env_id), 0.0)
        lease = queue.next_batch(0.0)
        for line in lines_of(queue, lease):
            served[line] += 4
        assert lease is not None
        queue.ack(lease.batch_id)
        for i, one in enumerate(envs):
            for j, other in enumerate(envs):
                gap = abs(served[one] / weights[i] - served[other] / weights[j])
                assert gap <= 4 / weights[i] + 4 / weights[j] + 1e-9


def test_min_batch_allocation_is_met_over_time_although_groups_are_whole() -> None:
    queue = started(8)
    fast, slow = env(queue, group_size=2), env(queue, group_size=4, allocation=0.3)
    served: Counter[int] = Counter()
    for batches in range(1, 21):
        while queue.lines.sequences[fast] < 40:
            queue.add(draft(2, fast), 0.0)
        while queue.lines.sequences[slow] < 8:
            queue.add(draft(4, slow), 0.0)
        lease = queue.next_batch(0.0)
        assert lease is not None
        for group in lease.groups:
            served[group.line] += group.size
        queue.ack(lease.batch_id)
        assert served[slow] >= 0.3 * 8 * batches - 4


def test_a_reserved_share_waits_for_a_living_environment_but_not_for_a_dead_one() -> None:
    queue = started(8, limits=Limits(silent_after=60))
    fast, reserved = env(queue), env(queue, allocation=0.5)
    for _ in range(4):
        queue.add(draft(4, fast), 1.0)
    assert queue.next_batch(10.0) is None
    assert "reserved for environment 1" in (queue.waiting or "")
    assert take(queue, now=100.0) == [0, 1], "silent for longer than the wait"
    queue.status_env(reserved, 101.0)
    assert queue.next_batch(102.0) is None
    queue.disconnect_env(reserved)
    assert take(queue, now=103.0) == [2, 3]


# ---- buffers, bounds, keys, environments ----


def test_mis_sized_groups_are_buffered_and_recombined() -> None:
    queue = started(8)
    one = env(queue, group_size=4)
    answers = [queue.add(draft(size, one), 0.0) for size in (3, 2, 1, 2)]
    assert [answer.buffer_size for answer in answers] == [3, 5, 2, 0]
    assert queue.lines.groups == 4
    assert take(queue) == [0, 1, 2, 3]


def test_sizes_that_only_add_up_to_a_multiple_are_not_left_in_the_buffer() -> None:
    queue = started(12)
    one = env(queue, group_size=4)
    for _ in range(4):
        queue.add(draft(3, one), 0.0)
    assert take(queue) == [0, 1, 2, 3]


def test_a_leaving_environment_leaves_its_buffer_to_the_queue() -> None:
    queue = started(4)
    one = env(queue)
    queue.add(draft(2, one), 0.0)
    queue.add(draft(2), 0.0)
    assert take(queue) is None
    queue.disconnect_env(one)
    assert take(queue) == [0, 1]


def test_the_queue_is_bounded_but_never_starves_the_trainer() -> None:
    queue = started(8, limits=Limits(max_groups=1))
    for _ in range(4):
        queue.check([draft(4)])
        queue.add(draft(4), 0.0)
    with pytest.raises(QueueFullError, match="4 groups"):
        queue.check([draft(4)])
    assert take(queue) is not None
    assert take(queue) is not None
    queue.check([draft(4)])


def test_the_same_key_is_counted_once_and_answered_alike() -> None:
    queue = started(8, limits=Limits(max_keys=2))
    first = queue.add(draft(key="a"), 0.0)
    assert queue.add(draft(key="a"), 0.0) == first
    assert queue.held_groups == 1
    queue.add(draft(key="b"), 0.0)
    queue.add(draft(key="c"), 0.0)
    assert list(queue.keys) == ["b", "c"]


def test_unknown_environments_are_named() -> None:
    queue = started()
    for call in (lambda: queue.status_env(5, 0.0), lambda: queue.disconnect_env(-1)):
        with pytest.raises(UnknownEnvironmentError, match="not registered here"):
            call()


def test_the_lines_about_posts_are_bounded() -> None:
    queue = started()
    for number in range(2 * MAX_WARNINGS):
        queue.add(draft(env_id=number, unknown=(f"field {number}",)), 0.0)
    assert len(queue.news) == MAX_WARNINGS


def test_environments_wait_for_the_trainers_first_batch() -> None:
    queue = RolloutQueue()
    queue.register(registration())
    assert queue.register_env("task", 1.0, 4, 128, None, 0.0) is None
    queue.next_batch(0.0)
    names = [queue.register_env(name, 1.0, 4, 128, None, 0.0) for name in ("task", "task", "other")]
    assert [environment and environment.wandb_name for environment in names] == [
        "task_0",
        "task_1",
        "other_0",
    ]


def test_reset_forgets_everything() -> None:
    queue = started()
    env(queue)
    queue.add(draft(), 0.0)
    queue.take_changes()
    queue.reset()
    assert queue.take_changes().wipe
    assert (queue.held_groups, queue.registration, queue.current_step) == (0, None, 0)
    with pytest.raises(NotRegisteredError):
        queue.next_batch(0.0)


def test_the_index_of_a_group_that_is_too_large_counts_those_that_were_posted_before() -> None:
    queue = started(8)
    queue.add(draft(key="k"), 0.0)
    with pytest.raises(BatchTooSmallError) as caught:
        queue.check([draft(key="k"), draft(), draft(9)])
    assert caught.value.index == 2
