"""A durable store: one SQLite file in WAL mode. What is committed together costs one fsync.

Bodies have a table of their own, because SQLite rewrites a whole row to change one column of it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import orjson

from atroposlib.api.models.records import BUFFERED, QUEUED, REFERENCE, Changes, Evaluation, Group, Lease, Receipt, Snapshot
from atroposlib.api.store.store import DamagedError, RecentBodies, Store, StoreError

logger = logging.getLogger(__name__)
T = TypeVar("T")

PAGE_SIZE = 65536
"""Bodies are long: larger pages make fewer links."""
CHECKPOINT_PAGES = 1024
"""64 MiB of log before it is copied into the file. Much of it has been handed out and freed by then."""
MOST_VARIABLES = 999
"""In one statement: what every SQLite takes, those before 3.32 included."""
RECENT_BYTES = 64 << 20
"""Bodies of the newest groups are kept in memory, since most are handed out soon."""

APPLICATION_ID = 0x4C6F636B
"""Marks the file as ours."""
FORMAT = 5

SCHEMA = """
CREATE TABLE state (id INTEGER PRIMARY KEY CHECK (id = 1), record BLOB NOT NULL);
CREATE TABLE environments (env_id INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE groups (
    seq INTEGER PRIMARY KEY, line INTEGER NOT NULL, size INTEGER NOT NULL, longest INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL, weights TEXT NOT NULL, stated INTEGER NOT NULL, place INTEGER NOT NULL,
    tokens INTEGER NOT NULL, reference INTEGER NOT NULL, uses INTEGER NOT NULL);
CREATE TABLE bodies (seq INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE leases (batch_id INTEGER PRIMARY KEY, sent INTEGER NOT NULL, returned INTEGER NOT NULL);
CREATE TABLE keys (
    place INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, status TEXT NOT NULL, buffer_size INTEGER, reason TEXT);
CREATE TABLE evaluations (id INTEGER PRIMARY KEY, record BLOB NOT NULL);
"""

UPGRADE = {
    1: "ALTER TABLE groups ADD COLUMN stated INTEGER NOT NULL DEFAULT 0;",
    2: """
ALTER TABLE groups RENAME TO groups_before;
CREATE TABLE groups (
    seq INTEGER PRIMARY KEY, line INTEGER NOT NULL, size INTEGER NOT NULL, longest INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL, weights TEXT NOT NULL, stated INTEGER NOT NULL, place INTEGER NOT NULL);
INSERT INTO groups SELECT seq, line, size, longest, n_bytes, '[[0,' || version || ']]', stated, place FROM groups_before;
DROP TABLE groups_before;
DROP TABLE IF EXISTS clean_stop;
""",
    3: SCHEMA[SCHEMA.index("CREATE TABLE evaluations") :],
    # Bodies of before may have their empty ref_logprobs anywhere, so that no reference can be put into them.
    4: """
ALTER TABLE groups ADD COLUMN tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE groups ADD COLUMN reference INTEGER NOT NULL DEFAULT 1;
ALTER TABLE groups ADD COLUMN uses INTEGER NOT NULL DEFAULT 0;
UPDATE groups SET tokens = size * longest;
""",
}
"""From each earlier format to the one after it, for every SQLite: those before 3.35 can drop no column."""


class SqliteStore(Store):
    """Keeps everything in the file at `path`. No two processes can have it open.

    Raises:
        StoreError: the file cannot be opened, belongs to another program, is damaged, or is in use.
    """

    durable = True

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.parent.is_dir():
            raise StoreError(f"{path}: the folder {path.parent} does not exist; create it, or pass another --store")
        self._lock_file = self._take_lock()
        self._recent = RecentBodies(RECENT_BYTES)
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._unreadable: set[int] = set()
        """Groups whose bodies SQLite cannot follow on the disk, and so cannot delete either."""
        try:
            self._writer = self._connect()
            self._prepare()
            self._reader = self._connect()
        except sqlite3.Error as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> StoreError:
        text = str(error)
        remedy = "look at the disk and the file's permissions, or pass another --store"
        if "full" in text or "I/O" in text:
            remedy = "is the disk full? Free some space; until then nothing new is accepted"
        elif "malformed" in text or "not a database" in text:
            remedy = "the file is damaged: restore it from a copy, or move it away to start with an empty one"
        return StoreError(f"store {self.path}: {text}; {remedy}")

    def _take_lock(self) -> int:
        name = f"{self.path}.lock"
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"store {self.path}: {error.strerror}; pass another --store") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise StoreError(
                f"store {self.path} is in use by another service (pid {owner}); stop it, or pass another --store"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        return descriptor

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=10, isolation_level=None, check_same_thread=False)
        connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
        connection.execute("PRAGMA synchronous = FULL")  # not only a kill: a power cut may not lose an answered post either
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {2 * CHECKPOINT_PAGES * PAGE_SIZE}")
        connection.execute("PRAGMA cache_size = -32768")
        return connection

    def _prepare(self) -> None:
        new = self._writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        (application,) = self._writer.execute("PRAGMA application_id").fetchone()
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        if not new and (application != APPLICATION_ID or version not in (*UPGRADE, FORMAT)):
            raise StoreError(
                f"store {self.path} is not a rollout store of format {FORMAT} (application id {application:#x}, "
                f"format {version}); pass another --store"
            )
        (mode,) = self._writer.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StoreError(f"store {self.path}: the file system cannot do write-ahead logging ({mode}); pass another --store")
        if new:
            self._writer.executescript(
                f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT}; COMMIT;"
            )
        elif version != FORMAT:
            steps = "".join(UPGRADE[step] for step in range(version, FORMAT))
            self._writer.executescript(f"BEGIN; {steps} PRAGMA user_version = {FORMAT}; COMMIT;")

    # ---- reading ----

    def load(self) -> Snapshot:
        """Everything but the bodies."""
        with self._writing:
            self._recent.clear()  # it may hold what was never stored
            try:
                return self._snapshot()
            except sqlite3.Error as error:
                raise self._error(error) from None

    def _snapshot(self) -> Snapshot:
        run = self._writer.execute
        snapshot = Snapshot()
        for (record,) in run("SELECT record FROM state"):
            snapshot.state = orjson.loads(record)
        snapshot.environments = [orjson.loads(record) for (record,) in run("SELECT record FROM environments ORDER BY env_id")]
        leases = {
            batch_id: Lease(batch_id, [], bool(sent), bool(returned))
            for batch_id, sent, returned in run("SELECT batch_id, sent, returned FROM leases ORDER BY batch_id")
        }
        waiting = {QUEUED: snapshot.queued, BUFFERED: snapshot.buffered, REFERENCE: snapshot.for_reference}
        columns = "place, weights, stated, seq, line, size, longest, n_bytes, tokens, reference, uses"
        for place, listed, stated, *numbers in run(f"SELECT {columns} FROM groups ORDER BY seq"):
            seq, line, size, longest, n_bytes, *others = numbers
            weights = tuple((epoch, version) for epoch, version in orjson.loads(listed))
            group = Group(seq, line, size, longest, n_bytes, weights, bool(stated), 0, *others)
            (waiting[place] if place in waiting else leases[place].groups).append(group)
        snapshot.leases = list(leases.values())
        snapshot.keys = [
            (key, Receipt(*receipt))
            for key, *receipt in run("SELECT key, status, buffer_size, reason FROM keys ORDER BY place")
        ]
        snapshot.evaluations = [
            Evaluation(**orjson.loads(record)) for (record,) in run("SELECT record FROM evaluations ORDER BY id")
        ]
        return snapshot

    def bodies_at_hand(self, seqs: Sequence[int]) -> list[bytes] | None:
        """The bodies, if all are still in memory."""
        return self._recent.get(seqs)

    def bodies(self, seqs: Sequence[int]) -> list[bytes]:
        """Bodies by sequence number, each checked against its checksum."""
        found: list[bytes] = []
        damaged: dict[int, str] = {}
        with self._reading:
            for seq in seqs:
                try:
                    row = self._reader.execute("SELECT crc, body FROM bodies WHERE seq = ?", (seq,)).fetchone()
                except sqlite3.Error as error:
                    if type(error) is not sqlite3.DatabaseError:  # its subclasses: the disk, not the content
                        raise self._error(error) from None
                    damaged[seq] = f"cannot be read ({error})"
                    self._unreadable.add(seq)
                    continue
                if row is None or zlib.crc32(row[1]) != row[0]:
                    damaged[seq] = "is missing" if row is None else "does not match its checksum"
                    continue
                found.append(row[1])
        if damaged:
            what = ", ".join(f"the body of group {seq} {how}" for seq, how in damaged.items())
            raise DamagedError(f"store {self.path}: {what}; the file is damaged: look at the disk that it is on", list(damaged))
        return found

    # ---- writing ----

    def commit(self, together: Sequence[Changes]) -> None:
        """Write the changes in one transaction, and have it on the disk."""
        with self._writing:
            try:
                self._writer.execute("BEGIN IMMEDIATE")
                for changes in together:
                    if changes.wipe:
                        self._wipe()
                # What came before a wipe is gone; what is left is applied at once.
                wiped = max((index for index, changes in enumerate(together) if changes.wipe), default=0)
                self._apply(together[wiped:])
                self._writer.execute("COMMIT")
            except (sqlite3.Error, OSError) as error:
                self._roll_back()
                raise self._error(error) from None
            except BaseException:
                self._roll_back()
                raise
            for changes in together:
                self._recent.follow(changes)

    def _roll_back(self) -> None:
        try:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        except sqlite3.Error as error:
            logger.error("store %s: the rollback failed too: %s", self.path, error)

    def _apply(self, together: Sequence[Changes]) -> None:
        """Apply several changes, in their order."""
        run = self._writer.execute
        added = [entry for changes in together for entry in changes.added]
        if added:
            rows = []
            for group, _, place in added:
                weights = orjson.dumps(group.weights).decode()
                numbers = (group.seq, group.line, group.size, group.longest, group.n_bytes)
                rows.append((*numbers, weights, group.stated, place, group.tokens, group.reference, group.uses))
            self._insert("groups", rows)
            self._insert("bodies", [(group.seq, zlib.crc32(body), body) for group, body, _ in added])
        for seq, body in [entry for changes in together for entry in changes.referenced]:
            run("UPDATE bodies SET crc = ?, body = ? WHERE seq = ?", (zlib.crc32(body), body, seq))
            run("UPDATE groups SET n_bytes = ? WHERE seq = ?", (len(body), seq))
        for seq, reference in [entry for changes in together for entry in changes.reference]:
            run("UPDATE groups SET reference = ? WHERE seq = ?", (reference, seq))
        uses = dict([entry for changes in together for entry in changes.uses])
        for times in sorted(set(uses.values())):
            self._for_all("UPDATE groups SET uses = ? WHERE seq", [seq for seq, n in uses.items() if n == times], times)
        for changes in together:
            self._place(changes)
        removed = [seq for changes in together for seq in changes.removed]
        if removed:
            self._for_all("DELETE FROM groups WHERE seq", removed)
            self._for_all("DELETE FROM bodies WHERE seq", [seq for seq in removed if seq not in self._unreadable])
        environments = {record["env_id"]: record for changes in together for record in changes.environments}
        for env_id, record in environments.items():
            run("INSERT OR REPLACE INTO environments VALUES (?, ?)", (env_id, orjson.dumps(record)))
        keys: dict[str, Receipt | None] = {}
        for changes in together:
            keys.update(changes.keys_added)
            keys.update(dict.fromkeys(changes.keys_removed))
        if keys:
            self._for_all("DELETE FROM keys WHERE key", list(keys))
            kept = [(key, r.status, r.buffer_size, r.reason) for key, r in keys.items() if r is not None]
            self._insert("keys (key, status, buffer_size, reason)", kept)
        results = [(result.id, orjson.dumps(result)) for changes in together for result in changes.evaluations]
        if results:
            self._insert("evaluations", results)
        self._for_all("DELETE FROM evaluations WHERE id", [id for changes in together for id in changes.evaluations_removed])
        state = next((changes.state for changes in reversed(together) if changes.state is not None), None)
        if state is not None:
            run("INSERT OR REPLACE INTO state VALUES (1, ?)", (orjson.dumps(state),))

    def _insert(self, into: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Insert rows, many with one statement: each hands the interpreter to other threads and has to wait for it again,
        so few statements matter more than short ones."""
        for some in _chunks(rows, MOST_VARIABLES // len(rows[0]) if rows else 1):
            row = f"({', '.join('?' * len(some[0]))})"
            values = [value for entry in some for value in entry]
            self._writer.execute(f"INSERT INTO {into} VALUES {', '.join([row] * len(some))}", values)

    def _for_all(self, statement: str, values: Sequence[int | str], *first: int) -> None:
        """Run a statement that ends before its `IN`, for many values at a time. `first` are what it needs before them."""
        for some in _chunks(values, MOST_VARIABLES - len(first)):
            self._writer.execute(f"{statement} IN ({', '.join('?' * len(some))})", [*first, *some])

    def _place(self, changes: Changes) -> None:
        run = self._writer.execute
        place = "UPDATE groups SET place = ? WHERE seq"
        moved = dict(changes.moved)
        for to in sorted(set(moved.values())):
            self._for_all(place, [seq for seq, last in moved.items() if last == to], to)
        for batch_id, sent, returned, seqs in changes.leases:
            run("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", (batch_id, sent, returned))
            self._for_all(place, seqs, batch_id)
        for batch_id in changes.leases_removed:
            run("DELETE FROM leases WHERE batch_id = ?", (batch_id,))

    def _wipe(self) -> None:
        for table in ("state", "environments", "groups", "bodies", "leases", "keys", "evaluations"):
            self._writer.execute(f"DELETE FROM {table}")

    def close(self) -> None:
        """Fold the log into the file, and let go of it."""
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()
            os.close(self._lock_file)


def _chunks(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def set_aside(path: Path) -> int:
    """Move a store that an earlier service left behind out of the way.

    It goes to `<name>.previous.db` if it holds groups (an older one there is replaced), and is deleted if it does not.

    Returns:
        How many groups it holds.

    Raises:
        StoreError: it is in use or cannot be read.
    """
    if not path.exists():
        return 0
    store = SqliteStore(path)
    with closing(store):
        snapshot = store.load()
        waiting = len(snapshot.queued) + len(snapshot.buffered) + len(snapshot.for_reference)
        groups = waiting + sum(len(lease.groups) for lease in snapshot.leases)
    # Closing the last connection has folded the log into the file, so that the file alone is the whole store.
    if groups:
        path.replace(path.with_suffix(".previous.db"))
    else:
        path.unlink()
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    return groups
