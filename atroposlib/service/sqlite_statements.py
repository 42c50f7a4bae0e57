"""The statements that put changes into the tables of the durable store."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

import orjson

from atroposlib.service.records import Changes, Receipt

T = TypeVar("T")

MOST_VARIABLES = 999
"""In one statement: what every SQLite takes, those before 3.32 included."""


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
        run = self._run
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
        forgotten = [env_id for changes in together for env_id in changes.environments_removed]
        self._for_all("DELETE FROM environments WHERE env_id", forgotten)
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
            self._run(f"INSERT INTO {into} VALUES {', '.join([row] * len(some))}", values)

    def _for_all(self, statement: str, values: Sequence[int | str], *first: int) -> None:
        """Run a statement that ends before its `IN`, for many values at a time. `first` are what it needs before them."""
        for some in _chunks(values, MOST_VARIABLES - len(first)):
            self._run(f"{statement} IN ({', '.join('?' * len(some))})", [*first, *some])

    def _place(self, changes: Changes) -> None:
        run = self._run
        place = "UPDATE groups SET place = ? WHERE seq"
        moved = dict(changes.moved)
        for to in sorted(set(moved.values())):
            self._for_all(place, [seq for seq, last in moved.items() if last == to], to)
        for batch_id, sent, returned, seqs in changes.leases:
            run("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", (batch_id, sent, returned))
            self._for_all(place, seqs, batch_id)
        for batch_id in changes.leases_removed:
            run("DELETE FROM leases WHERE batch_id = ?", (batch_id,))

    def wipe(self) -> None:
        for table in ("state", "environments", "groups", "bodies", "leases", "keys", "evaluations"):
            self._run(f"DELETE FROM {table}")


def _chunks(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
