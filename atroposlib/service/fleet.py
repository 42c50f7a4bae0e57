"""The inference servers of a run, as the service knows them: which are wanted, which are to leave,
and what the trainer says of each. Pure.

What people and scripts wish is kept like everything else that was answered. The trainer's table is
not: it is published anew every few seconds, and one of before a restart would only be wrong.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from atroposlib.service.records import MAX_SERVERS

FORGET_SECONDS = 60.0
"""After which what one has said is not shown beside what another says; everybody says it anew every
few seconds."""


MAX_PUBLISHERS = 64
"""Parties that publish tables within FORGET_SECONDS."""


class UnknownServerError(Exception):
    """No server of this fleet has this address."""

    def __init__(self, url: str, known: Collection[str]) -> None:
        listed = ", ".join(sorted(known)[:20]) or "it has none yet"
        super().__init__(f"{url} is no server of this fleet ({listed}); GET /fleet lists them")


class FleetFullError(Exception):
    """There are as many addresses as there may be."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"{url} is one server too many: {MAX_SERVERS} are listed already; POST /fleet/leave those that are gone"
        )


class TooManyPublishersError(Exception):
    """More parties publish tables, or more servers in them, than may be."""


@dataclass(slots=True)
class FleetRequests:
    """What was asked for with POST /fleet/join and /fleet/leave. No address is in both lists."""

    wanted: list[str] = field(default_factory=list)
    """Servers that the trainer shall bring in, in the order in which they were asked for."""
    left: list[str] = field(default_factory=list)
    """Servers that it shall let go, those that it was started with included."""
    unkeyed: list[str] = field(default_factory=list)
    """Addresses among the wanted ones from requests that needed no key: no key may be sent to
    them."""
    _changed: bool = False

    def take_changed(self) -> bool:
        """Whether anything changed since the last call."""
        changed, self._changed = self._changed, False
        return changed

    def join(self, url: str, keyed: bool = False) -> None:
        """A server is wanted.

        Args:
            keyed: the request needed the service's key.

        Raises:
            FleetFullError: there are too many.
        """
        if url in self.wanted:
            if keyed and url in self.unkeyed:
                self.unkeyed.remove(url)
                self._changed = True
            return
        if len(self.wanted) >= MAX_SERVERS:
            raise FleetFullError(url)
        self.left = [other for other in self.left if other != url]
        self.wanted.append(url)
        if not keyed:
            self.unkeyed.append(url)
        self._changed = True

    def leave(self, url: str, published: Collection[str] | None) -> None:
        """A server is to leave.

        Args:
            url: the server's.
            published: the addresses in the trainer's table; None if it has published none, and then
                any may be meant.

        Raises:
            UnknownServerError: nobody knows this server.
        """
        if url in self.left:
            return
        known = {*self.wanted, *self.left, *(published or ())}
        if published is not None and url not in known:
            raise UnknownServerError(url, known)
        self.wanted = [other for other in self.wanted if other != url]
        self.unkeyed = [other for other in self.unkeyed if other != url]
        self.left = [*self.left, url][-MAX_SERVERS:]  # whoever left longest ago is long gone
        self._changed = True

    def stored(self) -> dict[str, list[str]]:
        """A copy for the store."""
        return {"wanted": list(self.wanted), "left": list(self.left), "unkeyed": list(self.unkeyed)}

    def answered(self, keyed: bool) -> dict[str, Any]:
        """Return the lists as the service answers them.

        Args:
            keyed: the service has a key. Addresses from before it had one are left out: clients
                send their keys to the rest.
        """
        wanted = [url for url in self.wanted if not keyed or url not in self.unkeyed]
        return {"wanted": wanted, "left": list(self.left), "keyed": keyed}


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """What was said last of the servers, by the trainer or by parameter servers of which each has
    some.
    """

    servers: list[dict[str, Any]] = field(default_factory=list)
    """url, standing, weight_version, weight_epoch, since, reason of each."""
    published: float | None = None
    """When, in Unix seconds by this machine's clock, for people; None if there was no publication
    yet."""
    heard: float = 0.0
    """When, in seconds of a clock that does not jump."""
    _parts: dict[str, tuple[float, list[dict[str, Any]]]] = field(default_factory=dict)

    def updated(
        self, by: str, servers: list[dict[str, Any]], now: float, unix: float
    ) -> FleetStatus:
        """The table after somebody has said something: it takes the place of what the same one said
        before. Of others counts what is no older than FORGET_SECONDS, and of two who name the same
        server the later one.

        Args:
            by: who; empty for the trainer.
            servers: as `servers`.
            now: seconds of a clock that does not jump.
            unix: Unix seconds.

        Raises:
            TooManyPublishersError: there are too many tables, or servers in them.
        """
        parts = {
            who: part
            for who, part in self._parts.items()
            if who != by and now - part[0] < FORGET_SECONDS
        }
        parts[by] = (now, servers)
        count = sum(len(part) for _, part in parts.values())
        if len(parts) > MAX_PUBLISHERS or count > MAX_SERVERS:
            raise TooManyPublishersError(
                f"with this table {len(parts)} parties would have published {count} servers within {FORGET_SECONDS:g} s; at "
                f"most {MAX_PUBLISHERS} may, and {MAX_SERVERS} servers: use one name in `by` for each parameter server"
            )
        rows = {
            row["url"]: row
            for _, part in sorted(parts.values(), key=lambda part: part[0])
            for row in part
        }
        return FleetStatus(list(rows.values()), unix, now, parts)

    def age(self, now: float) -> float | None:
        """Seconds since the last publication; None if there was none. `now` is as in `updated`."""
        return None if self.published is None else now - self.heard

    def urls(self) -> list[str] | None:
        """The servers' addresses; None if nothing was published."""
        return None if self.published is None else [server["url"] for server in self.servers]
