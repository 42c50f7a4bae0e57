"""The inference servers of a run: requests for them to join or leave, and their state as the trainer
publishes it. Pure.

The store keeps the requests. It does not keep the trainer's table. The trainer publishes it every
few seconds, and after a restart of the service an old table would be wrong.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from atroposlib.service.records import MAX_SERVERS

FORGET_SECONDS = 60.0
"""Seconds after which one publisher's table is dropped from the others. Publishers repeat their
tables every few seconds."""

MAX_PUBLISHERS = 64
"""Publishers of tables within FORGET_SECONDS."""


class UnknownServerError(Exception):
    """No server of this fleet has this address."""

    def __init__(self, url: str, addresses: Collection[str]) -> None:
        listed = ", ".join(sorted(addresses)[:20]) or "it has none yet"
        super().__init__(f"{url} is not a server of this fleet ({listed}); GET /fleet lists them")


class FleetFullError(Exception):
    """The list of requested servers is at its bound."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"{url} is one server too many: {MAX_SERVERS} are listed already; POST /fleet/leave "
            "removes one that is gone"
        )


class TooManyPublishersError(Exception):
    """Too many publishers, or too many servers in their tables."""


@dataclass(slots=True)
class FleetRequests:
    """Requests by POST /fleet/join and /fleet/leave. No address is in both lists."""

    wanted: list[str] = field(default_factory=list)
    """Servers that the trainer will bring in, in the order of the requests."""
    left: list[str] = field(default_factory=list)
    """Servers that the trainer will let go. It may have been started with some of them."""
    unkeyed: list[str] = field(default_factory=list)
    """Addresses in `wanted` whose requests needed no key. Clients must send no key to them."""

    def join(self, url: str, keyed: bool = False) -> bool:
        """Request that the trainer bring in a server. Return True if that changes anything.

        Args:
            url: the server's.
            keyed: the request needed the service's key.

        Raises:
            FleetFullError: there are too many.
        """
        if url in self.wanted:
            if keyed and url in self.unkeyed:
                self.unkeyed.remove(url)
                return True
            return False
        if len(self.wanted) >= MAX_SERVERS:
            raise FleetFullError(url)
        self.left = [other for other in self.left if other != url]
        self.wanted.append(url)
        if not keyed:
            self.unkeyed.append(url)
        return True

    def leave(self, url: str, published: Collection[str] | None) -> bool:
        """Request that the trainer let a server go. Return True if that changes anything.

        Args:
            url: the server's.
            published: the addresses in the trainer's table; None without a table, and then any
                address is accepted.

        Raises:
            UnknownServerError: the server is in none of the lists.
        """
        if url in self.left:
            return False
        addresses = {*self.wanted, *self.left, *(published or ())}
        if published is not None and url not in addresses:
            raise UnknownServerError(url, addresses)
        self.wanted = [other for other in self.wanted if other != url]
        self.unkeyed = [other for other in self.unkeyed if other != url]
        self.left = [*self.left, url][-MAX_SERVERS:]  # the first of them is long gone
        return True

    def answered(self, keyed: bool) -> dict[str, Any]:
        """Return the lists as the service answers them.

        Args:
            keyed: the service has a key. Clients send their keys to the listed addresses, so the
                list omits addresses from before the service had one.
        """
        wanted = [url for url in self.wanted if not keyed or url not in self.unkeyed]
        return {"wanted": wanted, "left": list(self.left), "keyed": keyed}


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The newest tables of the servers, from the trainer or from several parameter servers."""

    servers: list[dict[str, Any]] = field(default_factory=list)
    """One row for each: url, standing, weight_version, weight_epoch, since, reason."""
    published: float | None = None
    """Time of the newest table in Unix seconds, for people; None without a table."""
    published_at: float = 0.0
    """The same time, in seconds of a clock that does not jump."""
    _tables: dict[str, tuple[float, list[dict[str, Any]]]] = field(default_factory=dict)
    """By publisher: the time and the rows of its table."""

    def updated(
        self, by: str, servers: list[dict[str, Any]], now: float, unix: float
    ) -> FleetStatus:
        """Return the status with a new table, which replaces the same publisher's.

        Tables of other publishers are kept for FORGET_SECONDS. If two tables list the same server,
        the later one counts.

        Args:
            by: the publisher; empty for the trainer.
            servers: its rows.
            now: seconds of a clock that does not jump.
            unix: Unix seconds.

        Raises:
            TooManyPublishersError: there are too many tables, or servers in them.
        """
        tables = {
            publisher: table
            for publisher, table in self._tables.items()
            if publisher != by and now - table[0] < FORGET_SECONDS
        }
        tables[by] = (now, servers)
        count = sum(len(rows) for _, rows in tables.values())
        if len(tables) > MAX_PUBLISHERS or count > MAX_SERVERS:
            raise TooManyPublishersError(
                f"with this table {len(tables)} parties would have published {count} servers "
                f"within {FORGET_SECONDS:g} s; at most {MAX_PUBLISHERS} may, and {MAX_SERVERS} "
                "servers. Use one name in `by` for each parameter server"
            )
        rows = {
            row["url"]: row
            for _, table in sorted(tables.values(), key=lambda table: table[0])
            for row in table
        }
        return FleetStatus(list(rows.values()), unix, now, tables)

    def age(self, now: float) -> float | None:
        """Return the seconds since the newest table; None without one. `now` is as in `updated`."""
        return None if self.published is None else now - self.published_at

    def urls(self) -> list[str] | None:
        """Return the servers' addresses; None without a table."""
        return None if self.published is None else [server["url"] for server in self.servers]
