"""A durable store: one SQLite file in WAL mode. One commit costs one fsync.

Bodies have a table of their own, because SQLite rewrites a whole row to change one column of it.

The lock keeps a second service from opening the store, by whatever name. The reserve is for what
empties the queue: batches that are handed out, acknowledgements, registrations. Posts are refused
while there is little space, but another program may fill the disk all the same. So a part of the
space is allocated to a file of its own. It is removed when a commit that empties the queue would
fail without it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import orjson

from atroposlib.service.store import (
    FIXED_BYTES,
    SLACK_BYTES,
    Changes,
    DamagedError,
    DiskSpace,
    RecordKey,
    Snapshot,
    Store,
    StoreError,
    megabytes,
)
from atroposlib.utils.processes import file_users

logger = logging.getLogger(__name__)

# ---- the files: a lock, a check that they keep their names, and a reserve of disk space ----

LOCKED_BYTE = 1 << 62
"""Far beyond the bytes that SQLite locks in the same file."""
RESERVE_BYTES = 64 << 20
"""Enough for hundreds of commits, and for many more as the log is folded into the file between
them."""


def lock_file(path: Path) -> int:
    """Make the file if there is none, and lock it until the returned descriptor is closed.

    The lock belongs to the open file, not to the process: SQLite drops all locks of the process
    whenever it closes the file.

    Raises:
        StoreError: another service has it, or it cannot be opened.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreError(f"store {path}: {error.strerror}; pass another --store") from None
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock())
            # The service that had it may have moved the file away before it let go.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        except OSError as error:
            status = os.fstat(descriptor)
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise StoreError(
                    f"store {path}: it cannot be locked: {error.strerror}; pass another --store"
                ) from None
            pids = ", ".join(map(str, file_users(status))) or "not visible here"
            raise StoreError(
                f"store {path} is in use by another service (pid {pids}); stop it, or pass another --store"
            ) from None
        os.close(descriptor)


def require_same_files(opened: Mapping[Path, os.stat_result]) -> None:
    """Check that open files still have their names.

    Data that is written to a file without a name is gone when the process ends, although each write
    succeeds.

    Raises:
        StoreError: a file was removed, moved or replaced.
    """
    for path, before in opened.items():
        try:
            if os.path.samestat(os.stat(path), before):
                continue
            loss = "was replaced by another file"
        except OSError as error:
            loss = f"is not in its place ({error.strerror})"
        raise StoreError(
            f"store: {path} {loss}, so new data would be lost when this service ends. Put the "
            "old file back, or start the service again with another --store"
        )


def _flock() -> bytes:
    """Return the C structure that asks for a write lock on one byte."""
    return struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, LOCKED_BYTE, 1, 0)


class Reserve:
    """The file that holds the reserve.

    Args:
        path: of the file. One that an earlier service left is taken over.
        size: bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.is_whole = self._is_allocated()
        self.lacks_space = False
        """The last attempt to allocate it failed for want of space."""
        self._complained = False

    def _is_allocated(self) -> bool:
        try:
            file = self.path.lstat()
        except OSError:
            return False
        return (
            file.st_size == self.size and file.st_blocks * 512 >= self.size
        )  # a copy may have holes

    def build(self, free: int) -> None:
        """Allocate the reserve, if it is not there and enough of the disk is free."""
        if self.is_whole or free < self.size + FIXED_BYTES:
            return
        try:
            self.path.unlink(missing_ok=True)
            descriptor = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            try:
                os.posix_fallocate(descriptor, 0, self.size)
            finally:
                os.close(descriptor)
        except OSError as error:  # a quota, or another program that was faster
            self._remove()
            self.lacks_space = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not self._complained:
                logger.warning(
                    "store: cannot allocate %s for %s: %s",
                    megabytes(self.size),
                    self.path,
                    error.strerror,
                )
            self._complained = True
            return
        self.is_whole, self.lacks_space, self._complained = True, False, False

    def release(self) -> bool:
        """Give the space back to the disk. Returns False if there was none to give."""
        self.is_whole = False
        return self._remove()

    def _remove(self) -> bool:
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.error("store: the reserve %s cannot be removed: %s", self.path, error.strerror)
            return False
        return True


T = TypeVar("T")

# ---- the database ----

APPLICATION_ID = 0x4C6F636B
"""Marks the file as ours."""
FORMAT = 6
"""The layout of the tables. The store refuses a file with another number."""

SCHEMA = """
CREATE TABLE records (kind TEXT NOT NULL, id NOT NULL, record BLOB NOT NULL, PRIMARY KEY (kind, id));
CREATE TABLE bodies (seq INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL);
"""

PAGE_SIZE = 65536
"""Bodies are long: larger pages make fewer links."""
CHECKPOINT_PAGES = 512
"""32 MiB of log before it is copied into the file. Much of it has been handed out and freed by
then.

If the disk is full, the file grows by as much with the space of the reserve. So the log is at most
half of that.
"""
RECENT_BYTES = 64 << 20
"""Bodies of the newest groups are kept in memory, since most are handed out soon."""
SMALL_BYTES = 8 << 20
"""A file that holds less than this is rewritten without its free pages when the disk is full."""
MAX_VARIABLES = 999
"""In one statement. Every SQLite takes this many, even a version before 3.32."""


class Statements:
    """Changes tables within a transaction that the caller begins and ends.

    Args:
        connection: to the file.
        unreadable: groups whose bodies cannot be deleted.
    """

    def __init__(self, connection: sqlite3.Connection, unreadable: Collection[int]) -> None:
        self._run = connection.execute
        self._unreadable = unreadable

    def apply(self, together: Sequence[Changes]) -> None:
        """Apply several changes, in their order."""
        records: dict[RecordKey, Any] = {}
        bodies: dict[int, bytes | None] = {}
        for changes in together:
            records |= changes.records
            bodies |= changes.bodies
        gone: dict[str, list[int | str]] = {}
        for (kind, id), record in records.items():
            if record is None:
                gone.setdefault(kind, []).append(id)
        for of_kind, ids in gone.items():
            self._delete("records WHERE kind = ? AND id", ids, of_kind)
        unwanted = [seq for seq, body in bodies.items() if body is None]
        self._delete("bodies WHERE seq", [seq for seq in unwanted if seq not in self._unreadable])
        kept = [(*key, record) for key, record in records.items() if record is not None]
        self._insert("records", kept)
        new = [(seq, zlib.crc32(body), body) for seq, body in bodies.items() if body is not None]
        self._insert("bodies", new)

    def _insert(self, into: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Insert many rows with one statement.

        Each statement releases the interpreter to other threads and then waits for it. So few
        statements are faster than short ones.
        """
        for some in _chunks(rows, MAX_VARIABLES // len(rows[0]) if rows else 1):
            row = f"({', '.join('?' * len(some[0]))})"
            values = [value for entry in some for value in entry]
            self._run(
                f"INSERT OR REPLACE INTO {into} VALUES {', '.join([row] * len(some))}", values
            )

    def _delete(self, condition: str, values: Sequence[int | str], *first: str) -> None:
        """Delete many rows at a time. The condition ends before its `IN`; `first` are its earlier
        parameters.
        """
        for some in _chunks(values, MAX_VARIABLES - len(first)):
            self._run(f"DELETE FROM {condition} IN ({', '.join('?' * len(some))})", [*first, *some])

    def wipe(self) -> None:
        for table in ("records", "bodies"):
            self._run(f"DELETE FROM {table}")


def _chunks(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


class RecentBodies:
    """The newest bodies, up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._bodies: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def follow(self, changes: Changes) -> None:
        """Keep what was added, let go of what was removed."""
        if changes.wipe:
            self.clear()
        for seq, body in changes.bodies.items():
            self._bytes -= len(self._bodies.pop(seq, b""))
            if body is not None:
                self._bodies[seq] = body
                self._bytes += len(body)
        while self._bytes > self.most_bytes:
            self._bytes -= len(self._bodies.popitem(last=False)[1])

    def get(self, seqs: Sequence[int]) -> list[bytes] | None:
        """Return the bodies, or None unless all are there."""
        if not all(seq in self._bodies for seq in seqs):
            return None
        return [self._bodies[seq] for seq in seqs]

    def clear(self) -> None:
        """Let go of all."""
        self._bodies.clear()
        self._bytes = 0


class SqliteStore(Store):
    """Keeps everything in the file at `path`. No two processes can have it open.

    Args:
        path: of the file.
        reserve: bytes of the disk that are kept for what empties the queue.

    Raises:
        StoreError: the file cannot be opened, belongs to another program, is damaged, or is in use.
    """

    durable = True

    def __init__(self, path: Path, reserve: int = RESERVE_BYTES) -> None:
        self.path = path
        if not path.parent.is_dir():
            raise StoreError(
                f"{path}: the folder {path.parent} does not exist; create it, or pass another --store"
            )
        self._file = (
            path.resolve()
        )  # SQLite names its log after the file, so a link must not have a log of its own
        self._lock = lock_file(self._file)
        self._reserve = Reserve(Path(f"{self._file}-reserve"), reserve)
        self._recent = RecentBodies(RECENT_BYTES)
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._unreadable: set[int] = set()
        """Groups whose bodies SQLite cannot follow on the disk, and so cannot delete either."""
        try:
            self._writer, self._reader = self._open()
            self._statements = Statements(self._writer, self._unreadable)
            self._opened = {file: os.stat(file) for file in (self._file, Path(f"{self._file}-wal"))}
        except (sqlite3.Error, StoreError, OSError) as error:
            failure = error if isinstance(error, StoreError) else self._error(error)
            os.close(self._lock)
            raise failure from None
        self._reserve.build(self._free() - self._promised())
        self._look()

    def _open(self) -> tuple[sqlite3.Connection, sqlite3.Connection]:
        """Open the file. Even that needs some of the disk, to recover the log for instance."""
        try:
            return self._connections()
        except sqlite3.OperationalError as error:
            if not _wants_space(error) or not self._reserve.release():
                raise
            logger.warning("store %s: %s; its reserve is given to opening it", self.path, error)
            return self._connections()

    def _connections(self) -> tuple[sqlite3.Connection, sqlite3.Connection]:
        with ExitStack() as opened:
            writer = opened.enter_context(closing(self._connect()))
            self._prepare(writer)
            reader = opened.enter_context(closing(self._connect()))
            opened.pop_all()
            return writer, reader

    def _error(self, error: Exception) -> StoreError:
        text = str(error)
        remedy = "look at the disk and the file's permissions, or pass another --store"
        if isinstance(error, sqlite3.OperationalError) and _wants_space(error):
            folder = self.path.absolute().parent
            free = f"{megabytes(self._free())} are free on the disk of {folder}"
            remedy = (
                f"{free}: free some space, raise the quota, or look for faults of the disk (dmesg)"
            )
        elif "malformed" in text or "not a database" in text:
            remedy = "the file is damaged: restore it from a copy, or move it away to start with an empty one"
        return StoreError(f"store {self.path}: {text}; {remedy}")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._file, timeout=10, isolation_level=None, check_same_thread=False
        )
        connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
        connection.execute(
            "PRAGMA synchronous = FULL"
        )  # not only a kill: a power cut may not lose an answered post either
        pages = max(16, min(CHECKPOINT_PAGES, self._reserve.size // 2 // PAGE_SIZE))
        connection.execute(f"PRAGMA wal_autocheckpoint = {pages}")
        connection.execute(f"PRAGMA journal_size_limit = {2 * CHECKPOINT_PAGES * PAGE_SIZE}")
        connection.execute("PRAGMA cache_size = -32768")
        connection.execute(
            "PRAGMA secure_delete = OFF"
        )  # some builds write zeros over all that is deleted: an ack costs a batch
        connection.execute(
            "PRAGMA temp_store = MEMORY"
        )  # the folder for temporary files may be full too
        return connection

    def _prepare(self, writer: sqlite3.Connection) -> None:
        """Make the tables of a new file; refuse a file of another program or of another format."""
        (tables,) = writer.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables:
            self._require_format(writer)
        (mode,) = writer.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StoreError(
                f"store {self.path}: the file system cannot do write-ahead logging ({mode}); pass another --store"
            )
        if not tables:
            writer.executescript(
                f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT}; COMMIT;"
            )

    def _require_format(self, writer: sqlite3.Connection) -> None:
        (application,) = writer.execute("PRAGMA application_id").fetchone()
        (version,) = writer.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION_ID:
            raise StoreError(
                f"store {self.path} is not a rollout store (its application id is {application:#x}); pass another --store"
            )
        if version != FORMAT:
            raise StoreError(
                f"store {self.path} has format {version}, and this service reads format {FORMAT} "
                "only. Finish the run with the version that wrote it, or move the file away to "
                "start with an empty one"
            )

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
        snapshot = Snapshot()
        rows = self._writer.execute("SELECT kind, id, record FROM records ORDER BY rowid")
        for kind, id, record in rows:
            snapshot.records.setdefault(kind, {})[id] = orjson.loads(record)
        return snapshot

    def bodies_at_hand(self, seqs: Sequence[int]) -> list[bytes] | None:
        """The bodies, if all are still in memory."""
        return self._recent.get(seqs)

    def bodies(self, seqs: Sequence[int]) -> list[bytes]:
        """Bodies by sequence number, each checked against its checksum."""
        bodies: list[bytes] = []
        damaged: dict[int, str] = {}
        with self._reading:
            for seq in seqs:
                try:
                    row = self._reader.execute(
                        "SELECT crc, body FROM bodies WHERE seq = ?", (seq,)
                    ).fetchone()
                except sqlite3.Error as error:
                    if (
                        type(error) is not sqlite3.DatabaseError
                    ):  # its subclasses: the disk, not the content
                        raise self._error(error) from None
                    damaged[seq] = f"cannot be read ({error})"
                    self._unreadable.add(seq)
                    continue
                if row is None or zlib.crc32(row[1]) != row[0]:
                    damaged[seq] = "is missing" if row is None else "does not match its checksum"
                    continue
                bodies.append(row[1])
        if damaged:
            what = ", ".join(f"the body of group {seq} {how}" for seq, how in damaged.items())
            raise DamagedError(
                f"store {self.path}: {what}; the file is damaged: look at the disk that it is on",
                list(damaged),
            )
        return bodies

    # ---- writing ----

    def commit(self, together: Sequence[Changes]) -> None:
        """Write the changes in one transaction, and have it on the disk.

        New groups may not use the reserve. Everything else may, since it empties the queue or is
        small.
        """
        # A wipe removes all changes before it; the others are applied at once.
        wiped = max((index for index, changes in enumerate(together) if changes.wipe), default=0)
        wipes, left = any(changes.wipe for changes in together), together[wiped:]
        with self._writing:
            require_same_files(self._opened)
            try:
                try:
                    self._transact(wipes, left)
                except sqlite3.OperationalError as error:
                    if not _wants_space(error) or any(changes.adds_groups for changes in left):
                        raise
                    self._transact_from_reserve(wipes, left)
            except (sqlite3.Error, OSError) as error:
                self._look()
                raise self._error(error) from None
            for changes in together:
                self._recent.follow(changes)
            if not self._reserve.is_whole and self._free() < self._reserve.size + SLACK_BYTES:
                # The log must not fill the rest of the reserve.
                self._make_room()
            self._look()

    def _transact(self, wipes: bool, changes: Sequence[Changes]) -> None:
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            if wipes:
                self._statements.wipe()
            self._statements.apply(changes)
            self._writer.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def _transact_from_reserve(self, wipes: bool, changes: Sequence[Changes]) -> None:
        """Write changes for which the disk has no space: first into an emptied log, then with the
        reserve.
        """
        with self._reading:
            self._fold()
        try:
            self._transact(wipes, changes)
        except sqlite3.OperationalError as error:
            if not _wants_space(error) or not self._reserve.release():
                raise
            logger.warning(
                "store %s: %s; the reserve of %s is used for batches and acknowledgements, and new groups are refused",
                self.path, error, megabytes(self._reserve.size),
            )  # fmt: skip
            self._transact(wipes, changes)

    def _roll_back(self) -> None:
        try:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        except sqlite3.Error as error:
            logger.error("store %s: the rollback failed too: %s", self.path, error)

    # ---- space ----

    def _free(self) -> int:
        disk = os.fstatvfs(self._lock)
        return disk.f_bavail * disk.f_frsize

    def _promised(self) -> int:
        """Bytes by which the file will grow when the log is folded into it."""
        (pages,) = self._writer.execute("PRAGMA page_count").fetchone()
        return max(0, int(pages) * PAGE_SIZE - os.fstat(self._lock).st_size)

    def _look(self) -> None:
        """Measure the space."""
        try:
            (reusable,) = self._writer.execute("PRAGMA freelist_count").fetchone()
            reserve = self._reserve
            self.space = DiskSpace(
                self.path, self._free(), self._promised(), int(reusable) * PAGE_SIZE,
                reserve.size, reserve.is_whole, reserve.lacks_space,
            )  # fmt: skip
        except (sqlite3.Error, OSError) as error:
            logger.warning("store %s: its space cannot be measured: %s", self.path, error)

    def measure(self) -> None:
        """Measure the free space alone: all else changes with commits."""
        try:
            free = self._free()
        except OSError as error:
            logger.warning("store %s: its space cannot be measured: %s", self.path, error)
            return
        if self.space is not None:
            self.space = replace(self.space, free=free, measured=time.monotonic())

    def make_room(self) -> None:
        """Give back what the store does not need, rebuild the reserve if there is space for it, and
        measure what is left.
        """
        with self._writing:
            self._make_room()
            self._look()

    def _make_room(self) -> None:
        with self._reading:
            self._fold()
            self._shorten()
        try:
            self._reserve.build(self._free() - self._promised())
        except (sqlite3.Error, OSError) as error:
            logger.warning("store %s: its reserve cannot be rebuilt: %s", self.path, error)

    def _fold(self) -> None:
        """Fold the log into the file and empty it, with the reserve if need be.

        No other connection may be reading.
        """
        statement = "PRAGMA wal_checkpoint(TRUNCATE)"
        try:
            try:
                self._writer.execute(statement).fetchone()
            except sqlite3.OperationalError as error:
                # The file grows before the log shrinks.
                if not _wants_space(error) or not self._reserve.release():
                    raise
                self._writer.execute(statement).fetchone()
        except sqlite3.Error as error:  # the log stays as it is, and nothing is lost
            logger.warning(
                "store %s: its log cannot be folded into the file now: %s", self.path, error
            )

    def _shorten(self) -> None:
        """Rewrite a file that holds next to nothing, which gives its free pages back to the disk.

        No other connection may be reading.
        """
        try:
            (pages,) = self._writer.execute("PRAGMA page_count").fetchone()
            (unused,) = self._writer.execute("PRAGMA freelist_count").fetchone()
            if unused * PAGE_SIZE >= SLACK_BYTES and (pages - unused) * PAGE_SIZE <= SMALL_BYTES:
                self._writer.execute("VACUUM")
                self._fold()
        except sqlite3.Error as error:
            logger.info("store %s: it cannot be shortened now: %s", self.path, error)

    def close(self) -> None:
        """Fold the log into the file, and let go of it."""
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()
            os.close(self._lock)


def _wants_space(error: sqlite3.Error) -> bool:
    """Return True for what a full disk or a used-up quota looks like.

    A broken disk looks like the latter.
    """
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def set_aside(path: Path) -> int:
    """Move a store that an earlier service left behind out of the way.

    It goes to `<name>.previous.db` if it holds groups (an older one there is replaced), and is
    deleted if it does not.

    Returns:
        Number of groups that it holds.

    Raises:
        StoreError: it is in use or cannot be read.
    """
    if not path.exists():
        return 0
    store = SqliteStore(path)
    with closing(store):
        groups = len(store.load().of("group"))
    # Closing the last connection has folded the log into the file, so that the file alone is the
    # whole store.
    if groups:
        path.replace(path.with_suffix(".previous.db"))
    else:
        path.unlink()
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    return groups
