"""Read an archive: lists in every order, and whole groups.

A page of a list takes the same time for any number of rollouts.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import orjson

from atroposlib.dashboard.rollouts.archive import ArchiveError, connect
from atroposlib.dashboard.rollouts.rollout_stats import TrainedTokens
from atroposlib.dashboard.rollouts.text import TextOfTokens

Order = Literal["newest", "best", "worst", "drifted", "longest"]
ORDERS: tuple[str, ...] = get_args(Order)
MAX_LISTED = 200
MAX_QUERY_LENGTH = 400
SEARCH_SECONDS = 0.6
"""After which a search answers with what it has found, and from where to go on."""
SEARCHED_AT_ONCE, SCANNED_AT_ONCE = 1000, 5000
"""Rollouts whose texts are looked at between two looks at the clock: one by one in an order, and as
they lie in the file."""
MAX_CACHED_GROUPS, MAX_CACHED_BYTES = 4, 32 << 20
T = TypeVar("T")

_KEYS: dict[str, tuple[str, bool]] = {
    "newest": ("id", True),
    "best": ("score", True),
    "worst": ("score", False),
    "drifted": ("drift", True),
    "longest": ("sampled", True),
}
"""What each order goes by, and whether the largest is first. Among equals the newest is."""
_COLUMNS = (
    "id, environment, score, tokens, sampled, mean_logprob, oldest, newest, finish_reason, drift, "
    "trained_version, preview"
)


class NoSuchError(LookupError):
    """A group or rollout that is not kept, or not any more. The message names it."""


class QueryError(ValueError):
    """A request for a list with an invalid value. The message names the value."""


@dataclass(frozen=True, order=True)
class Position:
    """The position in a list behind the rollout with this key and id."""

    key: float
    id: int

    def __str__(self) -> str:
        return f"{self.key!r}~{self.id}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Raises QueryError: it is none."""
        try:
            key, _, number = text.partition("~")
            position = cls(float(key), int(number))
        except ValueError:
            position = cls(float("nan"), 0)
        if position.key != position.key or not 0 <= position.id < 2**63:
            raise QueryError(f"cursor {text[:80]!r} is none that a list ended with: leave it out")
        return position


@dataclass(frozen=True)
class Listed:
    """A page of a list.

    Attributes:
        rollouts: their heads.
        next: where it goes on; None at the end.
        searched: how many rollouts were looked at for it.
        total: how many there are at all.
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


class RolloutSource:
    """Reads one archive, which may be written at the same time. Any thread may call it.

    Args:
        path: the file.
        seconds: see SEARCH_SECONDS.

    Raises:
        ArchiveError: it cannot be read.
    """

    def __init__(self, path: Path, seconds: float = SEARCH_SECONDS) -> None:
        self.path, self._seconds = path, seconds
        self._lock = threading.Lock()
        self._connection = connect(path, read_only=True)
        self._text: tuple[int, TextOfTokens] = (-1, TextOfTokens())
        self._at_hand: OrderedDict[int, tuple[int, dict[str, Any]]] = OrderedDict()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def _read(self, work: Callable[[], T]) -> T:
        with self._lock:
            try:
                return work()
            except sqlite3.Error as error:
                raise ArchiveError(
                    f"the archive of rollouts {self.path} cannot be read: {error}"
                ) from None

    # ---- lists ----

    def environments(self) -> list[str]:
        """Return the names of environments in their order of appearance; "" for one without name."""
        return self._read(
            lambda: [
                name
                for (name,) in self._connection.execute("SELECT name FROM environments ORDER BY id")
            ]
        )

    def total(self) -> int:
        """Return the number of rollouts."""
        return self._read(self._total)

    def _total(self) -> int:
        # Numbers follow each other, and the oldest go first.
        oldest, newest = self._bounds()
        return newest - oldest + 1

    def _bounds(self) -> tuple[int, int]:
        """Return the oldest and the newest rollout; 1 and 0 if there is none."""
        low, high = self._connection.execute(
            "SELECT (SELECT id FROM rollouts ORDER BY id LIMIT 1), (SELECT id FROM rollouts ORDER BY id DESC LIMIT 1)"
        ).fetchone()
        return (1, 0) if low is None else (low, high)

    def listed(
        self,
        order: str = "newest",
        environment: str | None = None,
        text: str = "",
        after: Position | None = None,
        limit: int = 50,
    ) -> Listed:
        """Return a page of a list of rollouts.

        Args:
            order: one of ORDERS. Rollouts without a score are in no list of scores, those without
                the trainer's logprobs in none of drift.
            environment: of this one alone.
            text: only where this stands, in upper or lower case; a search that takes too long ends
                early, with `next`.

        Raises:
            QueryError: there is no such order, or the text is too long.
            ArchiveError: the file cannot be read.
        """
        if order not in ORDERS:
            raise QueryError(f"sort {order[:40]!r} is unknown: {', '.join(ORDERS)}")
        if len(text) > MAX_QUERY_LENGTH:
            raise QueryError(
                f"text has {len(text)} characters, and {MAX_QUERY_LENGTH} at most are searched for"
            )
        return self._read(
            lambda: self._listed(order, environment, text, after, max(1, min(limit, MAX_LISTED)))
        )

    def _listed(
        self, order: str, environment: str | None, text: str, after: Position | None, limit: int
    ) -> Listed:
        names = dict(self._connection.execute("SELECT id, name FROM environments"))
        if text and order == "newest" and environment is None:
            return self._scanned(text, after, limit, names)
        lines = [
            number for number, name in names.items() if environment is None or name == environment
        ]
        numbers: list[int] = []
        searched, position, deadline = 0, after, time.monotonic() + self._seconds
        while len(numbers) < limit:
            page_limit = SEARCHED_AT_ONCE if text else limit - len(numbers)
            some = self._page(order, lines, position, page_limit)
            matching = self._matching([one.id for one in some], text) if text else None
            for one in some:
                searched, position = searched + 1, one
                if matching is None or one.id in matching:
                    numbers.append(one.id)
                    if len(numbers) == limit:
                        break
            if len(some) < page_limit and (not some or position == some[-1]):
                position = None
                break
            if time.monotonic() > deadline:
                break
        return Listed(self._heads(numbers, names), position, searched, self._total())

    def _scanned(
        self, text: str, after: Position | None, limit: int, names: dict[int, str]
    ) -> Listed:
        """Return the newest rollouts with a text: the file has the texts in the list's order."""
        oldest, newest = self._bounds()
        numbers: list[int] = []
        end = begin = newest + 1 if after is None else min(newest + 1, after.id)
        deadline = time.monotonic() + self._seconds
        while end > oldest and len(numbers) < limit:
            low = max(oldest, end - SCANNED_AT_ONCE)
            rows = self._connection.execute(
                "SELECT id FROM texts WHERE id >= ? AND id < ? AND text LIKE ? ESCAPE '\\' ORDER BY id DESC LIMIT ?",
                (low, end, _pattern(text), limit - len(numbers)),
            )
            numbers += [number for (number,) in rows]
            end = numbers[-1] if len(numbers) == limit else low
            if time.monotonic() > deadline:
                break
        return Listed(
            self._heads(numbers, names),
            Position(float(end), end) if end > oldest else None,
            begin - end,
            self._total(),
        )

    def _page(
        self, order: str, lines: Iterable[int], after: Position | None, count: int
    ) -> list[Position]:
        """Return the next rollouts of some environments in an order.

        Each environment's list is read from an index, and the lists are merged.
        """
        key, falling = _KEYS[order]
        sign = -1.0 if falling else 1.0
        some = [
            (sign * value, -number)
            for line in lines
            for value, number in self._page_of(line, key, falling, after, count)
        ]
        some.sort()  # of a few lists that are in order: they are merged
        return [Position(float(sign * value), -number) for value, number in some[:count]]

    def _page_of(
        self, line: int, key: str, falling: bool, after: Position | None, count: int
    ) -> list[tuple[float, int]]:
        run = self._connection.execute
        select = f"SELECT {key}, id FROM rollouts WHERE environment = ? AND {key} IS NOT NULL"
        order = (
            f"ORDER BY {key} {'DESC' if falling else 'ASC'}, id DESC LIMIT ?"
            if key != "id"
            else "ORDER BY id DESC LIMIT ?"
        )
        if after is None:
            rows = run(f"{select} {order}", (line, count)).fetchall()
        elif key == "id":
            rows = run(f"{select} AND id < ? {order}", (line, after.id, count)).fetchall()
        else:  # equals of the last one first: an index is read from where they stand
            rows = run(
                f"{select} AND {key} = ? AND id < ? ORDER BY id DESC LIMIT ?",
                (line, after.key, after.id, count),
            ).fetchall()
            if len(rows) < count:
                beyond = "<" if falling else ">"
                rows += run(
                    f"{select} AND {key} {beyond} ? {order}", (line, after.key, count - len(rows))
                ).fetchall()
        return rows

    def _matching(self, ids: list[int], text: str) -> set[int]:
        places = ", ".join("?" * len(ids))
        rows = self._connection.execute(
            f"SELECT id FROM texts WHERE id IN ({places}) AND text LIKE ? ESCAPE '\\'",
            [*ids, _pattern(text)],
        )
        return {number for (number,) in rows}

    def _heads(self, ids: list[int], names: dict[int, str]) -> list[dict[str, Any]]:
        heads = []
        for number in ids:
            row = self._connection.execute(
                f"SELECT {_COLUMNS} FROM rollouts WHERE id = ?", (number,)
            ).fetchone()
            group = self._connection.execute(
                "SELECT id, first, time FROM groups WHERE first <= ? ORDER BY first DESC LIMIT 1",
                (number,),
            ).fetchone()
            if row is None or group is None:  # it has just gone
                continue
            heads.append(self._head(row, group, names))
        return heads

    def _head(
        self, row: tuple[Any, ...], group: tuple[int, int, float], names: dict[int, str]
    ) -> dict[str, Any]:
        head = dict(zip(_COLUMNS.split(", "), row, strict=True))
        head["environment"] = names.get(head["environment"], "")
        number, first, came = group
        return head | {"group": number, "rollout": head["id"] - first, "time": came}

    # ---- one group ----

    def group(self, number: int) -> KeptGroup:
        """A group.

        Raises:
            NoSuchError: it is not kept.
            ArchiveError: the file cannot be read.
        """
        return self._read(lambda: self._group(number))

    def _group(self, number: int) -> KeptGroup:
        run = self._connection.execute
        row = run(
            "SELECT g.seq, g.time, e.name, g.first, g.size FROM groups g JOIN environments e ON e.id = g.environment "
            "WHERE g.id = ?",
            (number,),
        ).fetchone()
        if row is None:
            low, high = run("SELECT min(id), max(id) FROM groups").fetchone()
            kept = "none is" if low is None else f"groups {low} to {high} are"
            raise NoSuchError(
                f"group {number} is not kept: {kept}; the oldest go when there is no room for more"
            )
        seq, came, name, first, size = row
        names = dict(run("SELECT id, name FROM environments"))
        rows = run(
            f"SELECT {_COLUMNS} FROM rollouts WHERE id >= ? AND id < ? ORDER BY id",
            (first, first + size),
        )
        heads = [self._head(one, (number, first, came), names) for one in rows]
        return KeptGroup(number, seq, came, name, first, heads, self._content(number))

    def _content(self, number: int) -> dict[str, Any]:
        known = self._at_hand.get(number)
        if known is not None:
            self._at_hand.move_to_end(number)
            return known[1]
        (body,) = self._connection.execute(
            "SELECT body FROM groups WHERE id = ?", (number,)
        ).fetchone()
        raw = zlib.decompress(body)
        content: dict[str, Any] = orjson.loads(raw)
        self._at_hand[number] = (len(raw), content)
        while len(self._at_hand) > 1 and (
            len(self._at_hand) > MAX_CACHED_GROUPS
            or sum(size for size, _ in self._at_hand.values()) > MAX_CACHED_BYTES
        ):
            self._at_hand.popitem(last=False)
        return content

    def beside(self, number: int) -> tuple[int | None, int | None]:
        """Return the groups before and after a group; None if there is none."""

        def work() -> tuple[int | None, int | None]:
            older, newer = self._connection.execute(
                "SELECT (SELECT max(id) FROM groups WHERE id < ?), (SELECT min(id) FROM groups WHERE id > ?)",
                (number, number),
            ).fetchone()
            return older, newer

        return self._read(work)

    def trained(self, rollout: int) -> TrainedTokens | None:
        """Return the trainer's report of a rollout, by its id; None if there is none."""

        def work() -> TrainedTokens | None:
            row = self._connection.execute(
                "SELECT weight_version, trained, logprobs, entropies, advantages FROM trained WHERE id = ?",
                (rollout,),
            ).fetchone()
            if row is None:
                return None
            version, count, *columns = row
            logprobs, entropies, advantages = (
                np.frombuffer(column, dtype="<f4").astype(np.float32) for column in columns
            )
            return TrainedTokens(version, count, logprobs, entropies, advantages)

        return self._read(work)

    def text(self) -> TextOfTokens:
        """Return the decoder of tokens. Without a tokenizer in the archive, it returns their ids."""

        def work() -> TextOfTokens:
            row = self._connection.execute(
                "SELECT length(value) FROM facts WHERE name = 'tokenizer'"
            ).fetchone()
            size = 0 if row is None else row[0]
            if (
                self._text[0] != size
            ):  # a run goes on with the tokenizer that it began with, or has none at first
                text = TextOfTokens()
                if row is not None:
                    (packed,) = self._connection.execute(
                        "SELECT value FROM facts WHERE name = 'tokenizer'"
                    ).fetchone()
                    text = TextOfTokens.of_file(zlib.decompress(packed))
                self._text = (size, text)
            return self._text[1]

        return self._read(work)

    # ---- bit for bit ----

    def parity(self) -> dict[str, Any] | None:
        """Return the comparison of tokens: `compared`, `mismatched`, and `first`, the first token
        that differed, with `group`, its group in the archive. None if nothing was compared.
        """

        def work() -> dict[str, Any] | None:
            facts = dict(
                self._connection.execute(
                    "SELECT name, value FROM facts WHERE name IN ('parity', 'first_mismatch')"
                )
            )
            if "parity" not in facts:
                return None
            first = orjson.loads(facts["first_mismatch"]) if "first_mismatch" in facts else None
            if first is not None:
                first["batch_group"], first["group"] = (
                    first.get("group"),
                    first.pop("archived", None),
                )
            return orjson.loads(facts["parity"]) | {"first": first}

        rows = self._read(work)
        first = rows and rows["first"]
        if first and isinstance(first.get("token"), int):
            first["text"] = self.text().whole([first["token"]])
        return rows


def _pattern(text: str) -> str:
    """Return the pattern of LIKE for a text anywhere, with `\\` as the escape character."""
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"
