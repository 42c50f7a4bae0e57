"""Registrations are bounded: silent environments are forgotten, needed ones are not, and no id
comes twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from atroposlib.service import queue as queue_module
from atroposlib.service import run_state
from atroposlib.service.fleet import MAX_PUBLISHERS, FleetStatus, TooManyPublishersError
from atroposlib.service.pending_groups import ReferenceQueue
from atroposlib.service.queue import FORGET_SECONDS, RolloutQueue
from atroposlib.service.records import Limits, RegistryFullError, UnknownEnvironmentError
from atroposlib.service.sqlite_store import SqliteStore
from tests.atroposlib.service.test_queue import draft, started, take

MOST = 5


def come(queue: RolloutQueue, now: float, name: str = "task", stream: str | None = None) -> int:
    environment = queue.register_env(name, 1.0, 4, 128, None, now, stream)
    assert environment is not None
    return environment.env_id


class Registrations(RuleBasedStateMachine):
    """Environments register, post, speak, leave and are silent, in a queue with space for few of
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue = started(8, Limits(silent_after=60.0))
        self.now = 0.0
        self.ids: list[int] = []
        self.seen: dict[int, float] = {}

    @rule(seconds=st.sampled_from([1.0, 61.0, FORGET_SECONDS]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def needed(self, env_id: int) -> bool:
        return any(group.line == env_id for group in self.queue._held())

    @rule()
    def register(self) -> None:
        before = {env_id for env_id in self.queue.registry.by_id if env_id >= 0}
        try:
            env_id = come(self.queue, self.now)
        except RegistryFullError:
            assert len(before) >= MOST
            assert all(
                self.needed(one)
                or (self.queue.registry.by_id[one].connected and self.now - self.seen[one] <= 60)
                for one in before
            )
            return
        assert env_id not in self.ids, "no id comes twice"
        gone = before - self.queue.registry.by_id.keys()
        for one in gone:
            assert not self.needed(one)
        kept_silent = [
            one
            for one in before - gone
            if not self.needed(one) and self.now - self.seen[one] > FORGET_SECONDS
        ]
        assert not kept_silent
        self.ids.append(env_id)
        self.seen[env_id] = self.now

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        if not self.ids:
            return
        env_id = data.draw(st.sampled_from(self.ids))
        known = env_id in self.queue.registry.by_id
        what = data.draw(st.sampled_from(["post", "speak", "leave"]))
        if what == "post":
            self.queue.add(draft(4, env_id), self.now)
        elif not known:
            with pytest.raises(UnknownEnvironmentError):
                self.queue.status_env(env_id, self.now)
            return
        elif what == "speak":
            self.queue.status_env(env_id, self.now)
        else:
            self.queue.disconnect_env(env_id)
            return
        if known:
            self.seen[env_id] = self.now

    @rule()
    def train(self) -> None:
        take(self.queue, self.now)

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.queue.registry.last_seen) <= MOST
        assert set(self.queue.lines.by_line) == set(self.queue.registry.by_id)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_ENVIRONMENTS", MOST)
    monkeypatch.setattr(run_state, "MAX_NAMES", MOST)


@pytest.mark.usefixtures("few")
class TestRegistrations(Registrations.TestCase):
    """The machine, with the small bounds."""


def test_a_restart_keeps_ids_apart_and_forgets_what_was_forgotten(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "run.db")
    queue = started(8)
    store.commit([queue.take_changes()])
    for _ in range(3):
        come(queue, 0.0)
    store.commit([queue.take_changes()])
    last = come(queue, FORGET_SECONDS + 1)
    queue.disconnect_env(last)
    assert [one for one in queue.registry.by_id if one >= 0] == [last]
    store.commit([queue.take_changes()])
    again = RolloutQueue(None, store.load())
    assert [one for one in again.registry.by_id if one >= 0] == [last]
    assert come(again, 0.0) == last + 1
    store.close()


def test_names_are_remembered_up_to_a_bound() -> None:
    queue = started(8)
    for number in range(20):
        come(queue, FORGET_SECONDS * 2 * number, f"task {number}")
    assert len(queue.registry.name_counts) <= MOST
    assert queue.registry.by_id[19].wandb_name == "task 19_0"
    assert come(queue, FORGET_SECONDS * 2 * 20, "task 19") == 20
    assert queue.registry.by_id[20].wandb_name == "task 19_1"


def test_streams_are_never_forgotten_and_so_refused_beyond_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_module, "MAX_STREAMS", 2)
    queue = started(8)
    come(queue, 0.0, stream="a")
    come(queue, 0.0, stream="b")
    come(queue, 0.0, stream="a")
    with pytest.raises(RegistryFullError, match="2 streams"):
        come(queue, 0.0, stream="c")


def test_reference_workers_are_forgotten_after_a_day_of_silence() -> None:
    stage = ReferenceQueue()
    stage.lend("old", "m", 1, 1.0, 0.0)
    stage.lend("new", "m", 1, 1.0, FORGET_SECONDS)
    assert list(stage.workers) == ["old", "new"]
    stage.lend("new", "m", 1, 1.0, FORGET_SECONDS + 1)
    assert list(stage.workers) == ["new"]


def test_publishers_of_servers_are_bounded() -> None:
    table = FleetStatus()
    for number in range(MAX_PUBLISHERS):
        table = table.updated(str(number), [], 0.0, 0.0)
    with pytest.raises(TooManyPublishersError, match="64 may"):
        table.updated("one more", [], 0.0, 0.0)
    assert table.updated("0", [], 0.0, 0.0).published == 0.0
    assert table.updated("later", [], 61.0, 61.0).published == 61.0
