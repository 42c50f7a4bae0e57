"""Batches that end otherwise than by being learned from, and the end of a run."""

from __future__ import annotations

import pytest

from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import NotRegisteredError, SupersededError

from .test_queue import draft, registration, started, take


def test_a_skipped_batch_is_gone_and_counted_but_is_no_step() -> None:
    queue = started(4, ack_batches=True)
    for _ in range(3):
        queue.add(draft(), 0.0)
    assert take(queue) == [0]
    for _ in range(2):
        queue.ack(1, skipped="out of memory")
    assert (queue.batches_skipped, queue.sampling_version(), queue.held_groups) == (1, 0, 2)
    assert take(queue) == [1]
    queue.ack(2)
    assert take(queue) == [2]
    queue.ack(3, version=1, skipped="")
    assert (queue.batches_skipped, queue.sampling_version()) == (2, 1)


def test_a_run_ends_when_its_trainer_says_so_and_no_other() -> None:
    queue = RolloutQueue()
    with pytest.raises(NotRegisteredError):
        queue.end(1)
    queue.register(registration(uuid=7))
    with pytest.raises(SupersededError):
        queue.end(1)
    assert not queue.ended
    queue.end(7)
    assert queue.ended
    queue.register(registration(uuid=8))
    assert not queue.ended, "a trainer that registers goes on"


def test_damaged_groups_are_dropped_and_the_others_keep_their_place() -> None:
    queue = started(8)
    for _ in range(5):
        queue.add(draft(), 0.0)
    lease = queue.next_batch(0.0)
    assert lease is not None
    queue.sending(lease)
    assert queue.drop_damaged(lease, {1}) == 1
    assert queue.drop_damaged(lease, {0}) == 0, "the batch is there no longer"
    queue.sent(lease, complete=False)
    assert (queue.drops, queue.current_step) == ({("damaged", 16): 1}, 0)
    assert take(queue) == [0, 2]
    assert (take(queue), queue.current_step, queue.held_groups) == ([3, 4], 2, 2)
