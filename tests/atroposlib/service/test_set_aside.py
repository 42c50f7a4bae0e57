"""Batches that end trainers: how often, and which are set aside."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import UnknownBatchError, ValidatedGroup
from atroposlib.service.run_state import ERROR_COUNTS, KILL_COUNTS, LIMIT, MAX_SET_ASIDE
from atroposlib.service.sqlite_store import SqliteStore

from .test_queue import draft, registration, take


def trainer(queue: RolloutQueue, uuid: int, **fields: Any) -> list[int] | None:
    """Register a trainer and let it fetch a batch; returns the numbers of its groups."""
    queue.register(registration(4, uuid=uuid, ack_batches=True, **fields))
    return take(queue)


def holding(*seqs: int) -> RolloutQueue:
    """A queue of groups, each a batch of its own."""
    queue = RolloutQueue()
    for _ in seqs:
        queue.add(draft(), 0.0)
    return queue


def test_a_batch_that_two_trainers_failed_on_is_set_aside_and_the_third_goes_on() -> None:
    queue = holding(0, 1)
    assert trainer(queue, 1) == [0]
    queue.report_end(1, "NonFiniteError: the gradient is NaN")
    assert trainer(queue, 2) == [0], "once may be the trainer's fault"
    queue.report_end(1, "NonFiniteError: the gradient is NaN")
    (line,) = queue.take_set_aside()
    assert line == (
        "batch 1 is set aside, because trainers ended while they trained on it; the last time: NonFiniteError: the gradient "
        "is NaN. Its groups 0 of clients that did not register are handed out no more; "
        "GET /batch/set-aside?batch_id=1 returns them"
    )
    assert queue.take_set_aside() == []
    assert trainer(queue, 3) == [1]
    assert (
        queue.held_groups,
        queue.failures.total,
        [one["batch_id"] for one in queue.set_aside()],
    ) == (1, 1, [1])
    assert queue.trainer_version() == 1


def test_kills_by_hand_lose_no_batch_until_there_are_many() -> None:
    queue = holding(0, 1)
    for uuid in range(LIMIT):
        assert trainer(queue, uuid) == [0], uuid
    assert trainer(queue, LIMIT) == [1]


def test_an_end_for_another_reason_is_never_the_batchs_fault() -> None:
    queue = holding(0)
    for uuid in range(3 * LIMIT):
        assert trainer(queue, uuid) == [0]
        queue.report_end(1, None)
        queue.report_end(1, "a second report counts no more")


def test_only_the_batch_in_training_counts_and_learning_from_it_clears_the_count() -> None:
    queue = holding(0, 1)
    assert trainer(queue, 1) == [0]
    lease = queue.next_batch(0.0, received=1)
    assert lease is not None
    queue.sending(lease)
    queue.sent(lease, complete=True)
    assert trainer(queue, 2) == [0]
    assert queue.failures.counts == {0: KILL_COUNTS}, "1 was fetched ahead"
    queue.ack(1)
    assert queue.failures.counts == {}
    assert take(queue) == [1]
    with pytest.raises(
        UnknownBatchError, match=r"^batch 7 was never handed out \(the last one was 2\)"
    ):
        queue.report_end(7, "no such batch")
    assert trainer(queue, 3, model="m", run="a") == [1]
    trainer(queue, 4, model="m", run="another")
    assert queue.failures.counts == {}


def test_an_answer_that_did_not_arrive_counts_for_nothing() -> None:
    queue = holding(0)
    for uuid in range(2 * LIMIT):
        queue.register(registration(4, uuid=uuid, ack_batches=True))
        lease = queue.next_batch(0.0)
        assert lease is not None
        queue.sending(lease)
        queue.sent(lease, complete=False)


def test_the_oldest_are_forgotten_beyond_a_bound() -> None:
    queue = holding(*range(MAX_SET_ASIDE + 2))
    for uuid in range(2 * MAX_SET_ASIDE + 4):
        assert trainer(queue, uuid) == [uuid // 2]
        queue.report_end(1 + uuid // 2, "error")
    assert [one["batch_id"] for one in queue.set_aside()] == list(range(3, MAX_SET_ASIDE + 3))
    assert queue.failures.total == MAX_SET_ASIDE + 2
    removed = queue.take_changes()
    gone = [key for key, record in removed.records.items() if record is None]
    assert sorted(gone) == [("group", 0), ("group", 1), ("lease", 1), ("lease", 2)]


def test_the_items_of_a_batch_that_is_set_aside_are_not_done_again() -> None:
    """Under the same weights and seeds they would give the same groups."""
    queue = RolloutQueue()
    queue.register(registration(4, ack_batches=True, positions={}))
    queue.next_batch(0.0)
    environment = queue.register_env("task", 1.0, 4, 64, None, 0.0, stream="s")
    assert environment is not None

    def answered(item: int) -> None:
        queue.add(
            ValidatedGroup(
                b"{}", 4, 10, environment.env_id, stream="s", item=item, life=queue.streams.life
            ),
            0.0,
        )

    answered(0)
    assert take(queue) == [0]
    queue.report_end(1, "error")
    assert trainer(queue, 2, positions={}) == [0]
    queue.report_end(1, "error")
    assert trainer(queue, 3, positions={}) is None
    assert queue.status_env(environment.env_id, 0.0)["stream"]["settled"] == [0]
    answered(1)
    assert take(queue) == [1]


class FailingBatches(RuleBasedStateMachine):
    """Trainers that end in each way, on good and bad batches, beside a service that is killed."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store = SqliteStore(self.folder / "store.db")
        self.queue = RolloutQueue()
        self.nature: dict[int, str] = {}
        self.counts: Counter[int] = Counter()
        self.aside: set[int] = set()
        self.learned: set[int] = set()
        self.hand: tuple[int, list[int]] | None = None
        """The batch that the trainer trains on, by its number, and its groups."""
        self.size = 4
        self.uuid = 0
        self.step = 0

    def commit(self) -> None:
        self.store.commit([self.queue.take_changes()])

    @rule(nature=st.sampled_from(["good", "good", "error", "memory"]))
    def a_group_arrives(self, nature: str) -> None:
        self.nature[self.queue.next_seq] = nature
        self.queue.add(draft(), 0.0)
        self.commit()

    @rule(size=st.sampled_from([4, 4, 4, 8]))
    def a_trainer_starts(self, size: int) -> None:
        if self.hand is not None:
            self.count(self.hand[1], KILL_COUNTS)
            self.hand = None
        self.uuid, self.size = self.uuid + 1, size
        made = registration(size, uuid=self.uuid, ack_batches=True, starting_step=self.step)
        self.queue.register(made)
        self.commit()

    @precondition(lambda self: self.uuid and self.hand is None)
    @rule()
    def it_fetches(self) -> None:
        lease = self.queue.next_batch(0.0)
        if lease is None:
            assert len(self.nature.keys() - self.aside - self.learned) < self.size // 4, (
                "nothing is lost"
            )
            self.commit()
            return
        self.queue.sending(lease)
        self.queue.sent(lease, complete=True)
        self.commit()
        seqs = [group.seq for group in lease.groups]
        assert not self.aside & set(seqs), "never again"
        assert not self.learned & set(seqs)
        self.hand = lease.batch_id, seqs

    @precondition(lambda self: self.hand is not None)
    @rule(end=st.sampled_from(["learns", "learns", "kill", "signal"]))
    def it_trains(self, end: str) -> None:
        assert self.hand is not None
        (batch_id, seqs), self.hand = self.hand, None
        natures = {self.nature[seq] for seq in seqs}
        if "error" in natures:
            self.queue.report_end(batch_id, "error")
            self.count(seqs, ERROR_COUNTS)
        elif "memory" in natures or end == "kill":
            self.hand = batch_id, seqs
        elif end == "signal":
            self.queue.report_end(batch_id, None)
        else:
            self.queue.ack(batch_id)
            self.learned |= set(seqs)
            self.step += 1
            for seq in seqs:
                del self.counts[seq]
        self.commit()
        if end != "learns" or natures != {"good"}:
            self.a_trainer_starts(self.size)

    def count(self, seqs: list[int], weight: int) -> None:
        self.counts.update(dict.fromkeys(seqs, weight))
        if max(self.counts[seq] for seq in seqs) >= LIMIT:
            self.aside |= set(seqs)

    @rule()
    def the_service_is_killed(self) -> None:
        self.store.close()
        self.store = SqliteStore(self.folder / "store.db")
        self.queue = RolloutQueue(snapshot=self.store.load())

    @invariant()
    def counts_and_batches_are_those_of_the_model(self) -> None:
        if not hasattr(self, "queue"):
            return
        failures = self.queue.failures
        assert failures.counts == {
            seq: n for seq, n in self.counts.items() if seq not in self.aside
        }
        kept = {group.seq for group in failures.groups()}
        assert kept <= self.aside
        assert len(failures.batches) == min(failures.total, MAX_SET_ASIDE)
        assert {
            group.seq for group in self.queue._held()
        } == self.nature.keys() - self.aside - self.learned
        assert self.queue.held_groups == len(self.nature) - len(self.aside) - len(self.learned)
        assert self.queue.held_bytes == 2 * self.queue.held_groups
        assert len(self.store.bodies(sorted(kept))) == len(kept), "kept for inspection"
        assert json.loads(json.dumps(self.queue.set_aside()))[:1] == self.queue.set_aside()[:1]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


TestFailingBatches = FailingBatches.TestCase
TestFailingBatches.settings = settings(
    max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
