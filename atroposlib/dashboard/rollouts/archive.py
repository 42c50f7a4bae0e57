"""The file that keeps rollouts for people to read: an SQLite database of a bounded size, from which
the oldest groups are removed first.

The run does not need it: its writer may be killed at any time, and loses the last moment then. A
rollout has a row of numbers, its text for the search, and the trainer's report of its tokens. Its
group has the body as it was posted. A list in any order walks along one index for each environment.
So a page of it takes the same time for any number of rollouts.
"""

from __future__ import annotations

import math
import re
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import orjson

from atroposlib.dashboard.rollouts.rollout_stats import (
    Parity,
    TrainedTokens,
    drift,
    entries_of,
    logprobs_of,
    numbers_of,
    places_of,
    sampled_places,
)
from atroposlib.dashboard.rollouts.text import TextOfTokens, preview, searched_text

ARCHIVE = "rollouts.db"
"""Name of the archive in the folder of observed state; the second run has `rollouts.2.db`, and so
on."""
_NAMED = re.compile(r"rollouts(?:\.(\d+))?\.db")
FORMAT = 2
APPLICATION_ID = 0x4C6F526F
"""Marks the file as ours."""
MAX_BYTES = 1 << 30
MAX_ROLLOUTS = 1_000_000
MAX_ENVIRONMENTS, OTHERS = 500, "others"
"""Number of environments with a name of their own, and the name of all further ones."""
_ROW_BYTES = 300
"""Approximate bytes of a rollout's numbers in the table and its indexes."""
MAX_LISTED = 200
SEARCH_SECONDS = 0.6
"""A search that takes longer answers with the rollouts so far, and with the position to go on
from."""
SEARCHED_AT_ONCE = 1000
"""Rollouts whose texts are searched between two looks at the clock."""

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
    preview TEXT NOT NULL, loss REAL AS (-score));
CREATE INDEX rollouts_by_age ON rollouts (environment, id);
CREATE INDEX rollouts_from_best ON rollouts (environment, score, id) WHERE score IS NOT NULL;
CREATE INDEX rollouts_from_worst ON rollouts (environment, loss, id) WHERE loss IS NOT NULL;
CREATE INDEX rollouts_by_length ON rollouts (environment, sampled, id);
CREATE INDEX rollouts_by_drift ON rollouts (environment, drift, id) WHERE drift IS NOT NULL;
CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE trained (
    id INTEGER PRIMARY KEY, weight_version INTEGER NOT NULL, trained INTEGER NOT NULL,
    logprobs BLOB NOT NULL, entropies BLOB NOT NULL, advantages BLOB NOT NULL);
"""
ORDERS = {
    "newest": "id",
    "best": "score",
    "worst": "loss",
    "drifted": "drift",
    "longest": "sampled",
}
"""The column that each order goes by, the largest first. Among equals the newest is first."""
_HEADS = """
SELECT r.id, e.name AS environment, score, tokens, sampled, mean_logprob, oldest, newest, finish_reason, drift,
    trained_version, preview, g.id AS "group", r.id - g.first AS rollout, g.time
FROM json_each(?) AS listed CROSS JOIN rollouts r ON r.id = listed.value JOIN environments e ON e.id = r.environment
JOIN groups g ON g.id = (SELECT id FROM groups WHERE first <= r.id ORDER BY first DESC LIMIT 1) ORDER BY listed.key
"""


class ArchiveError(RuntimeError):
    """The file cannot be used. The message names it and the remedy."""


class ArchiveFullError(ArchiveError):
    """The disk has no space for the file."""


class NoSuchError(LookupError):
    """A group or rollout that is not kept, or not any more. The message names it."""


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


class Position(NamedTuple):
    """The position in a list behind the rollout with this key and id."""

    key: float
    id: int

    def __str__(self) -> str:
        return f"{self.key!r}~{self.id}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Return the position that a list wrote.

        Raises:
            ValueError: the text is not a position.
        """
        key, _, number = text.partition("~")
        try:
            position = cls(float(key), int(number))
        except ValueError:
            position = cls(math.nan, 0)
        if math.isnan(position.key) or not 0 <= position.id < 2**63:
            raise ValueError("not a cursor that a list ended with: leave it out")
        return position


_BEGINNING = Position(math.inf, 2**63 - 1)


@dataclass(frozen=True)
class Listing:
    """A page of a list.

    Attributes:
        rollouts: their heads.
        next: position of the next page; None at the end.
        searched: number of rollouts whose texts were searched for it.
        total: number of rollouts in the archive.
    """

    rollouts: list[dict[str, Any]]
    next: Position | None
    searched: int
    total: int


@dataclass(frozen=True)
class KeptGroup:
    """A group, whole.

    Attributes:
        id: in the archive.
        time: when it came, in Unix seconds.
        heads: of its rollouts.
        content: as it was posted.
    """

    id: int
    seq: int
    time: float
    environment: str
    first: int
    heads: list[dict[str, Any]]
    content: dict[str, Any]


def newest_archive(folder: Path) -> Path | None:
    """Return the archive of the last run whose rollouts are in a folder; None if there is none."""
    archives = [path for path in folder.glob("rollouts*.db") if _NAMED.fullmatch(path.name)]
    return max(archives, key=_number, default=None)


def _number(path: Path) -> int:
    """Return the number of an archive's run."""
    match = _NAMED.fullmatch(path.name)
    return int(match[1] or 1) if match else 1


def archive_of_next_run(path: Path) -> Path:
    """Return the path of the next run's archive, and remove the archive of the run before `path`.

    A folder holds at most two archives.
    """
    number = _number(path)
    before = path.with_name(ARCHIVE if number == 2 else f"rollouts.{number - 1}.db")
    for end in ("", "-wal", "-shm"):
        Path(f"{before}{end}").unlink(missing_ok=True)
    return path.with_name(f"rollouts.{number + 1}.db")


P = ParamSpec("P")
T = TypeVar("T")


def _reads(
    method: Callable[Concatenate[Archive, P], T],
) -> Callable[Concatenate[Archive, P], T]:
    """Let a method read the file alone, and make an error of SQLite one of the archive."""

    @wraps(method)
    def reading(archive: Archive, *args: P.args, **kwargs: P.kwargs) -> T:
        with archive._lock:
            try:
                return method(archive, *args, **kwargs)
            except sqlite3.Error as error:
                raise ArchiveError(
                    f"the archive of rollouts {archive.path} cannot be read: {error}"
                ) from None

    return reading


class Archive:
    """One archive. It has one writer, and any thread of any process may read it.

    Args:
        path: the file, which is made if there is none.
        most_bytes, most_rollouts: approximate limits of its size.
        read_only: the file is of another writer, and must exist.
        seconds: see SEARCH_SECONDS.

    Raises:
        ArchiveError: the file is not an archive, or cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        most_bytes: int = MAX_BYTES,
        most_rollouts: int = MAX_ROLLOUTS,
        *,
        read_only: bool = False,
        seconds: float = SEARCH_SECONDS,
    ) -> None:
        self.path, self.most_bytes, self.most_rollouts = path, most_bytes, most_rollouts
        self._lock, self._seconds = threading.RLock(), seconds
        self._text, self._tokenizer_bytes = TextOfTokens(), 0
        self._content: tuple[int, dict[str, Any]] = (0, {})
        try:
            self._connection = _connect(path, read_only)
            if not read_only:
                self._prepare()
        except sqlite3.Error as error:
            problem = f"the archive of rollouts {path} cannot be opened: {error}"
            if _is_full(error):
                raise ArchiveFullError(f"{problem}; make room there") from None
            raise ArchiveError(f"{problem}; move it away for a new one") from None

    def _prepare(self) -> None:
        """Make the file ready to be written."""
        run = self._connection.execute
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        # To write zeros over old groups would need space on a full disk.
        run("PRAGMA secure_delete = OFF")
        run("PRAGMA temp_store = MEMORY")
        run("PRAGMA journal_size_limit = 16777216")
        if run("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            self._connection.executescript(
                f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; "
                f"PRAGMA user_version = {FORMAT}; COMMIT;"
            )
        self._count()

    def _count(self) -> None:
        """Read the names and the sizes that the writer keeps in memory."""
        run = self._connection.execute
        self._environments: dict[str, int] = dict(
            map(tuple, run("SELECT name, id FROM environments"))
        )
        self._bytes, self._rollouts = run(
            "SELECT coalesce(sum(n_bytes), 0), coalesce(sum(size), 0) FROM groups"
        ).fetchone()
        (newest,) = run("SELECT coalesce(max(id), 0) FROM rollouts").fetchone()
        self._next = newest + 1

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    # ---- its writer ----

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep what the block adds, all of it or nothing, and then remove the oldest groups beyond
        the limits.
        """
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._remove_oldest()
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                self._count()
                raise

    def keep_tokenizer(self, content: bytes) -> None:
        """Keep a tokenizer.json with the rollouts, so that they can be read where the model is not.

        The tokenizer's library raises errors of many types.
        """
        TextOfTokens.of_file(content)
        self._keep_fact("tokenizer", zlib.compress(content, 6))

    def _keep_fact(self, name: str, value: bytes) -> None:
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
        numbers = numbers_of(group, places)
        if not numbers:
            raise ValueError("a group has scores")
        decoder = self.text()
        texts = [
            searched_text(group, index, decoder, sampled) for index, sampled in enumerate(places)
        ]
        body = zlib.compress(posted.body, 1)
        environment, first = self._environment(posted.environment), self._next
        n_bytes = len(body) + sum(len(text) + len(preview(text)) + _ROW_BYTES for text in texts)
        run = self._connection.execute
        number = run(
            "INSERT INTO groups (seq, time, environment, size, first, n_bytes, body) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (posted.seq, posted.time, environment, len(numbers), first, n_bytes, body),
        ).lastrowid
        for rollout, (one, text) in enumerate(zip(numbers, texts, strict=True), first):
            run(
                "INSERT INTO rollouts VALUES (:id, :environment, :score, :tokens, :sampled, "
                ":mean_logprob, :oldest, :newest, :finish_reason, NULL, NULL, :preview)",
                asdict(one) | {"id": rollout, "environment": environment, "preview": preview(text)},
            )
            if text:
                run("INSERT INTO texts VALUES (?, ?)", (rollout, text))
        self._next += len(numbers)
        self._bytes += n_bytes
        self._rollouts += len(numbers)
        return int(number or 0)

    def _environment(self, name: str) -> int:
        if name not in self._environments:
            if len(self._environments) >= MAX_ENVIRONMENTS and name != OTHERS:
                return self._environment(OTHERS)
            added = self._connection.execute("INSERT INTO environments (name) VALUES (?)", (name,))
            self._environments[name] = int(added.lastrowid or 0)
        return self._environments[name]

    def group_of(self, seq: int) -> int | None:
        """Return the id of the newest group with this number of the service; None if it is not kept."""
        (number,) = self._connection.execute(
            "SELECT max(id) FROM groups WHERE seq = ?", (seq,)
        ).fetchone()
        return number

    def add_trained(self, group: int, reports: Iterable[tuple[int, TrainedTokens]]) -> None:
        """Keep the trainer's numbers for rollouts of a group, by their place in it.

        They replace earlier ones.
        """
        run = self._connection.execute
        first, size, body = run(
            "SELECT first, size, body FROM groups WHERE id = ?", (group,)
        ).fetchone()
        content = orjson.loads(zlib.decompress(body))
        masks = entries_of(content, "masks")
        for place, trained in reports:
            if place >= size:
                continue
            columns = [
                row.astype("<f4").tobytes()
                for row in (trained.logprobs, trained.entropies, trained.advantages)
            ]
            run(
                "INSERT OR REPLACE INTO trained VALUES (?, ?, ?, ?, ?, ?)",
                (first + place, trained.weight_version, trained.trained, *columns),
            )
            logprobs = logprobs_of(content, place)
            difference = drift(logprobs, sampled_places(masks[place]), trained)
            run(
                "UPDATE rollouts SET drift = ?, trained_version = ? WHERE id = ?",
                (difference, trained.weight_version, first + place),
            )
            n_bytes = sum(map(len, columns))
            run("UPDATE groups SET n_bytes = n_bytes + ? WHERE id = ?", (n_bytes, group))
            self._bytes += n_bytes

    def add_parity(self, parity: Parity, groups: Sequence[int]) -> None:
        """Keep the result of a step's comparison of tokens.

        Args:
            parity: of the trainer's report.
            groups: numbers of the batch's groups, in the trainer's order.
        """
        first = parity.first
        if first is not None and first.get("weight_version") == parity.weight_version:
            number, archived = first.get("group"), None
            if isinstance(number, int) and 0 <= number < len(groups):
                archived = self.group_of(groups[number])
            self._connection.execute(
                "INSERT OR IGNORE INTO facts VALUES ('first_mismatch', ?)",
                (orjson.dumps(first | {"batch_group": number, "group": archived}),),
            )
        totals = {"compared": parity.compared_in_all, "mismatched": parity.mismatched_in_all}
        self._keep_fact("parity", orjson.dumps(totals | {"older": parity.older_in_all}))
        if parity.kernels is not None:
            self._keep_fact("kernels", parity.kernels.model_dump_json().encode())

    def _remove_oldest(self) -> None:
        run = self._connection.execute
        while self._bytes > self.most_bytes or self._rollouts > self.most_rollouts:
            row = run(
                "SELECT id, first, size, n_bytes FROM groups "
                "WHERE id < (SELECT max(id) FROM groups) ORDER BY id LIMIT 1"
            ).fetchone()
            if row is None:  # the newest stays, whatever its size
                return
            group, first, size, n_bytes = row
            run("DELETE FROM groups WHERE id = ?", (group,))
            for table in ("rollouts", "texts", "trained"):
                run(f"DELETE FROM {table} WHERE id >= ? AND id < ?", (first, first + size))
            self._bytes -= n_bytes
            self._rollouts -= size

    # ---- lists ----

    @_reads
    def environments(self) -> list[str]:
        """Return the names of environments in their order of appearance; "" for one without name."""
        rows = self._connection.execute("SELECT name FROM environments ORDER BY id")
        return [name for (name,) in rows]

    @_reads
    def total(self) -> int:
        """Return the number of rollouts. Their ids follow each other, and the oldest go first."""
        oldest, newest = self._ends()
        return newest - oldest + 1

    def _ends(self) -> tuple[int, int]:
        """Return the ids of the oldest and the newest rollout; 1 and 0 if there is none."""
        oldest, newest = self._connection.execute(
            "SELECT coalesce((SELECT min(id) FROM rollouts), 1), "
            "coalesce((SELECT max(id) FROM rollouts), 0)"
        ).fetchone()
        return oldest, newest

    @_reads
    def listed(
        self,
        order: str = "newest",
        environment: str | None = None,
        text: str = "",
        after: Position | None = None,
        limit: int = 50,
    ) -> Listing:
        """Return a page of a list of rollouts.

        Args:
            order: one of ORDERS. Rollouts without a score are in no list of scores, those without
                the trainer's logprobs in none of drift.
            environment: of this one alone.
            text: only rollouts with this text, in upper or lower case; a search that takes too long
                ends early, with `next`.
            after: position behind which the page begins; None for the beginning of the list.
            limit: most rollouts of the page.

        Raises:
            ArchiveError: the file cannot be read.
        """
        limit = max(1, min(limit, MAX_LISTED))
        environments = [
            number
            for number, name in self._connection.execute("SELECT id, name FROM environments")
            if environment is None or name == environment
        ]
        key = ORDERS[order]
        ids: list[int] = []
        searched, position, deadline = 0, after, time.monotonic() + self._seconds
        while len(ids) < limit:
            count = SEARCHED_AT_ONCE if text else limit - len(ids)
            begin = position or _BEGINNING
            if key == "id" and environment is None:
                page = self._newest(begin, count)
            else:
                page = self._page(key, environments, begin, count)
            matching = self._matching(page, text)
            ids += [number for number in page if number in matching][: limit - len(ids)]
            read = len(page)
            if len(ids) == limit:
                read = page.index(ids[-1]) + 1
            searched += read
            if read == len(page) < count:
                position = None
                break
            position = self._position(key, page[read - 1])
            if time.monotonic() > deadline:
                break
        return Listing(self._heads(ids), position, searched, self.total())

    def _newest(self, after: Position, count: int) -> Sequence[int]:
        """Return the next rollouts of all environments, the newest first: ids follow each other."""
        oldest, newest = self._ends()
        first = min(after.id - 1, newest)
        return range(first, max(first - count, oldest - 1), -1)

    def _position(self, key: str, number: int) -> Position:
        """Return the position of a rollout in an order."""
        (value,) = self._connection.execute(
            f"SELECT {key} FROM rollouts WHERE id = ?", (number,)
        ).fetchone()
        return Position(float(value), number)

    def _page(
        self, key: str, environments: Iterable[int], after: Position, count: int
    ) -> Sequence[int]:
        """Return the next rollouts of some environments in an order.

        Each environment's list is read from an index, and the lists are merged.
        """
        # Equals of the last one first: an index is read from where they stand. A comparison of
        # pairs, (key, id) < (?, ?), would read all equals before them too.
        query = (
            f"SELECT {key}, id FROM rollouts WHERE environment = ?1 AND {key} = ?2 AND id < ?3 "
            f"UNION ALL SELECT {key}, id FROM rollouts WHERE environment = ?1 AND {key} < ?2 "
            f"ORDER BY {key} DESC, id DESC LIMIT ?4"
        )
        rows: list[tuple[float, int]] = []
        for environment in environments:
            rows += self._connection.execute(query, (environment, *after, count)).fetchall()
        return [number for _, number in sorted(rows, reverse=True)[:count]]

    def _matching(self, ids: Sequence[int], text: str) -> set[int]:
        """Return the rollouts among `ids` whose texts hold `text`."""
        if not text or not ids:
            return set(ids)
        escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        among = "id IN (SELECT value FROM json_each(?))"
        numbers: tuple[Any, ...] = (orjson.dumps([*ids]).decode(),)
        if isinstance(ids, range):  # a range of the table is read faster than single rows
            among, numbers = "id BETWEEN ? AND ?", (ids[-1], ids[0])
        rows = self._connection.execute(
            f"SELECT id FROM texts WHERE {among} AND text LIKE ? ESCAPE '\\'",
            (*numbers, f"%{escaped}%"),
        )
        return {number for (number,) in rows}

    def _heads(self, ids: list[int]) -> list[dict[str, Any]]:
        cursor = self._connection.execute(_HEADS, (orjson.dumps(ids).decode(),))
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    # ---- one group ----

    @_reads
    def group(self, number: int) -> KeptGroup:
        """Return a group.

        Raises:
            NoSuchError: it is not kept.
            ArchiveError: the file cannot be read.
        """
        run = self._connection.execute
        row = run(
            "SELECT seq, time, name, first, size FROM groups g "
            "JOIN environments e ON e.id = environment WHERE g.id = ?",
            (number,),
        ).fetchone()
        if row is None:
            low, high = run("SELECT min(id), max(id) FROM groups").fetchone()
            kept = f"groups {low} to {high} are"
            if low is None:
                kept = "none is"
            raise NoSuchError(
                f"group {number} is not kept: {kept}; the oldest go when there is no room for more"
            )
        seq, came, name, first, size = row
        if self._content[0] != number:
            (body,) = run("SELECT body FROM groups WHERE id = ?", (number,)).fetchone()
            self._content = number, orjson.loads(zlib.decompress(body))
        heads = self._heads(list(range(first, first + size)))
        return KeptGroup(number, seq, came, name, first, heads, self._content[1])

    @_reads
    def beside(self, number: int) -> tuple[int | None, int | None]:
        """Return the groups before and after a group; None if there is none."""
        older, newer = self._connection.execute(
            "SELECT (SELECT max(id) FROM groups WHERE id < ?), "
            "(SELECT min(id) FROM groups WHERE id > ?)",
            (number, number),
        ).fetchone()
        return older, newer

    @_reads
    def trained(self, rollout: int) -> TrainedTokens | None:
        """Return the trainer's report of a rollout, by its id; None if there is none."""
        row = self._connection.execute(
            "SELECT weight_version, trained, logprobs, entropies, advantages FROM trained "
            "WHERE id = ?",
            (rollout,),
        ).fetchone()
        if row is None:
            return None
        version, count, *columns = row
        rows = (np.frombuffer(column, "<f4").astype(np.float32) for column in columns)
        return TrainedTokens(version, count, *rows)

    @_reads
    def text(self) -> TextOfTokens:
        """Return the decoder of tokens. Without a tokenizer in the archive, it returns their ids."""
        run = self._connection.execute
        # A run goes on with the tokenizer that it began with, or has none at first.
        sizes = run("SELECT length(value) FROM facts WHERE name = 'tokenizer'").fetchone()
        if sizes is not None and sizes[0] != self._tokenizer_bytes:
            (packed,) = run("SELECT value FROM facts WHERE name = 'tokenizer'").fetchone()
            self._text = TextOfTokens.of_file(zlib.decompress(packed))
            self._tokenizer_bytes = sizes[0]
        return self._text

    @_reads
    def parity(self) -> dict[str, Any] | None:
        """Return the comparison of tokens: `compared`, `mismatched`, `older`, the `kernels` of both
        sides, and `first`. That is the first token that differed, with `group`, its group in the
        archive. None if nothing was compared.
        """
        facts: dict[str, Any] = {
            name: orjson.loads(value)
            for name, value in self._connection.execute(
                "SELECT name, value FROM facts WHERE name IN ('parity', 'first_mismatch', 'kernels')"
            )
        }
        first = facts.get("first_mismatch")
        if first and isinstance(first.get("token"), int):
            first["text"] = self.text().whole([first["token"]])
        kernels = facts.get("kernels")
        return facts.get("parity") and facts["parity"] | {"first": first, "kernels": kernels}


def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
    """Connect to an archive, or to a new file for one. One thread at a time may use it."""
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
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if (application, version) != (APPLICATION_ID, FORMAT) and (read_only or tables):
        connection.close()
        raise ArchiveError(
            f"{path} is not an archive of rollouts of format {FORMAT} "
            f"(application id {application:#x}, format {version}); move it away for a new one"
        )
    return connection


def _is_full(error: sqlite3.Error) -> bool:
    """Return True for the errors of a full disk or a used-up quota."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
