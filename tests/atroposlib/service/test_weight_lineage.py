"""The age of weights when versions go back, against a tree of weights in which each life is a
branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import Group, ValidatedGroup
from atroposlib.wire import (
    MAX_SESSIONS,
    TrainerSession,
    begin_session,
    effective_version,
    oldest,
)
from tests.atroposlib.service.trainers import stored

from .test_queue import registration


def test_the_example_of_the_documentation() -> None:
    lives = [TrainerSession(1, 0), TrainerSession(2, 10)]
    assert effective_version(1, 5, lives) == 5
    assert effective_version(1, 10, lives) == 10, "the checkpoint that life 2 began with"
    assert effective_version(1, 14, lives) == effective_version(1, 17, lives) == 9
    assert effective_version(2, 12, lives) == 12
    assert effective_version(0, 0, lives) == 0


def test_a_run_that_begins_at_0_has_nothing_of_what_was_before_it() -> None:
    lives = [TrainerSession(1, 0), TrainerSession(2, 0)]
    assert effective_version(1, 3, lives) == -1
    assert effective_version(1, 0, lives) == 0, "the weights that both began with"


@dataclass
class Branch:
    """One life: the versions it made, and how far its line goes back into the lives before."""

    epoch: int
    start: int
    end: int


@st.composite
def histories(draw: st.DrawFn) -> list[Branch]:
    """Trainers that die and resume from a checkpoint of the line that they are on."""
    branches: list[Branch] = []
    epoch = reached = 0
    for _ in range(draw(st.integers(1, 5))):
        epoch += draw(st.integers(1, 3))
        start = draw(st.integers(0, reached)) if branches else 0
        reached = start + draw(st.integers(0, 6))
        branches.append(Branch(epoch, start, reached))
    return branches


@given(histories(), st.data())
def test_weights_count_as_what_they_are_on_the_line_and_as_too_old_off_it(
    history: list[Branch], data: st.DataObject
) -> None:
    lives: list[TrainerSession] = []
    for branch in history:
        lives = begin_session(lives, branch.epoch, branch.start)
    made = data.draw(st.sampled_from(history))
    version = data.draw(st.integers(made.start, made.end))
    later = history[history.index(made) + 1 :]
    on_the_line = all(version <= branch.start for branch in later)
    counted = effective_version(made.epoch, version, lives)
    assert (counted == version) == on_the_line
    if not on_the_line:
        left_at = next(branch.start for branch in later if version > branch.start)
        assert counted < left_at, (
            "older than all that the line has made since it left these weights"
        )
    if later:
        assert counted <= history[-1].start, "the age of another life's weights is never below 0"
    assert oldest([(made.epoch, version), (history[-1].epoch, history[-1].end)], lives) <= counted


def test_the_same_life_again_is_no_new_one() -> None:
    lives = begin_session(begin_session([], 5, 3), 5, 9)
    assert lives == [TrainerSession(5, 3)]
    assert begin_session(lives, 4, 1) == [TrainerSession(4, 1)], (
        "an older trainer takes over: the newer one is not behind it"
    )
    assert begin_session(lives, 0, 1) == []
    for epoch in range(6, 6 + MAX_SESSIONS):
        lives = begin_session(lives, epoch, 3)
    assert len(lives) == MAX_SESSIONS
    assert lives[0].epoch == 6


# ---- the queue ----


def post(queue: RolloutQueue, *weights: tuple[int | None, int]) -> str:
    receipt = queue.add(ValidatedGroup(b"{}", 4, 10, None, weights), 0.0)
    return receipt.reason.partition(":")[0] if receipt.reason else receipt.status


def resumed(**fields: int) -> RolloutQueue:
    """TrainerSession 100 came to version 17 and died; life 200 began with 10."""
    queue = RolloutQueue()
    queue.register(registration(4, starting_step=0, ack_batches=True, weight_epoch=100, **fields))
    queue.ack(None, 17)
    queue.register(
        registration(4, uuid=2, starting_step=10, ack_batches=True, weight_epoch=200, **fields)
    )
    return queue


def versions(queue: RolloutQueue) -> list[int]:
    return [group.version for group in queue.lines]


def test_a_group_is_as_old_as_the_weights_that_it_began_with() -> None:
    queue = resumed()
    assert post(queue, (100, 17), (200, 10)) == "received"
    assert post(queue, (200, 10)) == "received"
    assert post(queue, (100, 9)) == "received"
    assert versions(queue) == [9, 10, 9]
    queue = resumed(max_staleness=0)
    assert post(queue, (100, 17), (200, 10)) == "stale"
    assert post(queue, (200, 10)) == "received"
    queue.ack(None, 17)
    assert post(queue, (100, 17)) == "stale", "version 17 again, and other weights"
    assert post(queue, (200, 17)) == "received"


def test_a_group_without_an_epoch_is_of_the_present_life() -> None:
    queue = resumed()
    for weights in ([(None, 10)], [(None, 11)], []):
        assert post(queue, *weights) == "received"
    assert versions(queue) == [10, 11, 10]
    assert post(queue, (None, 14)) == "another run", (
        "the present trainer has not come so far, and an earlier one had"
    )
    queue.register(registration(4, uuid=3, starting_step=10, ack_batches=True, weight_epoch=300))
    assert versions(queue) == [10, 9, 10], "and of an earlier one when another begins"


def test_what_waits_is_told_anew_when_a_trainer_resumes_and_dropped_when_a_run_begins() -> None:
    queue = RolloutQueue()
    queue.register(registration(4, ack_batches=True, weight_epoch=100))
    queue.ack(None, 17)
    for version in (3, 10, 12):
        post(queue, (100, version))
    assert (
        queue.register(
            registration(4, uuid=2, starting_step=10, ack_batches=True, weight_epoch=200)
        )
        == 0
    )
    assert versions(queue) == [3, 10, 9]
    assert (
        queue.register(registration(4, uuid=3, starting_step=0, ack_batches=True, weight_epoch=300))
        == 3
    )
    assert queue.drops == {("ahead_of_trainer", 16): 3}
    assert post(queue, (200, 11)) == "another run"
    assert post(queue, (0, 0)) == "received", "the weights that the trainer began with"


def test_another_models_weights_are_another_runs_at_any_version() -> None:
    queue = RolloutQueue()
    queue.register(registration(4, ack_batches=True, weight_epoch=100, model="a"))
    queue.register(registration(4, uuid=2, ack_batches=True, weight_epoch=200, model="b"))
    assert post(queue, (100, 0)) == "another run"
    assert post(queue, (200, 0)) == "received"
    queue.register(registration(4, uuid=3, ack_batches=True, model="c"))
    assert post(queue, (200, 0)) == "another run", "although this trainer names no epoch of its own"
    assert post(queue, (None, 0)) == "received"


def test_a_batch_that_was_out_goes_back_to_a_trainer_that_resumes() -> None:
    queue = RolloutQueue()
    queue.register(registration(4, ack_batches=True, weight_epoch=100, max_staleness=1))
    queue.ack(None, 12)
    post(queue, (100, 12))
    assert queue.next_batch(0.0) is not None
    queue.register(
        registration(
            4, uuid=2, starting_step=10, ack_batches=True, weight_epoch=200, max_staleness=1
        )
    )
    lease = queue.next_batch(0.0)
    assert lease is not None
    assert [group.version for group in lease.groups] == [9]


def test_lives_are_kept() -> None:
    queue = resumed()
    post(queue, (100, 17))
    changes = queue.take_changes()
    assert orjson.loads(changes.records["state", 0])["lives"] == [[100, 0], [200, 10]]
    assert stored(changes).groups() == [Group(0, -1, 4, 10, 2, ((100, 17),), True, 9)]
