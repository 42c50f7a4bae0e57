"""The file that keeps rollouts for people to read: an SQLite database of a bounded size, from which
the oldest groups are removed first.

The run does not need it: its writer may be killed at any time, and loses the last moment then. A
rollout has a row of numbers, its text for the search, and the trainer's report of its tokens. Its
group has the body as it was posted. A list in any order walks along one index for each environment,
so a page of it takes the same time for any number of rollouts.
"""

from __future__ import annotations

import re
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from atroposlib.dashboard.rollouts.rollout_stats import (
    TrainedTokens,
    drift,
    logprobs_of,
    measured,
    places_of,
    sampled_places,
    told_of_each,
)
from atroposlib.dashboard.rollouts.text import TextOfTokens, preview, searched_text

ARCHIVE = "rollouts.db"
"""Name of the archive in the folder of observed state; the second run has `rollouts.2.db`, and so
on."""
_NAMED = re.compile(r"rollouts(?:\.(\d+))?\.db")
FORMAT = 1
APPLICATION_ID = 0x4C6F526F
"""Marks the file as ours."""
MAX_BYTES = 1 << 30
MAX_ROLLOUTS = 1_000_000
MAX_ENVIRONMENTS, OTHERS = 500, "others"
"""Number of environments with a name of their own, and the name of all further ones."""
_ROW_BYTES = 300
"""Approximate bytes of a rollout's numbers in the table and its indexes."""

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE environments (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY AUTOINCREMENT, seq INTEGER NOT NULL, time REAL NOT NULL, environment INTEGER NOT NULL,
    size INTEGER NOT NULL, first INTEGER NOT NULL, n_bytes INTEGER NOT NULL, body BLOB NOT NULL);
CREATE INDEX groups_by_seq ON groups (seq, id);
CREATE INDEX groups_by_rollout ON groups (first);
CREATE INDEX groups_by_size ON groups (n_bytes, size);
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY, environment INTEGER NOT NULL, score REAL, tokens INTEGER NOT NULL, sampled INTEGER NOT NULL,
    mean_logprob REAL, oldest INTEGER, newest INTEGER, finish_reason TEXT NOT NULL, drift REAL, trained_version INTEGER,
    preview TEXT NOT NULL);
CREATE INDEX rollouts_by_age ON rollouts (environment, id);
CREATE INDEX rollouts_from_best ON rollouts (environment, score, id) WHERE score IS NOT NULL;
CREATE INDEX rollouts_from_worst ON rollouts (environment, score, id DESC) WHERE score IS NOT NULL;
CREATE INDEX rollouts_by_length ON rollouts (environment, sampled, id);
CREATE INDEX rollouts_by_drift ON rollouts (environment, drift, id) WHERE drift IS NOT NULL;
CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE trained (
    id INTEGER PRIMARY KEY, weight_version INTEGER NOT NULL, trained INTEGER NOT NULL,
    logprobs BLOB NOT NULL, entropies BLOB NOT NULL, advantages BLOB NOT NULL);
"""


class ArchiveError(RuntimeError):
    """The file cannot be used. The message names it and the remedy."""


class ArchiveFullError(ArchiveError):
    """The disk has no space for the file."""


@dataclass(frozen=True)
class PostedGroup:
    """A group as it came.

    Attributes:
        seq: the service's number for it.
        time: when it came, in Unix seconds.
        environment: its name; empty if it has none.
        body: JSON, as it was posted.
    """

    seq: int
    time: float
    environment: str
    body: bytes


def newest_archive(folder: Path) -> Path | None:
    """Return the archive of the last run whose rollouts are in a folder; None if there is none."""
    archives = {
        number: path
        for path in folder.glob("rollouts*.db")
        if (number := _number(path)) is not None
    }
    return archives.get(max(archives, default=0))


def _number(path: Path) -> int | None:
    """Return the number of an archive's run; None for another file."""
    match = _NAMED.fullmatch(path.name)
    return match and int(match[1] or 1)


def archive_of_next_run(path: Path) -> Path:
    """Return the path of the next run's archive, and remove the archive of the run before `path`.

    A folder holds at most two archives.
    """
    number = _number(path) or 1
    before = path.with_name(ARCHIVE if number == 2 else f"rollouts.{number - 1}.db")
    for end in ("", "-wal", "-shm"):
        Path(f"{before}{end}").unlink(missing_ok=True)
    return path.with_name(f"rollouts.{number + 1}.db")


def connect(path: Path, read_only: bool = False) -> sqlite3.Connection:
    """Connect to an archive. One thread at a time may use the connection.

    Raises:
        ArchiveError: the file is not an archive, or cannot be opened.
    """
    try:
        mode = "?mode=ro" if read_only else ""
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}{mode}",
            uri=True,
            timeout=10,
            isolation_level=None,
            check_same_thread=False,
        )
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    except sqlite3.Error as error:
        raise _unusable(path, error) from None
    if (application, version) != (APPLICATION_ID, FORMAT) and (read_only or not empty):
        connection.close()
        raise ArchiveError(
            f"{path} is no archive of rollouts of format {FORMAT} (application id {application:#x}, format {version}); "
            "move it away for a new one"
        )
    return connection


def _unusable(path: Path, error: sqlite3.Error) -> ArchiveError:
    if is_full(error):
        return ArchiveFullError(
            f"the archive of rollouts {path} cannot be opened: {error}; make room there"
        )
    return ArchiveError(
        f"the archive of rollouts {path} cannot be opened: {error}; move it away for a new one"
    )


def is_full(error: sqlite3.Error) -> bool:
    """Return True for the errors of a full disk or a used-up quota."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


class Archive:
    """Writes an archive, in one thread.

    Args:
        path: the file, which is made if there is none.
        most_bytes, most_rollouts: approximate limits of its size.

    Raises:
        ArchiveError: see connect.
    """

    def __init__(
        self, path: Path, most_bytes: int = MAX_BYTES, most_rollouts: int = MAX_ROLLOUTS
    ) -> None:
        self.path, self.most_bytes, self.most_rollouts = path, most_bytes, most_rollouts
        self.text = TextOfTokens()
        """Of the model's tokens."""
        self._connection = connect(path)
        run = self._connection.execute
        try:
            run("PRAGMA journal_mode = WAL")
            run("PRAGMA synchronous = NORMAL")
            run(
                "PRAGMA secure_delete = OFF"
            )  # to write zeros over old groups would need space on a full disk
            run("PRAGMA temp_store = MEMORY")
            run("PRAGMA journal_size_limit = 16777216")
            if run("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                self._connection.executescript(
                    f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT}; COMMIT;"
                )
            self._look()
        except sqlite3.Error as error:
            self._connection.close()
            raise _unusable(path, error) from None

    def _look(self) -> None:
        """See what is in the file."""
        run = self._connection.execute
        self._environments: dict[str, int] = dict(
            run("SELECT name, id FROM environments").fetchall()
        )
        self._bytes, self._rollouts = run(
            "SELECT coalesce(sum(n_bytes), 0), coalesce(sum(size), 0) FROM groups"
        ).fetchone()
        (newest,) = run("SELECT coalesce(max(id), 0) FROM rollouts").fetchone()
        self._next = newest + 1

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def begin(self) -> None:
        """Begin a transaction."""
        self._connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """End the transaction. The oldest groups beyond the limits are removed first."""
        self._make_room()
        self._connection.execute("COMMIT")

    def roll_back(self) -> None:
        """Undo everything since `begin`."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
        self._look()

    def keep_tokenizer(self, content: bytes) -> None:
        """Keep the tokenizer with the rollouts, so that they can be read where the model is not."""
        self.keep_fact("tokenizer", zlib.compress(content, 6))

    def keep_fact(self, name: str, value: bytes) -> None:
        """Keep a fact about the whole archive."""
        self._connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def add(self, posted: PostedGroup) -> int:
        """Keep a group, and return its id.

        Raises:
            ValueError, TypeError, LookupError: the body is not a group. Nothing of it is kept.
        """
        group = orjson.loads(posted.body)
        if not isinstance(group, dict):
            raise ValueError("a group is an object")
        places = places_of(group)
        numbers = measured(group, places)
        if not numbers:
            raise ValueError("a group has scores")
        texts = [
            searched_text(group, index, self.text, places[index]) for index in range(len(numbers))
        ]
        body = zlib.compress(posted.body, 1)
        environment, first = self._environment(posted.environment), self._next
        n_bytes = len(body) + sum(len(whole) + len(preview(whole)) + _ROW_BYTES for whole in texts)
        run = self._connection.execute
        number = run(
            "INSERT INTO groups (seq, time, environment, size, first, n_bytes, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (posted.seq, posted.time, environment, len(numbers), first, n_bytes, body),
        ).lastrowid
        rows: list[tuple[Any, ...]] = [
            (first + index, environment, one.score, one.tokens, one.sampled, one.mean_logprob, one.oldest, one.newest,
             one.finish_reason[:64], preview(texts[index]))
            for index, one in enumerate(numbers)
        ]  # fmt: skip
        self._connection.executemany(
            "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, ?)", rows
        )
        self._connection.executemany(
            "INSERT INTO texts VALUES (?, ?)",
            [(first + index, text) for index, text in enumerate(texts) if text],
        )
        self._next += len(numbers)
        self._bytes += n_bytes
        self._rollouts += len(numbers)
        return int(number or 0)

    def _environment(self, name: str) -> int:
        known = self._environments.get(name)
        if known is None and len(self._environments) >= MAX_ENVIRONMENTS and name != OTHERS:
            return self._environment(OTHERS)
        if known is None:
            self._connection.execute(
                "INSERT OR IGNORE INTO environments (name) VALUES (?)", (name,)
            )
            (known,) = self._connection.execute(
                "SELECT id FROM environments WHERE name = ?", (name,)
            ).fetchone()
            self._environments[name] = known
        return int(known)

    def group_of(self, seq: int) -> int | None:
        """Return the id of the newest group with this number of the service; None if it is not kept."""
        row = self._connection.execute(
            "SELECT id FROM groups WHERE seq = ? ORDER BY id DESC LIMIT 1", (seq,)
        ).fetchone()
        return row and int(row[0])

    def add_trained(self, group: int, reports: Iterable[tuple[int, TrainedTokens]]) -> None:
        """Keep the trainer's numbers for rollouts of a group, by their place in it.

        They replace earlier ones.
        """
        first, size, body = self._connection.execute(
            "SELECT first, size, body FROM groups WHERE id = ?", (group,)
        ).fetchone()
        content = orjson.loads(zlib.decompress(body))
        masks = told_of_each(content, "masks")
        for place, trained in reports:
            if place >= size:
                continue
            logprobs, places = logprobs_of(content, place), sampled_places(masks[place])
            difference = drift(logprobs[places], trained) if len(logprobs) else None
            columns = [
                row.astype("<f4").tobytes()
                for row in (trained.logprobs, trained.entropies, trained.advantages)
            ]
            before = self._trained_bytes(first + place)
            self._connection.execute(
                "INSERT OR REPLACE INTO trained VALUES (?, ?, ?, ?, ?, ?)",
                (first + place, trained.weight_version, trained.trained, *columns),
            )
            self._connection.execute(
                "UPDATE rollouts SET drift = ?, trained_version = ? WHERE id = ?",
                (difference, trained.weight_version, first + place),
            )
            grown = sum(map(len, columns)) - before
            self._connection.execute(
                "UPDATE groups SET n_bytes = n_bytes + ? WHERE id = ?", (grown, group)
            )
            self._bytes += grown

    def _trained_bytes(self, rollout: int) -> int:
        (size,) = self._connection.execute(
            "SELECT coalesce(sum(length(logprobs) + length(entropies) + length(advantages)), 0) "
            "FROM trained WHERE id = ?",
            (rollout,),
        ).fetchone()
        return int(size)

    def add_parity(self, parity: dict[str, Any], groups: Sequence[int]) -> None:
        """Keep the result of a step's comparison of tokens.

        Args:
            parity: as `parity_of` returns it.
            groups: numbers of the batch's groups, in the trainer's order.
        """
        run = self._connection.execute
        first = parity["first"]
        if first is not None and first.get("weight_version") == parity["weight_version"]:
            number = first.get("group")
            first = first | {"archived": None}
            if isinstance(number, int) and 0 <= number < len(groups):
                first["archived"] = self.group_of(groups[number])
            if run("SELECT 1 FROM facts WHERE name = 'first_mismatch'").fetchone() is None:
                self.keep_fact("first_mismatch", orjson.dumps(first))
        totals = {"compared": parity["compared_in_all"], "mismatched": parity["mismatched_in_all"]}
        self.keep_fact("parity", orjson.dumps(totals))

    def _make_room(self) -> None:
        run = self._connection.execute
        while self._bytes > self.most_bytes or self._rollouts > self.most_rollouts:
            row = run(
                "SELECT id, first, size, n_bytes FROM groups WHERE id < (SELECT max(id) FROM groups) ORDER BY id LIMIT 1"
            ).fetchone()
            if row is None:  # the newest stays, whatever its size
                return
            group, first, size, n_bytes = row
            run("DELETE FROM groups WHERE id = ?", (group,))
            for table in ("rollouts", "texts", "trained"):
                run(f"DELETE FROM {table} WHERE id >= ? AND id < ?", (first, first + size))
            self._bytes -= n_bytes
            self._rollouts -= size
