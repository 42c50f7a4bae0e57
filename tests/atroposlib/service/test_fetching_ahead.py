"""A trainer that fetches its next batch while it trains: nothing that it trains on is too old, and
no caller waits for ever.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.runner.items import allowed_workers
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import Lease, ValidatedGroup
from tests.atroposlib.service.trainers import registered

BATCH, GROUP = 8, 4


def register(queue: RolloutQueue, step: int, staleness: int | None, uuid: int = 1) -> int:
    """A trainer that names its life registers, and an environment after it.

    Returns the environment's id.
    """
    fields = {
        "max_staleness": staleness,
        "ack_batches": True,
        "model": "m",
        "weight_epoch": 10 * uuid,
    }
    queue.register(registered(uuid, "g", "p", BATCH, 9, "c", 0, step, 99, **fields))
    queue.started = True
    environment = queue.register_env("task", 1.0, GROUP, 9, None, 0.0)
    assert environment is not None
    return environment.env_id


@dataclass
class Trainer:
    """Holds batches as the real one does: asks for the one behind the highest that it holds,
    acknowledges the first.
    """

    queue: RolloutQueue
    uuid: int
    version: int
    held: deque[Lease]
    received: int | None = None

    def fetch(self) -> bool:
        lease = self.queue.next_batch(0.0, self.received, self.uuid)
        if lease is None:
            return False
        assert self.received is None or lease.batch_id > self.received, "no batch twice"
        self.queue.sending(lease)
        self.queue.sent(lease, complete=True)
        self.held.append(lease)
        self.received = lease.batch_id
        return True


class FetchingAhead(RuleBasedStateMachine):
    """Weights are served as soon as a step is done, the acknowledgement follows later, and rollouts
    take their time.
    """

    @initialize(
        staleness=st.integers(0, 3),
        ahead=st.integers(1, 2),
        offpolicy=st.sampled_from([-1, 0, 1, 3]),
    )
    def begin(self, staleness: int, ahead: int, offpolicy: int) -> None:
        self.queue = RolloutQueue()
        self.staleness, self.most_held, self.offpolicy = staleness, 1 + ahead, offpolicy
        self.env_id = register(self.queue, 0, staleness)
        self.trainer = Trainer(self.queue, 1, 0, deque())
        self.lives = [(10, 0)]
        self.under_way: list[tuple[int, int]] = []
        self.stepped = (
            False  # a step was taken on the first batch that is held, which is not acknowledged yet
        )
        self.kept: list[tuple[Lease, int]] = []  # learned from, and not saved yet

    @rule(which=st.integers(0, 5))
    def finish_a_rollout(self, which: int) -> None:
        if self.under_way:
            weights = self.under_way.pop(which % len(self.under_way))
            self.queue.add(ValidatedGroup(b"{}", GROUP, 9, self.env_id, (weights,)), 0.0)

    @rule()
    def begin_rollouts(self) -> None:
        """As many as the environment's own policy allows."""
        status = self.queue.status_env(self.env_id, 0.0)
        status = status | {"unallocated_fraction": 1.0}
        limits = BaseEnvConfig(
            group_size=GROUP, batch_size=BATCH, max_batches_offpolicy=self.offpolicy
        )
        while len(self.under_way) < allowed_workers(limits, 64, status):
            self.under_way.append((self.lives[-1][0], self.trainer.version))

    @precondition(lambda self: len(self.trainer.held) < self.most_held)
    @rule()
    def fetch(self) -> None:
        self.trainer.fetch()

    @precondition(lambda self: self.trainer.held and not self.stepped)
    @rule()
    def train(self) -> None:
        version = self.trainer.version
        for group in self.trainer.held[0].groups:
            assert version - self.counts_as(group.weights) <= self.staleness, (
                "older than max_staleness"
            )
        self.trainer.version += 1
        self.stepped = True

    @precondition(lambda self: self.stepped)
    @rule(keep=st.booleans())
    def acknowledge(self, keep: bool) -> None:
        """With `keep`, a checkpoint is being written at that time, and later updates are not saved."""
        self.kept.append((self.trainer.held.popleft(), self.trainer.version))
        self.stepped = False
        if keep:
            self.queue.ack(
                self.kept[-1][0].batch_id, self.trainer.version, self.trainer.uuid, keep=True
            )
        else:
            self.save()

    @rule()
    def save(self) -> None:
        for lease, version in self.kept:
            self.queue.ack(lease.batch_id, version, self.trainer.uuid)
        self.kept.clear()

    @precondition(lambda self: self.trainer.held and not self.stepped)
    @rule()
    def skip(self) -> None:
        """The batch behind it is then trained on one version earlier than expected."""
        self.queue.ack(
            self.trainer.held.popleft().batch_id,
            self.trainer.version,
            self.trainer.uuid,
            skipped="bad",
        )

    @rule(lost=st.integers(0, 2))
    def die_and_come_back(self, lost: int) -> None:
        """With a checkpoint of a few steps ago.

        The next trainer gets the leased batches, or the queue sets them aside.
        """
        leases = [*(lease for lease, _ in self.kept), *self.trainer.held]
        held = {lease.batch_id: {group.seq for group in lease.groups} for lease in leases}
        self.kept.clear()
        step, uuid = max(0, self.trainer.version - lost), self.trainer.uuid + 1
        self.queue.disconnect_env(self.env_id)
        self.env_id = register(self.queue, step, self.staleness, uuid)
        self.lives.append((10 * uuid, step))
        self.trainer = Trainer(self.queue, uuid, step, deque())
        self.stepped = False
        kept = {group.seq for group in [*self.queue._held(), *self.queue.failures.groups()]}
        for group_ids in held.values():
            for seq in group_ids - kept:
                assert self.queue.drops, f"group {seq} is gone, and nothing says why"

    @rule()
    def nobody_waits_for_ever(self) -> None:
        """After all events: if all parts go on, the trainer takes three more steps."""
        target = self.trainer.version + 3
        for _ in range(60):
            self.begin_rollouts()
            while self.under_way:
                self.finish_a_rollout(0)
            if len(self.trainer.held) < self.most_held:
                self.trainer.fetch()
            if self.stepped:
                self.acknowledge(keep=True)  # whether or not anything is ever saved
            elif self.trainer.held:
                self.train()
            if self.trainer.version >= target:
                return
        raise AssertionError(f"stuck at version {self.trainer.version}: {self.queue.waiting}")

    def counts_as(self, weights: tuple[tuple[int, int], ...]) -> int:
        """The oldest of some weights by the contract, life by life."""
        counted = []
        for epoch, version in weights:
            for life, start in self.lives:
                if epoch < life and version > start:
                    version = start - 1
            counted.append(version)
        return min(counted)


TestFetchingAhead = FetchingAhead.TestCase
TestFetchingAhead.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_what_is_fetched_ahead_counts_as_queued_for_environments() -> None:
    """Or they would sample on, and what they sample would be trained on one version later than they
    bound it to.
    """
    queue = RolloutQueue()
    env_id = register(queue, 0, None)
    trainer = Trainer(queue, 1, 0, deque())

    def sizes() -> tuple[int, int]:
        status = queue.status_env(env_id, 0.0)
        return status["queue_size"], status["self_queue_size"]

    for _ in range(5):
        queue.add(ValidatedGroup(b"{}", GROUP, 9, env_id), 0.0)
    queue.add(ValidatedGroup(b"{}", GROUP, 9), 0.0)  # of no trainer
    assert sizes() == (6, 5)
    assert trainer.fetch()
    assert sizes() == (4, 3 + (sum(group.line != env_id for group in trainer.held[0].groups)))
    assert trainer.fetch()
    assert sizes()[0] == 4, "two in the queue, two in the trainer's hands"
    queue.ack(trainer.held.popleft().batch_id, 1)
    assert sizes()[0] == 2, "what is trained on now is not ahead of anybody"


def test_a_batch_fetched_ahead_is_as_fresh_as_one_that_is_fetched_in_time() -> None:
    queue = RolloutQueue()
    env_id = register(queue, 0, 1)
    trainer = Trainer(queue, 1, 0, deque())
    for _ in range(4):
        queue.add(ValidatedGroup(b"{}", GROUP, 9, env_id, ((10, 0),)), 0.0)
    assert trainer.fetch()
    assert trainer.fetch()
    assert (
        queue.add(ValidatedGroup(b"{}", GROUP, 9, env_id, ((10, 0),)), 0.0).status == "dropped"
    ), "two batches are before it"
    assert queue.groups_wanted(env_id, 0.0) == 0
    queue.ack(trainer.held.popleft().batch_id, 1)
    assert queue.groups_wanted(env_id, 0.0) == 2
    assert queue.add(ValidatedGroup(b"{}", GROUP, 9, env_id, ((10, 1),)), 0.0).status == "received"


def test_what_came_while_a_skipped_batch_had_lowered_the_bound_is_dropped_when_it_rises_again() -> (
    None
):
    queue = RolloutQueue()
    env_id = register(queue, 2, 1)
    trainer = Trainer(queue, 1, 2, deque())

    def post(version: int) -> str:
        return queue.add(ValidatedGroup(b"{}", GROUP, 9, env_id, ((10, version),)), 0.0).status

    assert [post(2), post(2)] == ["received"] * 2
    assert trainer.fetch()
    assert not trainer.fetch(), "what is older than version 2 is looked for, and dropped, now"
    queue.ack(trainer.held.popleft().batch_id, 2, skipped="bad")
    assert [post(1) for _ in range(4)] == ["received"] * 4
    assert trainer.fetch()
    assert not trainer.fetch(), "two groups wait that would be two versions old"
    assert queue.drops.total() == 2


def test_a_batch_that_is_kept_counts_as_learned_from_and_comes_to_the_next_trainer() -> None:
    queue = RolloutQueue()
    env_id = register(queue, 0, 1)
    trainer = Trainer(queue, 1, 0, deque())
    for _ in range(2):
        queue.add(ValidatedGroup(b"{}", GROUP, 9, env_id, ((10, 0),)), 0.0)
    assert trainer.fetch()
    kept = trainer.held.popleft()
    assert queue.ack(kept.batch_id, 1, keep=True) == 0
    assert (queue.sampling_version(), queue.trainer_version()) == (1, 1)
    assert queue.groups_wanted(env_id, 0.0) == 4, (
        "a checkpoint that is being written keeps nobody from sampling"
    )
    register(queue, 0, 1, uuid=2)
    again = Trainer(queue, 2, 0, deque())
    assert again.fetch()
    assert [group.seq for group in again.held[0].groups] == [group.seq for group in kept.groups]
    assert queue.trainer_version() == 1, "it is trained on again"
    queue.ack(again.held[0].batch_id, 1, keep=True)
    assert queue.ack(again.held[0].batch_id, 1) == 2
    assert not queue.leases
