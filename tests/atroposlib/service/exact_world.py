"""A whole run in one thread: the real queue and store, and the real window of items. Trainer and
sampler are a few lines.

Weights are a hash of all that was learned, and what is sampled is a hash of weights and item. So
two runs that end with the same weights have sampled the same rollouts and learned from them in the
same order. A script of numbers chooses what happens next, and who dies.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from atroposlib.envs.runner.exact_resume import ResumeWindow
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import QueueError, ValidatedGroup
from atroposlib.service.sqlite_store import SqliteStore
from tests.atroposlib.service.trainers import registered

STREAM, GROUP, GROUPS = "task seed 1", 2, 3
"""The stream's name, the sequences of a group, and the groups of a batch."""


def mixed(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]


def gives_a_group(content: str) -> bool:
    return int(content, 16) % 5 > 1


@dataclass(frozen=True)
class Weights:
    epoch: int
    version: int
    value: str


@dataclass(frozen=True)
class Checkpoint:
    step: int
    value: str
    positions: dict[str, int] | None
    learned: tuple[tuple[int, int, int], ...]
    """(batch, its registration, the version after it), for batches that the service may not know
    yet.
    """


@dataclass(eq=False)
class Worker:
    number: int
    life: str | None
    weights: Weights
    content: str | None = None


@dataclass
class World:
    """One run of `steps` steps, with a checkpoint every `interval` steps."""

    steps: int
    interval: int
    lasting: bool = True
    """The service has a store; else what it knew dies with it."""
    log: list[tuple[int, str]] = field(default_factory=list)
    """(version, content) of what was learned from, by the present weights."""

    def __post_init__(self) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="exact", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        )
        self.store = SqliteStore(self.folder / "a.db")
        self.queue = RolloutQueue(snapshot=self.store.load())
        self.bodies: dict[int, bytes] = {}
        self.saved = Checkpoint(0, "base", {}, ())
        self.uuid = self.epoch = self.posted = 0
        self.posts: list[tuple[ValidatedGroup, Worker | None]] = []
        self.kill_environment(False)
        self.start_trainer()

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def commit(self) -> None:
        self.store.commit([self.queue.take_changes()])

    # ---- the trainer ----

    def start_trainer(self) -> None:
        self.epoch += 10
        self.value, self.version, self.positions = (
            self.saved.value,
            self.saved.step,
            self.saved.positions,
        )
        self.log = [entry for entry in self.log if entry[0] < self.version]
        self.writing: Checkpoint | None = None
        self.owed: list[tuple[int, int, int]] = []
        self.lease: tuple[int, int] | None = None
        self.lease_positions: dict[str, int] = {}
        self.trained = False
        self.sampler = Weights(
            self.epoch, self.version, self.value
        )  # before it registers, as grpo.py does it
        for batch, uuid, _ in self.saved.learned:
            self.tell(batch, uuid, self.version, keep=False)
        self.register()

    def register(self) -> None:
        self.uuid += 1
        self.received: int | None = None
        size, steps = GROUP * GROUPS, (self.version, self.steps)
        exact = {
            "max_staleness": 0,
            "ack_batches": True,
            "model": "m",
            "weight_epoch": self.epoch,
            "positions": self.positions,
        }
        trainer = registered(self.uuid, "g", "p", size, 9, "c", 1, *steps, **exact)
        self.queue.register(trainer)
        self.commit()

    def tell(self, batch: int, uuid: int, version: int, keep: bool) -> None:
        try:
            self.queue.ack(batch, version, uuid, keep=keep)
        except QueueError:
            # of a service that has forgotten, or has another registration: as RolloutClient does
            return
        self.commit()

    def fetch(self) -> None:
        if self.queue.registration is None:
            self.register()
        lease = self.queue.next_batch(0.0, self.received, self.uuid)
        self.commit()
        if lease is None:
            return
        self.received = lease.batch_id
        ordered = self.queue.streams.in_order(lease.groups)
        self.lease, self.lease_positions = (
            (lease.batch_id, self.uuid),
            self.queue.streams.after(lease.groups),
        )
        self.batch = [self.bodies[group.seq].decode() for group in ordered]

    def step(self) -> None:
        self.value = mixed(self.value, self.batch)
        self.log += [(self.version, content) for content in self.batch]
        self.version += 1
        self.sampler = Weights(self.epoch, self.version, self.value)
        self.trained = True

    def acknowledge(self) -> None:
        assert self.lease is not None
        batch, self.positions = (*self.lease, self.version), self.lease_positions
        self.lease, self.trained = None, False
        if self.version % self.interval == 0:
            if self.writing is not None:
                self.write()
            self.release()
            self.writing = Checkpoint(self.version, self.value, self.positions, (*self.owed, batch))
        self.owed.append(batch)
        if self.writing is None:
            self.release()
        else:
            self.tell(*batch, keep=True)

    def release(self) -> None:
        for batch in self.owed:
            self.tell(*batch, keep=False)
        self.owed = []

    def write(self) -> None:
        assert self.writing is not None
        self.saved, self.writing = self.writing, None

    # ---- the inference server ----

    def restart_sampler(self) -> None:
        """It samples with its checkpoint's weights until it has the trainer's.

        Calls that were under way there are repeated.
        """
        self.sampler = Weights(0, 0, "base")
        for worker in self.workers:
            if worker.content is None:
                worker.weights = self.sampler

    def bring_sampler_up_to_date(self) -> None:
        self.sampler = Weights(self.epoch, self.version, self.value)

    # ---- the environment ----

    def kill_environment(self, posts_arrive: bool) -> None:
        self.window, self.env_id = ResumeWindow(), None
        self.workers: list[Worker] = []
        self.asked: tuple[dict[str, object], int] | None = None
        self.posts = [(draft, None) for draft, _ in self.posts] if posts_arrive else []

    def ask(self) -> None:
        if self.env_id is None:
            environment = self.queue.register_env("task", 1.0, GROUP, 9, None, 0.0, STREAM)
            self.commit()
            self.env_id = environment.env_id if environment else None
        if self.env_id is not None:
            try:
                self.asked = self.queue.status_env(self.env_id, 0.0), len(self.workers)
            except QueueError:
                self.env_id = None

    def act(self) -> None:
        """As Runner.one_round does behind the answer of the service."""
        assert self.asked is not None
        (status, busy), self.asked = self.asked, None
        if self.window.update(status["stream"]):  # type: ignore[arg-type]
            self.posts = [(draft, None) for draft, _ in self.posts]
            self.workers = []
        for _ in range(status["groups_wanted"] - max(len(self.workers), busy)):  # type: ignore[operator]
            number = self.window.next_number()
            self.window.begin(number)
            self.workers.append(Worker(number, self.window.life, self.sampler))

    def sample(self, which: int) -> None:
        busy = [worker for worker in self.workers if worker.content is None]
        worker = busy[which % len(busy)]
        # Samples from a change of weights belong to neither.
        value = (
            worker.weights.value
            if worker.weights.value == self.sampler.value
            else mixed(worker.weights, self.sampler)
        )
        worker.content = mixed("sampled", value, worker.number)
        if not gives_a_group(worker.content):
            self.workers.remove(worker)
            self.window.mark_without_group(worker.number, (worker.weights.version,))
            self.window.finish(worker.number, done=True)
            return
        self.posted += 1
        weights = ((worker.weights.epoch, worker.weights.version),)
        body = worker.content.encode()
        draft = ValidatedGroup(
            body,
            GROUP,
            9,
            self.env_id,
            weights,
            f"post {self.posted}",
            stream=STREAM,
            item=worker.number,
            life=worker.life,
        )
        self.posts.append((draft, worker))

    def deliver(self, which: int) -> None:
        draft, worker = self.posts.pop(which % len(self.posts))
        seq = self.queue.next_seq
        receipt = self.queue.add(draft, 0.0)
        self.commit()
        if self.queue.next_seq > seq:
            self.bodies[seq] = draft.body
        if worker is not None and worker in self.workers:
            if receipt.status == "dropped":
                self.window.refuse(worker.number)
            self.workers.remove(worker)
            self.window.finish(worker.number, done=True)

    # ---- the service ----

    def kill_service(self) -> None:
        if self.lasting:
            self.store.close()
            self.store = SqliteStore(self.folder / "a.db")
            self.queue = RolloutQueue(snapshot=self.store.load())
        else:
            self.queue.reset()
            self.commit()
            self.queue.next_batch_id = 1

    # ---- what happens ----

    def happen(self, choice: int) -> None:
        """One thing that can happen now."""
        able: list[Callable[[], None]] = [self.ask]
        if self.asked is not None:
            able.append(self.act)
        if any(worker.content is None for worker in self.workers):
            able.append(lambda: self.sample(choice // 7))
        if self.posts:
            able.append(lambda: self.deliver(choice // 7))
        if self.lease is None and not self.done:
            able.append(self.fetch)
        elif self.lease is not None:
            able.append(self.acknowledge if self.trained else self.step)
        if self.writing is not None:
            able.append(self.write)
        if self.sampler.epoch != self.epoch:
            able.append(self.bring_sampler_up_to_date)
        able[choice % len(able)]()

    def die(self, choice: int) -> None:
        """Kill one process, or several."""
        which = choice % 7
        if which in (0, 4, 6):
            self.kill_environment(posts_arrive=bool(choice // 7 % 2))
        if which in (1, 4, 5, 6):
            self.kill_service()
        if which in (2, 3, 5, 6):
            self.start_trainer()
        if choice // 14 % 2:
            self.restart_sampler()

    @property
    def done(self) -> bool:
        return self.version >= self.steps

    def finish(self, choices: Callable[[], int]) -> tuple[str, list[str]]:
        """Go on to the end. The weights, and what they learned from."""
        for _ in range(3_000):
            if self.done and not self.trained:
                return self.value, [content for _, content in self.log]
            self.happen(choices())
        raise AssertionError(
            f"the run stands still at version {self.version}: {self.queue.streams.stored()}, {self.workers}"
        )
