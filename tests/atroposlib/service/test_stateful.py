"""The queue with its real store, killed and restarted at will, against a model that is a few lists."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atroposlib.service.group_reader import NO_REFERENCE, with_reference
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import COMPUTED, Limits, ValidatedGroup
from atroposlib.service.run_state import MAX_KEPT
from atroposlib.service.schemas import Registration
from atroposlib.service.sqlite_store import SqliteStore

GROUP_SIZE = 4
REPLAYS = [None, None, ("fifo", 2), ("recent", 1), ("recent", 3), ("uniform", 2)]
REFERENCES: dict[str, dict[str, str] | None] = {
    "none": None,
    "workers": {"a": "1"},
    "other": {"a": "2"},
}


class ServiceMachine(RuleBasedStateMachine):
    """Model: every accepted group is in exactly one of waiting, out, done, dropped. It knows
    nothing of the order of lines, clocks, buffers or files."""

    @initialize()
    def open(self) -> None:
        # in memory where there is such a place: what is tested is what is written, not the disk
        self.folder = Path(
            tempfile.mkdtemp(
                prefix="rollouts", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
            )
        )
        self.store = SqliteStore(self.folder / "a.db")
        self.limits = Limits(max_keys=4)
        self.queue = RolloutQueue(self.limits, self.store.load())
        self.posted = self.keys = 0
        self.size: dict[int, int] = {}
        self.weights: dict[int, tuple[int, int]] = {}
        self.lives: list[tuple[int, int]] = []
        self.epochs = [0]
        self.foreign_epochs: set[int] = set()
        self.env: dict[int, int | None] = {}
        self.body: dict[int, bytes] = {}
        self.computed: set[int] = set()
        self.lacking: set[int] = set()
        self.references = "none"
        self.max_reuse = 1
        self.uses: Counter[int] = Counter()
        self.now = 0.0
        self.waiting: set[int] = set()
        self.out: dict[int, list[int]] = {}
        self.arrived: set[int] = set()
        self.done: set[int] = set()
        self.dropped: set[int] = set()
        self.envs: list[int] = []
        self.uuid = 0
        self.acks = False
        self.evaluations: list[tuple[int, float]] = []
        self.evaluation_ids = 0

    def counts_as(self, epoch: int, version: int) -> int:
        """The version by which weights count in the contract, life by life."""
        for life, start in self.lives:
            if epoch < life and version > start:
                version = start - 1
        return version

    def version(self, number: int) -> int:
        return self.counts_as(*self.weights[number])

    def is_ahead(self, number: int, step: int) -> bool:
        return self.version(number) < 0 if self.lives else self.weights[number][1] > step

    def worker_model(self) -> str:
        return (self.queue.registration.reference_model if self.queue.registration else None) or ""

    def commit(self) -> None:
        self.store.commit([self.queue.take_changes()])

    def note_drops(self, another_run: bool = False, step: int | None = None) -> None:
        """A group may only vanish where the contract allows it; the numbers show which ones did."""
        held = {group.seq for group in self.queue.lines}
        held |= {group.seq for buffer in self.queue.buffers.values() for group in buffer}
        held |= set(self.queue.reference.waiting)
        held |= {seq for batch in self.out.values() for seq in batch}
        gone = self.waiting - held
        oldest = self.queue.oldest_allowed()
        batch_size = self.queue.registration.batch_size if self.queue.registration else None
        set_aside = {group.seq for group in self.queue.failures.groups()}
        for number in gone:
            stale = oldest is not None and self.version(number) < oldest
            oversize = batch_size is not None and self.size[number] > batch_size
            foreign = another_run or (step is not None and self.is_ahead(number, step))
            used_up = self.uses[number] >= self.max_reuse
            assert stale or oversize or foreign or used_up or number in set_aside, (
                f"group {number} was lost"
            )
        for number in self.waiting - gone if step is not None else ():
            assert not another_run, f"group {number} is another run's"
            assert not self.is_ahead(number, step), f"group {number} is of weights that are gone"
        self.waiting -= gone
        self.dropped |= gone

    @rule(
        batch_size=st.sampled_from([8, 8, 8, 4, 12]),
        staleness=st.sampled_from([None, 0, 1, 2]),
        step=st.sampled_from([0, 3, 6]),
        acks=st.booleans(),
        model=st.sampled_from([None, "a", "a", "b"]),
        named=st.booleans(),
        references=st.sampled_from(sorted(REFERENCES)),
        replay=st.sampled_from(REPLAYS),
    )
    def register(
        self,
        batch_size: int,
        staleness: int | None,
        step: int,
        acks: bool,
        model: str | None,
        named: bool,
        references: str,
        replay: tuple[str, int] | None,
    ) -> None:
        wanted = (
            {"policy": replay[0], "max_reuse": replay[1], "seed": 5}
            if replay and staleness
            else None
        )
        self.max_reuse, self.last_replay = replay[1] if replay and staleness else 1, replay
        old = self.queue.registration
        self.uuid += 1
        epoch = 10 * self.uuid if named else 0
        model = "a" if model is None and references != "none" else model
        self.queue.register(
            Registration(
                uuid=self.uuid,
                wandb_group="g",
                wandb_project="p",
                batch_size=batch_size,
                max_token_len=9,
                checkpoint_dir="c",
                save_checkpoint_interval=1,
                starting_step=step,
                num_steps=9,
                max_staleness=staleness,
                ack_batches=acks,
                model=model,
                weight_epoch=epoch,
                ref_logprobs_from_workers=references != "none",
                reference=REFERENCES[references],
                replay=wanted,
            )
        )
        self.acks = acks
        if references != self.references:
            self.lacking |= self.computed
            self.computed.clear()
        self.references = references
        self.commit()
        another_run = old is not None and {old.model, model} == {"a", "b"}
        if another_run:
            self.foreign_epochs |= set(self.epochs) - {0}
            self.evaluations.clear()
        self.lives = [*([] if another_run else self.lives), (epoch, step)] if named else []
        self.epochs.append(epoch)
        for batch_id, batch in list(self.out.items()):
            ahead = any(self.is_ahead(seq, step) for seq in batch)
            ahead = ahead or (references != "none" and bool(self.lacking & set(batch)))
            ahead = ahead or any(self.uses[seq] >= self.max_reuse for seq in batch)
            if old is None or old.batch_size != batch_size or another_run or ahead:
                self.waiting |= set(self.out.pop(batch_id))
        self.arrived.clear()
        self.note_drops(another_run, step)

    @precondition(lambda self: bool(self.out))
    @rule(later=st.sampled_from([0, 3]))
    def trainer_dies_and_comes_back(self, later: int) -> None:
        trainer = self.queue.registration
        assert trainer is not None
        version, named = self.queue.trainer_version() + later, bool(trainer.weight_epoch)
        acks, model = trainer.ack_batches, trainer.model
        self.register(
            trainer.batch_size,
            trainer.max_staleness,
            version,
            acks,
            model,
            named,
            self.references,
            self.last_replay,
        )
        self.batch(arrives=True)

    @precondition(lambda self: self.queue.started)
    @rule(weight=st.sampled_from([0.0, 1.0, 3.0]), allocation=st.sampled_from([None, 0.25]))
    def register_env(self, weight: float, allocation: float | None) -> None:
        if len(self.envs) < 3:
            environment = self.queue.register_env("task", weight, GROUP_SIZE, 9, allocation, 0.0)
            assert environment is not None
            self.envs.append(environment.env_id)
            self.commit()

    @rule(
        size=st.sampled_from([4, 4, 4, 1, 2, 3, 6]),
        which=st.integers(0, 3),
        age=st.integers(0, 1),
        key=st.booleans(),
        referenced=st.booleans(),
    )
    def post(self, size: int, which: int, age: int, key: bool, referenced: bool) -> None:
        for _ in range(3):
            self.post_one(
                size, which, key, None, max(0, self.queue.sampling_version() - age), referenced
            )

    @rule(data=st.data(), version=st.integers(0, 12))
    def post_of_some_life(self, data: st.DataObject, version: int) -> None:
        self.post_one(4, 3, False, data.draw(st.sampled_from(self.epochs)), version, True)

    @rule(
        tokens=st.integers(1, 12),
        waits=st.booleans(),
        answers=st.sampled_from(["all", "one", "none", "unusable"]),
    )
    def work_on_references(self, tokens: int, waits: bool, answers: str) -> None:
        """A worker takes what it can; it answers some of it, and dies, or another one has answered
        before.
        """
        self.now += 10.0 * waits
        groups = self.queue.lend_references("worker", self.worker_model(), tokens, 5.0, self.now)
        assert {group.seq for group in groups} <= self.waiting & self.lacking
        assert sum(group.tokens for group in groups) <= max(
            tokens, *(group.tokens for group in groups), 0
        )
        self.note_drops()
        if answers == "none":
            self.commit()
            return
        made: dict[int, bytes | None] = {}
        for group in groups[: 1 if answers == "one" else None]:
            (body,) = self.store.bodies([group.seq])
            made[group.seq] = (
                None if answers == "unusable" else with_reference(body, b"[%d]" % self.uuid)
            )
        self.queue.take_references("worker", made, self.now)
        self.queue.take_references("late", dict.fromkeys(made, b"other"), self.now)
        self.commit()
        for seq, answer in made.items():
            self.lacking.remove(seq)
            if answer is not None:
                self.computed.add(seq)
                self.body[seq] = answer

    def post_one(
        self, size: int, which: int, key: bool, epoch: int | None, version: int, referenced: bool
    ) -> None:
        env_id = self.envs[which] if which < len(self.envs) else None
        if self.queue.registration is not None and size > self.queue.registration.batch_size:
            return
        self.keys += 1
        body = b'{"number":%d' % self.queue.next_seq + (b"}" if referenced else NO_REFERENCE)
        name = f"key {self.keys}" if key else None
        draft = ValidatedGroup(
            body, size, 9, env_id, ((epoch, version),), name, tokens=size, referenced=referenced
        )
        self.posted += 1
        number = self.queue.next_seq
        receipt = self.queue.add(draft, 0.0)
        if key:  # the client did not get the answer and posts again
            assert self.queue.add(draft, 0.0) == receipt
        self.commit()
        if epoch is not None:
            counted, oldest = self.counts_as(epoch, version), self.queue.oldest_allowed()
            unwanted = (
                counted < 0
                or epoch in self.foreign_epochs
                or (oldest is not None and counted < oldest)
            )
            assert (receipt.status == "dropped") == unwanted, receipt
        if receipt.status == "dropped":
            assert self.queue.next_seq == number
            return
        assert self.queue.next_seq == number + 1
        present = self.lives[-1][0] if self.lives else 0
        self.weights[number] = (present if epoch is None else epoch, version)
        self.size[number], self.env[number], self.body[number] = size, env_id, body
        if not referenced:
            self.lacking.add(number)
        self.waiting.add(number)

    @precondition(lambda self: self.queue.registration is not None)
    @rule(arrives=st.booleans())
    def batch(self, arrives: bool) -> None:
        done = (
            set() if self.queue.acks else set(self.arrived)
        )  # asking again means: done with what arrived
        lease = self.queue.next_batch(0.0)
        if lease is not None:
            self.queue.sending(lease)
        self.commit()
        for batch_id in done:
            self.learn(batch_id)
        self.arrived -= done
        # a batch that waited for a new trainer may have been dissolved because part of it became
        # too old
        for batch_id in [batch_id for batch_id in self.out if batch_id not in self.queue.leases]:
            assert batch_id not in self.arrived
            self.waiting |= set(self.out.pop(batch_id))
        if lease is None:
            self.note_drops()
            return
        registration = self.queue.registration
        assert registration is not None
        numbers = [group.seq for group in lease.groups]
        assert sum(self.size[number] for number in numbers) == registration.batch_size, "exact"
        assert numbers == sorted(numbers)
        assert self.store.bodies(numbers) == [self.body[number] for number in numbers], "whole"
        if self.references != "none":
            assert not self.lacking & set(numbers), "with references"
        if lease.batch_id in self.out:
            assert numbers == self.out[lease.batch_id], "the same batch"
        else:
            assert set(numbers) <= self.waiting, "nothing twice"
            self.waiting -= set(numbers)
            self.out[lease.batch_id] = numbers
        if registration.max_staleness is not None and not lease.sent:
            at = self.queue.trainer_version() - 1  # the version at which this batch is trained on
            assert all(
                self.version(number) >= at - registration.max_staleness for number in numbers
            ), "too old"
        self.queue.sent(lease, complete=arrives)
        if arrives:
            self.arrived.add(lease.batch_id)
        self.commit()
        self.note_drops()

    @precondition(lambda self: bool(self.out))
    @rule(data=st.data(), step=st.integers(0, 2))
    def ack(self, data: st.DataObject, step: int) -> None:
        batch_id = data.draw(st.sampled_from(sorted(self.out)))
        self.queue.ack(batch_id, self.queue.sampling_version() + step)
        self.commit()
        self.learn(batch_id)
        self.arrived.discard(batch_id)
        self.note_drops()

    def learn(self, batch_id: int) -> None:
        """A learned batch may be used again, so often."""
        batch = self.out.pop(batch_id)
        self.uses.update(batch)
        self.waiting |= {seq for seq in batch if self.uses[seq] < self.max_reuse}
        self.done |= {seq for seq in batch if self.uses[seq] >= self.max_reuse}

    @precondition(lambda self: bool(self.envs))
    @rule(which=st.integers(0, 2))
    def disconnect(self, which: int) -> None:
        if which < len(self.envs):
            self.queue.disconnect_env(self.envs.pop(which))
            self.commit()

    @rule(value=st.floats(-1, 1), again=st.booleans())
    def evaluate(self, value: float, again: bool) -> None:
        self.evaluation_ids += 1
        for _ in range(1 + again):  # the client did not get the answer and posts again
            number = self.queue.evaluated(
                0.0,
                time=1.5,
                env_id=None,
                name="task",
                weight_version=3,
                metrics={"x": value},
                key=f"{self.evaluation_ids}",
            )
            assert number == self.evaluation_ids, "ids grow, and are never given twice"
        self.evaluations = [*self.evaluations, (number, value)][-MAX_KEPT:]
        self.commit()

    @rule(half_way=st.booleans())
    def kill(self, half_way: bool) -> None:
        """The process dies; with `half_way`, in the middle of an uncommitted post."""
        if half_way:
            self.queue.add(ValidatedGroup(b"{}", 4, 9), 0.0)
        self.store.close()
        self.store = SqliteStore(self.folder / "a.db")
        self.queue = RolloutQueue(self.limits, self.store.load())

    @precondition(lambda self: self.posted > 60)  # seldom, or nothing would ever grow
    @rule()
    def reset(self) -> None:
        self.queue.reset()
        self.commit()
        self.posted = 0
        self.lives, self.epochs = [], [0]
        self.foreign_epochs.clear()
        self.computed.clear()
        self.lacking.clear()
        self.uses.clear()
        self.references, self.max_reuse = "none", 1
        self.size.clear()
        self.waiting.clear()
        self.out.clear()
        self.arrived.clear()
        self.envs.clear()
        self.evaluations.clear()

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert [
            (known.id, known.metrics["x"]) for known in self.queue.evaluations.after(0)
        ] == self.evaluations
        queued = [group.seq for group in self.queue.lines]
        buffered = [group.seq for buffer in self.queue.buffers.values() for group in buffer]
        leased = [group.seq for lease in self.queue.leases.values() for group in lease.groups]
        at_workers = list(self.queue.reference.waiting)
        held = queued + buffered + leased + at_workers
        assert set(at_workers) == (
            self.lacking & self.waiting if self.references != "none" else set()
        )
        assert self.queue.reference.sequences.total() == sum(self.size[seq] for seq in at_workers)
        for line in (
            self.queue.lines.by_line.values()
        ):  # a group that has waited for others of its size joins behind the later ones
            whole = [seq for seq, group in line.items() if group.size == GROUP_SIZE]
            assert whole == sorted(whole), "oldest first"
        assert {
            group.seq for group in self.queue._held() if group.reference == COMPUTED
        } == self.computed & set(held)
        assert len(held) == len(set(held)), "nothing twice"
        assert set(queued + buffered + at_workers) == self.waiting
        assert {
            batch_id: [g.seq for g in lease.groups] for batch_id, lease in self.queue.leases.items()
        } == self.out
        assert self.queue.held_groups == len(held)
        for group in self.queue._held():
            assert group.version == self.version(group.seq), (
                "told anew by each trainer, and found again after a kill"
            )
            assert group.uses == self.uses[group.seq] < self.max_reuse, (
                "counted, and no more often than allowed"
            )
        assert self.queue.lines.total_sequences() == sum(self.size[seq] for seq in queued)
        assert self.queue.lines.fresh.total() == sum(
            self.size[seq] for seq in queued if not self.uses[seq]
        )
        assert self.queue.lines.used_groups == sum(self.uses[seq] > 0 for seq in queued)
        for buffer in self.queue.buffers.values():
            assert sum(group.size for group in buffer) != GROUP_SIZE, "what can be recombined was"

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


TestService = ServiceMachine.TestCase
TestService.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
