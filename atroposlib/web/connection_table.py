"""The connections of one server, and which of them is closed when there are too many. Pure: no I/O,
no clock.

A connection is proven once a request on it was let in by the server's rules, which is with the key
where there is one. It waits while no request on it is under way: before the first one, within the
head of one, and between two.

Beyond the bound the table names one connection to close, in this order:

1. one that waits and is unproven,
2. one whose request is under way and that is unproven,
3. one that waits and is proven.

Within each, the address with the most of them loses the one that has been there longest. If there
is none of these, the new connection is refused: all others have a request of a proven client under
way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

MAX_SPEAKING = 256
"""Connections with unread bytes that the search for one to close passes over, before it gives up on
an address."""


class Crowd(Generic[C]):
    """Connections by address.

    Adding, removing, and finding the address with the most take the same time for any number.
    """

    def __init__(self) -> None:
        self.by_address: dict[str, OrderedDict[C, None]] = {}
        self._by_count: dict[int, OrderedDict[str, None]] = {}
        self._most = 0

    def add(self, connection: C, address: str) -> None:
        """Add a connection; it is the youngest of its address."""
        of_address = self.by_address.setdefault(address, OrderedDict())
        of_address[connection] = None
        self._move(address, len(of_address) - 1, len(of_address))

    def remove(self, connection: C, address: str) -> None:
        """Remove a connection."""
        of_address = self.by_address[address]
        del of_address[connection]
        self._move(address, len(of_address) + 1, len(of_address))
        if not of_address:
            del self.by_address[address]

    def _move(self, address: str, before: int, after: int) -> None:
        if before:
            del self._by_count[before][address]
            if not self._by_count[before]:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, OrderedDict())[address] = None
        self._most = max(self._most, after)
        while self._most and self._most not in self._by_count:
            self._most -= 1

    def count(self, address: str) -> int:
        """Return how many connections this address has."""
        return len(self.by_address.get(address, ()))

    def largest(self) -> str:
        """Return the address with the most connections; empty if there is no connection."""
        return next(iter(self._by_count.get(self._most, ())), "")

    def oldest(self, address: str) -> Iterator[C]:
        """Return the connections of an address, the oldest first."""
        return iter(self.by_address.get(address, ()))


@dataclass(slots=True)
class Entry:
    """A connection in the table."""

    address: str
    is_proven: bool = False
    is_served: bool = False
    """A request on it is under way."""


class ConnectionTable(Generic[C]):
    """All connections of a server.

    Args:
        most: connections held at a time.
        is_speaking: whether bytes of a connection have arrived that were not read yet. Such a
            connection is not closed: the head of its request may be among them.
    """

    def __init__(
        self, most: int, is_speaking: Callable[[C], bool] = lambda connection: False
    ) -> None:
        self.most = most
        self.most_unproven_of_address = max(1, most // 2)
        self._is_speaking = is_speaking
        self._entries: dict[C, Entry] = {}
        self._crowds: dict[tuple[bool, bool], Crowd[C]] = {
            (is_proven, is_served): Crowd()
            for is_proven in (False, True)
            for is_served in (False, True)
        }

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, connection: C, address: str) -> C | None:
        """Take in a new connection, and return the one to close now: None, an older one, or the new
        one itself.

        The caller closes it and calls `remove`.
        """
        self._entries[connection] = Entry(address)
        self._crowds[False, False].add(connection, address)
        waiting, served = self._crowds[False, False], self._crowds[False, True]
        if waiting.count(address) + served.count(address) > self.most_unproven_of_address:
            return (
                self._first_of(waiting, address, connection)
                or self._first_of(served, address, connection)
                or connection
            )
        if len(self._entries) <= self.most:
            return None
        for crowd in (waiting, served, self._crowds[True, False]):
            largest = crowd.largest()
            # If all connections of the largest are speaking, others may not be.
            for address in (largest, *islice(crowd.by_address, MAX_SPEAKING)):
                victim = self._first_of(crowd, address, connection)
                if victim is not None:
                    return victim
        return connection

    def _first_of(self, crowd: Crowd[C], address: str, but: C) -> C | None:
        for looked_at, connection in enumerate(crowd.oldest(address)):
            if looked_at > MAX_SPEAKING:
                return None
            if connection != but and not self._is_speaking(connection):
                return connection
        return None

    def prove(self, connection: C) -> None:
        """Note that a request on the connection was let in."""
        if connection in self._entries:
            self._move(connection, True, self._entries[connection].is_served)

    def serve(self, connection: C, is_served: bool) -> None:
        """Note that a request on the connection is under way, or that it is answered."""
        if connection in self._entries:
            self._move(connection, self._entries[connection].is_proven, is_served)

    def _move(self, connection: C, is_proven: bool, is_served: bool) -> None:
        entry = self._entries[connection]
        if (is_proven, is_served) != (entry.is_proven, entry.is_served):
            self._crowds[entry.is_proven, entry.is_served].remove(connection, entry.address)
            entry.is_proven, entry.is_served = is_proven, is_served
            self._crowds[is_proven, is_served].add(connection, entry.address)

    def remove(self, connection: C) -> None:
        """Forget a connection. Doing so twice does nothing more."""
        entry = self._entries.pop(connection, None)
        if entry is not None:
            self._crowds[entry.is_proven, entry.is_served].remove(connection, entry.address)

    def counts(self) -> dict[str, int]:
        """Return how many connections there are of each kind."""
        return {
            "open": len(self._entries),
            "unproven": sum(not entry.is_proven for entry in self._entries.values()),
            "served": sum(entry.is_served for entry in self._entries.values()),
        }
