"""Which run a rollout belongs to, with clocks that jump, trainers that die, and a service that
forgets.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from starlette.testclient import TestClient

from atroposlib.service.app import make_app
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import ValidatedGroup
from atroposlib.service.run_state import MAX_EPOCHS, WeightEpochs
from atroposlib.service.schemas import Registration
from atroposlib.service.service import RolloutService
from atroposlib.service.sqlite_store import SqliteStore
from atroposlib.service.store import MemoryStore
from atroposlib.wire import TrainerSession

from .test_queue import registration

DAY = 1_000_000
"""Ticks of the clocks here. No two processes start in the same tick of one clock, and a day is
longer than a test."""


def register(
    queue: RolloutQueue,
    epoch: int,
    start: int = 0,
    lives: list[TrainerSession] | None = None,
    **fields: Any,
) -> int:
    """Register a trainer; returns the epoch that the service counts it as."""
    made: Registration = registration(
        4, starting_step=start, ack_batches=True, weight_epoch=epoch, **fields
    )
    queue.register(made, lives or [])
    return made.weight_epoch


def post(queue: RolloutQueue, *weights: tuple[int | None, int]) -> str:
    return queue.add(ValidatedGroup(b"{}", 4, 10, None, weights), 0.0).status


def test_an_epoch_is_given_once_also_after_a_kill_and_a_reset() -> None:
    queue = RolloutQueue()
    assert queue.give_epoch(100, "run") == 100
    assert queue.give_epoch(40, "run") == 101, "the clock went back"
    queue.reset()
    assert queue.give_epoch(40, None) == 102
    again = WeightEpochs.restored(queue.epochs.stored())
    assert again.give(40, None) == 103
    assert again.give(200, None) == 200, "and forwards"


def test_a_new_run_in_an_emptied_folder_gets_nothing_of_the_one_before() -> None:
    queue = RolloutQueue()
    register(queue, 100, 16, model="m", run="first")
    assert post(queue, (100, 17)) == post(queue, (100, 0)) == "received"
    second = queue.give_epoch(20, "second")
    assert register(queue, second, model="m", run="second") == second > 100
    assert queue.held_groups == 0
    assert post(queue, (100, 0)) == "dropped", "also what has the version that it begins with"
    assert post(queue, (second, 0)) == "received"


def test_a_trainer_that_asked_for_no_epoch_keeps_its_own_where_the_clock_went_back() -> None:
    queue = RolloutQueue()
    assert register(queue, 100, model="m") == 100
    post(queue, (100, 3))
    assert register(queue, 60, 2, model="m") == 101
    assert [group.version for group in queue.lines] == [1], (
        "of the trainer before, and later than what this one began with"
    )
    assert post(queue, (60, 2)) == post(queue, (101, 2)) == "received", (
        "under the epoch that it names, and that it is told"
    )
    assert register(queue, 60, 2, model="m") == 101, "the same trainer again"
    assert register(queue, 30, model="other") == 30
    assert post(queue, (101, 2)) == post(queue, (60, 2)) == "dropped"
    assert post(queue, (30, 0)) == "received"


def test_what_came_before_any_trainer_is_judged_when_one_registers() -> None:
    queue = RolloutQueue()
    for weights in ((500, 2), (100, 0), (0, 0), (None, 0)):
        assert post(queue, weights) == "received"
    register(queue, 600, 2, [TrainerSession(100, 0), TrainerSession(600, 2)], run="a")
    assert [group.weights for group in queue.lines] == [((100, 0),), ((0, 0),), ((0, 0),)]
    assert post(queue, (600, 2)) == "received"
    assert post(queue, (700, 2)) == "dropped", (
        "an epoch above the present one is nobody's of this run"
    )


def test_what_is_remembered_is_bounded() -> None:
    epochs = WeightEpochs()
    for _ in range(MAX_EPOCHS + 5):
        epochs.give(0, "run")
    assert len(epochs.stored()["given_epochs"]) == MAX_EPOCHS


def test_no_trainer_can_use_up_the_epochs() -> None:
    trainer = {
        "wandb_group": "",
        "wandb_project": "",
        "batch_size": 1,
        "max_token_len": 1,
        "checkpoint_dir": "",
    }
    trainer |= {"save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1}
    app = make_app(RolloutService(MemoryStore()))
    with TestClient(app, base_url="http://localhost") as client:
        for path, body, field in (
            ("/weight-epoch", {"asked": 2**52 + 1}, "asked"),
            ("/register", trainer | {"weight_epoch": 2**53 - 1}, "weight_epoch"),
            ("/register", trainer | {"weight_epoch": 1, "lives": [[2**53 - 1, 0]]}, "lives"),
        ):
            refused = client.post(path, json=body)
            assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (
                422,
                ["body", field],
            )
        assert client.post("/register", json=trainer | {"weight_epoch": 2**52}).status_code == 200
        for _ in range(
            3
        ):  # each later trainer can register with the epoch that it was given, and names it among its lives
            given = client.post("/weight-epoch", json={"asked": 5}).json()["weight_epoch"]
            answer = client.post(
                "/register", json=trainer | {"weight_epoch": given, "lives": [[given, 0]]}
            )
            assert answer.json()["weight_epoch"] == given > 2**52


# ---- against a model that knows which trainer sampled what
# -----------------------------------------------------


@dataclass(eq=False)
class Trainer:
    """One trainer process: the epoch that its rollouts carry, and the versions that it has made."""

    run: TrainedRun
    epoch: int
    start: int
    line: list[Trainer]
    """The trainers whose checkpoints it goes on from."""
    number: int
    version: int = 0


@dataclass(eq=False)
class TrainedRun:
    """One run, in a folder."""

    name: str | None
    """None for a client that names no runs, and asks for no epochs."""
    model: str
    folder: str
    checkpoints: list[tuple[Trainer, int]] = field(default_factory=list)


class EpochMachine(RuleBasedStateMachine):
    """Trainers on hosts with clocks of their own; environments that post what any of them has
    sampled, at any time.
    """

    @initialize(clocks=st.tuples(st.integers(0, 3), st.integers(0, 3)))
    def begin(self, clocks: tuple[int, int]) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store = SqliteStore(self.folder / "store.db")
        self.queue = RolloutQueue()
        self.clocks = list(clocks)
        self.starts = self.uuid = self.serial = 0
        self.runs: list[TrainedRun] = []
        self.trainers: list[Trainer] = []
        self.present: Trainer | None = None
        self.waiting: Trainer | None = None
        """Has its epoch and serves weights, and has not registered yet."""
        self.sampled_by: dict[int, Trainer] = {}
        """By the number of the group."""
        self.remembered: set[Trainer] = set()
        """Whose rollouts the service must take while their run is the present one."""

    def commit(self) -> None:
        self.store.commit([self.queue.take_changes()])

    @rule(host=st.integers(0, 1), day=st.integers(0, 3))
    def clock_jumps(self, host: int, day: int) -> None:
        self.clocks[host] = day

    @rule(
        host=st.integers(0, 1),
        model=st.sampled_from("ab"),
        folder=st.sampled_from("xy"),
        empties=st.booleans(),
    )
    def a_run_begins(self, host: int, model: str, folder: str, empties: bool) -> None:
        self.serial += 1
        run = TrainedRun(f"run {self.serial}", model, folder)
        if empties:
            for other in self.runs:
                if other.folder == folder:
                    other.checkpoints.clear()
        self.runs.append(run)
        self.start(run, host, 0, [])

    @precondition(lambda self: any(run.checkpoints for run in self.runs))
    @rule(host=st.integers(0, 1), data=st.data())
    def a_run_is_resumed(self, host: int, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from([run for run in self.runs if run.checkpoints]))
        saver, step = data.draw(st.sampled_from(run.checkpoints))
        self.start(run, host, step, [*saver.line, saver])

    def start(self, run: TrainedRun, host: int, step: int, line: list[Trainer]) -> None:
        known = [
            saver.epoch
            for other in self.runs
            if other.folder == run.folder
            for saver, _ in other.checkpoints
        ]
        self.starts += 1
        asked = max(
            [
                self.clocks[host] * DAY + self.starts,
                *(epoch + 1 for epoch in [*known, *(one.epoch for one in line)]),
            ]
        )
        epoch = self.queue.give_epoch(asked, run.name)
        self.commit()
        assert epoch not in [trainer.epoch for trainer in self.remembered], "given once"
        self.waiting = Trainer(run, epoch, step, line, len(self.trainers), step)
        self.trainers.append(self.waiting)
        self.remembered.add(self.waiting)

    @precondition(lambda self: self.waiting is not None)
    @rule()
    def it_registers(self) -> None:
        assert self.waiting is not None
        self.present, self.waiting = self.waiting, None
        self.enter(self.present)

    @precondition(lambda self: self.present is not None)
    @rule()
    def it_registers_again(self) -> None:
        """Its registration was forgotten, or another trainer had taken over."""
        assert self.present is not None
        self.enter(self.present)

    def enter(self, trainer: Trainer) -> None:
        self.uuid += 1
        run, line = trainer.run, [*trainer.line, trainer]
        fields = {
            "uuid": self.uuid,
            "starting_step": trainer.version,
            "ack_batches": True,
            "weight_epoch": trainer.epoch,
        }
        made = registration(4, model=run.model, run=run.name, **fields)
        made.checkpoint_dir = run.folder
        self.queue.register(
            made, [TrainerSession(one.epoch, one.start) for one in line] if run.name else []
        )
        self.remembered.update(line if run.name else [trainer])
        self.commit()

    @rule(host=st.integers(0, 1), resumes=st.booleans())
    def another_client_registers(self, host: int, resumes: bool) -> None:
        """It takes the epoch from its clock, whatever that shows, and reads no answer."""
        self.starts += 1
        before = self.present
        run = before.run if resumes and before is not None and before.run.name is None else None
        if run is None:
            self.serial += 1
            run = TrainedRun(None, f"model {self.serial}", "z")
            self.runs.append(run)
        step = before.version if before is not None and before.run is run else 0
        self.present, self.waiting = (
            Trainer(run, self.clocks[host] * DAY + self.starts, step, [], len(self.trainers), step),
            None,
        )
        self.trainers.append(self.present)
        self.enter(self.present)

    @precondition(lambda self: self.present is not None)
    @rule(steps=st.integers(1, 3), saves=st.booleans())
    def it_trains(self, steps: int, saves: bool) -> None:
        assert self.present is not None
        if self.queue.registration is None:
            return
        self.present.version += steps
        self.queue.ack(None, self.present.version)
        self.commit()
        if saves and self.present.run.name is not None:
            self.present.run.checkpoints.append((self.present, self.present.version))

    @precondition(lambda self: bool(self.trainers))
    @rule(data=st.data())
    def a_rollout_arrives(self, data: st.DataObject) -> None:
        trainer = data.draw(st.sampled_from(self.trainers))
        version = data.draw(st.integers(trainer.start, trainer.version))
        self.sampled_by[self.queue.next_seq] = trainer
        receipt = self.queue.add(
            ValidatedGroup(b"{}", 4, 10, None, ((trainer.epoch, version),)), 0.0
        )
        self.commit()
        if self.queue.registration is None or self.present is None:
            return
        if trainer.run is not self.present.run:
            assert receipt.status == "dropped", "another run's"
        elif trainer in self.known() and not self.may_be_gone(trainer, version):
            assert receipt.status == "received", receipt

    def known(self) -> set[Trainer]:
        """Return the trainers of the present run that the service knows.

        It forgets runs without a name.
        """
        assert self.present is not None
        if self.present.run.name is not None:
            return self.remembered
        run, found = self.present.run, set()
        for trainer in reversed(
            [
                one
                for one in self.trainers
                if one in self.remembered and one.number <= self.present.number
            ]
        ):
            if trainer.run is not run:
                break
            found.add(trainer)
        return found

    def may_be_gone(self, trainer: Trainer, version: int) -> bool:
        """Return True if a later trainer of the run began at 0, before these weights: then they
        count as older than any.
        """
        later = [
            one for one in self.trainers if one.run is trainer.run and one.number > trainer.number
        ]
        return version > 0 and any(one.start == 0 for one in later)

    @rule()
    def the_service_is_killed(self) -> None:
        self.store.close()
        self.store = SqliteStore(self.folder / "store.db")
        self.queue = RolloutQueue(snapshot=self.store.load())

    @precondition(lambda self: len(self.trainers) > 2)
    @rule(how=st.sampled_from(["reset", "emptied"]))
    def the_service_forgets(self, how: str) -> None:
        if how == "reset":
            self.queue.reset()
            self.commit()
        else:
            self.store.close()
            (self.folder / "store.db").unlink()
            self.store = SqliteStore(self.folder / "store.db")
            self.queue = RolloutQueue()
        self.remembered.clear()

    @invariant()
    def nothing_waits_that_is_another_runs(self) -> None:
        if getattr(self, "present", None) is None or self.queue.registration is None:
            return
        assert self.present is not None
        for group in self.queue._held():
            assert self.sampled_by[group.seq].run is self.present.run

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


TestEpochs = EpochMachine.TestCase
TestEpochs.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
