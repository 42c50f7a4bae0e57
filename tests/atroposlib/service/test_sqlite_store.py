"""The durable store: what comes back, what is refused, and that nothing is ever half stored."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import Evaluation, Group, Limits, ValidatedGroup
from atroposlib.service.run_state import MAX_BYTES, MAX_KEPT, Evaluations
from atroposlib.service.schemas import Registration
from atroposlib.service.sqlite_store import FORMAT, MAX_VARIABLES, PAGE_SIZE, SqliteStore, set_aside
from atroposlib.service.store import Changes, DamagedError, StoreError
from tests.atroposlib.service.conftest import ROOT
from tests.atroposlib.service.trainers import registered, stored

WEIGHTS = ((0, 0),)
SQLITE_FUNCTION = 31
"""The authorizer's code for a call of a function; the module has no name for it."""


def draft(
    body: bytes = b"{}", size: int = 4, env_id: int | None = None, key: str | None = None
) -> ValidatedGroup:
    return ValidatedGroup(body, size, 10, env_id, (), key)


def added(seq: int, body: bytes = b"{}") -> Changes:
    changes = Changes()
    changes.add(Group(seq, -1, 1, 1, len(body), WEIGHTS), body)
    return changes.take()


def registration(batch_size: int = 8) -> Registration:
    return registered(1, "g", "p", batch_size, 128, "c", 5, 0, 100, max_staleness=None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore(path)
    yield opened
    opened.close()


def state_of(queue: RolloutQueue) -> object:
    """All that must be the same after a restart."""
    queue._state_changed = True
    state = orjson.loads(queue.take_changes().records["state", 0])
    state.pop("next_seq")
    return (
        state,
        {line: list(groups) for line, groups in queue.lines.by_line.items() if groups},
        {line: [group.seq for group in groups] for line, groups in queue.buffers.items() if groups},
        [
            (lease.batch_id, lease.sent, lease.returned, [g.seq for g in lease.groups])
            for lease in queue.leases.values()
        ],
        {
            env_id: (e.wandb_name, e.clock, e.connected)
            for env_id, e in queue.registry.by_id.items()
        },
        list(queue.keys),
        (queue.held_groups, queue.held_bytes, queue.lines.groups, queue.lines.total_sequences()),
        queue.evaluations.after(0),
    )


def test_a_restart_finds_everything_as_it_was(path: Path) -> None:
    store = SqliteStore(path)
    queue = RolloutQueue(Limits(max_keys=2))

    def save() -> None:
        store.commit([queue.take_changes()])

    def check() -> None:
        nonlocal store, queue
        save()
        before = state_of(queue)
        store.close()
        store = SqliteStore(path)
        queue = RolloutQueue(Limits(max_keys=2), store.load())
        assert state_of(queue) == before

    queue.register(registration())
    queue.next_batch(0.0)
    check()
    env = queue.register_env("task", 2.0, 4, 128, 0.25, 0.0)
    assert env is not None
    for number in range(5):
        queue.add(draft(b'{"n":%d}' % number, env_id=env.env_id, key=f"key {number}"), 0.0)
    queue.add(draft(size=3, env_id=env.env_id), 0.0)
    check()
    lease = queue.next_batch(0.0)
    assert lease is not None
    queue.sending(lease)
    queue.sent(lease, complete=True)
    check()
    told = {
        "time": 1.5,
        "env_id": 0,
        "name": "task",
        "weight_version": None,
        "metrics": {"accuracy": 0.1},
    }
    numbers = [queue.evaluated(0.0, **told) for _ in range(MAX_KEPT + 2)]
    assert [known.id for known in queue.evaluations.after(MAX_KEPT)] == numbers[-2:]
    check()
    assert queue.evaluations.after(0)[0].id == 3, "the oldest are forgotten first"
    queue.join_fleet("http://one:1", keyed=False)
    check()
    queue.register(registration())
    check()
    queue.register(registration(4))
    check()
    queue.next_batch(0.0, received=0)
    queue.ack(None, version=3)
    check()
    seqs = [group.seq for group in queue.lines]
    assert store.bodies(seqs) == [b'{"n":%d}' % seq for seq in seqs]
    queue.reset()
    check()
    assert queue.held_groups == 0
    assert queue.evaluated(0.0, **told) == MAX_KEPT + 3, (
        "ids go on, for whoever asks after the last one that it knows"
    )
    store.close()


def test_bodies_are_read_from_the_file_when_memory_has_let_go_of_them(store: SqliteStore) -> None:
    body = bytes(range(256)) * 4096
    store.commit([added(seq, body) for seq in range(70)])
    assert store.bodies_at_hand([69]) == [body]
    assert store.bodies_at_hand([0]) is None, "70 MiB are more than it keeps"
    assert store.bodies([0, 69]) == [body, body]


@pytest.mark.parametrize("name", ["itself", "symbolic_link", "link_of_the_folder", "hard_link"])
def test_two_services_cannot_share_a_file_by_any_name(
    store: SqliteStore, path: Path, tmp_path: Path, name: str
) -> None:
    other = {"itself": path, "link_of_the_folder": tmp_path / "folder" / path.name}.get(
        name, tmp_path / "other.db"
    )
    if name == "symbolic_link":
        other.symlink_to(path)
    elif name == "hard_link":
        other.hardlink_to(path)
    elif name == "link_of_the_folder":
        other.parent.symlink_to(tmp_path)
    script = f"""
from pathlib import Path
from atroposlib.service.sqlite_store import SqliteStore
SqliteStore(Path({str(other)!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (
        f"is in use by another service (pid {os.getpid()}); stop it, or pass another --store"
        in done.stderr
    )
    store.commit([added(0)])
    assert store.bodies([0]) == [b"{}"]


def test_a_link_opens_the_store_that_it_names(path: Path, tmp_path: Path) -> None:
    store = SqliteStore(path)
    store.commit([added(0)])
    store.close()
    (tmp_path / "link.db").symlink_to(path)
    with closing(SqliteStore(tmp_path / "link.db")) as linked:
        assert linked.bodies([0]) == [b"{}"]
    with closing(SqliteStore(path)) as again:
        assert [one.seq for one in again.load().groups()] == [0]
    assert not list(tmp_path.glob("link.db?*")), (
        "all that lies beside it has the name of the file itself"
    )


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"folder .*nowhere does not exist"):
        SqliteStore(tmp_path / "nowhere" / "a.db")


@pytest.mark.parametrize(
    "content", [b"this is no database" * 100, b"SQLite format 3\x00" + b"\xff" * 4096]
)
def test_a_file_that_is_no_store_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        SqliteStore(path)
    assert path.read_bytes() == content


def test_another_programs_database_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE precious (x)")
    with pytest.raises(StoreError, match="is not a rollout store"):
        SqliteStore(path)


def test_a_damaged_body_is_noticed(path: Path) -> None:
    store = SqliteStore(path)
    body = b"precious rollout " * 20_000
    store.commit([added(0, body)])
    store.close()
    content = bytearray(path.read_bytes())
    content[content.rfind(b"precious") + 3] ^= 1
    path.write_bytes(content)
    store = SqliteStore(path)
    with pytest.raises(
        DamagedError, match=r"group 0 does not match its checksum.*damaged"
    ) as caught:
        store.bodies([0])
    assert caught.value.seqs == {0}
    store.close()


def test_a_body_that_sqlite_cannot_follow_does_not_keep_its_group_from_being_dropped(
    path: Path,
) -> None:
    store = SqliteStore(path)
    for seq in range(3):
        body = (
            bytes([65 + seq]) * 6 * PAGE_SIZE
        )  # on several pages; each begins with the number of the next
        store.commit([added(seq, body)])
    store.close()
    content = bytearray(path.read_bytes())
    page = next(
        at for at in range(0, len(content), PAGE_SIZE) if content[at + 100 : at + 200] == b"B" * 100
    )
    content[page : page + 4] = b"\xff" * 4
    path.write_bytes(content)
    store = SqliteStore(path)
    with pytest.raises(DamagedError, match="group 1 cannot be read") as caught:
        store.bodies([0, 1, 2])
    assert caught.value.seqs == {1}
    store.commit([Changes(records={("group", 1): None}, bodies={1: None})])
    assert [group.seq for group in store.load().groups()] == [0, 2]
    assert [body[:1] for body in store.bodies([0, 2])] == [b"A", b"C"]
    store.close()


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from atroposlib.service.records import Group
from atroposlib.service.store import Changes
from atroposlib.service.sqlite_store import SqliteStore
from atroposlib.service.store import StoreError

def added(seq, body):
    changes = Changes()
    changes.add(Group(seq, -1, 1, 1, len(body), ((0, 0),)), body)
    return changes.take()

store = SqliteStore(Path(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))
kept = []
for seq in range(200):
    body = bytes([seq]) * 300_000
    try:
        store.commit([added(seq, body)])
        kept.append(seq)
    except StoreError as error:
        print(error)
        break
try:
    store.commit([added(999, b"x" * 300_000)])
except StoreError as error:
    print("still refusing")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert [group.seq for group in store.load().groups()] == kept
assert store.bodies(kept) == [bytes([seq]) * 300_000 for seq in kept]
store.commit([added(1000, b"{}")])
store.close()
print("kept", len(kept))
"""


def test_a_full_disk_refuses_clearly_keeps_what_was_stored_and_recovers(path: Path) -> None:
    """The limit on file sizes makes the kernel fail the write, as a full disk does."""
    assert hasattr(resource, "RLIMIT_FSIZE")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refusal, still, kept = done.stdout.splitlines()
    assert str(path) in refusal
    assert "free some space" in refusal
    assert still == "still refusing"
    assert int(kept.split()[1]) >= 3
    store = SqliteStore(path)
    assert len(store.load().groups()) == int(kept.split()[1]) + 1
    store.close()


def test_it_needs_nothing_that_an_old_sqlite_lacks(store: SqliteStore) -> None:
    """No functions, JSON's among them: `->>` came with SQLite 3.38, and whole distributions link an
    older one.
    """
    calls: set[str] = set()

    def authorize(action: int, _: str | None, name: str | None, *__: str | None) -> int:
        if action == SQLITE_FUNCTION:
            calls.add(str(name))
        return sqlite3.SQLITE_OK

    store._writer.set_authorizer(authorize)
    queue = RolloutQueue(Limits(max_keys=2))
    queue.register(registration(4))
    for number in range(MAX_VARIABLES // 8 + 5):  # more than one statement takes
        queue.add(draft(b'{"n":%d}' % number, key=f"key {number}"), 0.0)
    store.commit([queue.take_changes()])
    before = state_of(queue)
    store.commit([queue.take_changes()])
    assert state_of(RolloutQueue(Limits(max_keys=2), store.load())) == before
    for _ in range(3):
        lease = queue.next_batch(0.0)
        assert lease is not None
        store.commit([queue.take_changes()])
        queue.ack(lease.batch_id)
    queue.register(registration(8))
    store.commit([queue.take_changes()])
    queue.reset()
    store.commit([queue.take_changes()])
    assert not store.load().groups()
    assert calls == set()


def test_keys_that_differ_behind_a_nul_are_two(store: SqliteStore) -> None:
    queue = RolloutQueue()
    keys = ["a", "a\0", "a\0b", "a\0c", "\0", "ü\0", "'\"[]"]
    for key in keys:
        queue.add(draft(key=key), 0.0)
        store.commit([queue.take_changes()])
    assert list(store.load().of("key")) == keys
    again = RolloutQueue(None, store.load())
    for key in keys:
        again.add(draft(key=key), 0.0)
    assert again.held_groups == len(keys)
    small = RolloutQueue(Limits(max_keys=3), store.load())
    small.add(draft(key="new"), 0.0)
    store.commit([small.take_changes()])
    assert list(store.load().of("key")) == [*keys[1:], "new"]


def test_a_commit_that_fails_in_an_unknown_way_stores_nothing_and_the_next_one_works(
    store: SqliteStore,
) -> None:
    nothing: Any = object()
    with pytest.raises(TypeError):
        store.commit([added(0), Changes(bodies={1: nothing})])
    assert store.load().groups() == []
    store.commit([added(1)])
    assert [group.seq for group in store.load().groups()] == [1]


def test_setting_a_store_aside(path: Path) -> None:
    assert set_aside(path) == 0
    SqliteStore(path).close()
    assert set_aside(path) == 0
    assert not path.exists()
    store = SqliteStore(path)
    store.commit([added(0)])
    store.close()
    assert set_aside(path) == 1
    moved = SqliteStore(path.with_suffix(".previous.db"))
    assert moved.bodies([0]) == [b"{}"]
    moved.close()


@pytest.mark.parametrize("version", [1, FORMAT - 1, FORMAT + 1])
def test_a_store_of_another_format_is_refused_and_left_alone(path: Path, version: int) -> None:
    store = SqliteStore(path)
    store.commit([added(0)])
    store.close()
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {version}")
    content = path.read_bytes()
    for call in (SqliteStore, set_aside):
        with pytest.raises(StoreError) as refusal:
            call(path)
        message = str(refusal.value)
        assert "\n" not in message
        assert (
            f"{path} has format {version}, and this service reads format {FORMAT} only" in message
        )
        assert "move the file away" in message
        assert path.read_bytes() == content


def test_evaluations_are_kept_within_so_many_bytes() -> None:
    """All that is kept may be asked for at once, and names of metrics may be long."""
    changes = Changes()
    kept = Evaluations(changes)
    metrics = {f"{n:0256}": 0.5 for n in range(256)}
    size = len(orjson.dumps(metrics))
    for _ in range(2 * MAX_BYTES // size):
        kept.add(1.5, None, "task", 3, metrics, weight_epoch=99)
    told = orjson.dumps([known.to_json() for known in kept.after(0)])
    assert MAX_BYTES - 2 * size < len(told) <= MAX_BYTES + MAX_KEPT
    assert kept.after(0)[-1].id == kept.next_id - 1, "the oldest are forgotten first"
    written = stored(changes.take()).of("evaluation")
    assert list(written) == [known.id for known in kept.after(0)]
    again = Evaluations(Changes())
    again.restore((Evaluation(**record) for record in written.values()), kept.next_id)
    assert again.after(0) == kept.after(0)
    kept.clear()
    kept.add(1.5, None, "task", 3, metrics)
    assert len(kept.after(0)) == 1
