"""Asks the vLLM servers of a run how they are. A browser never does: it may not reach them, and has no key."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from atroposlib.ui.run.events import number, whole

ASK_SECONDS = 4.0
"""For one server to answer everything."""
MISSES = 2
"""Questions in a row without an answer after which a server counts as silent: a busy one may miss one."""
MOST_SERVERS = 256
MOST_OF_ANSWER = 1 << 20
"""Bytes."""
MOST_HISTORY = 2000
"""Versions of one server that are kept."""
GAPS = ("stalled", "halted")
"""Phases of an update that say for how long nothing was sampled, the truest first."""
MOST_OF_DETAIL = 500
"""Characters of what is wrong with a server."""
_BRIDGE = ("phase", "mode", "transfer", "last_error", "quarantine")


@dataclass(slots=True)
class Server:
    """One server, as it was heard last."""

    url: str
    health: str = "unknown"
    """good, bad, silent or unknown."""
    detail: str = ""
    since: float | None = None
    """Unix time since which its health is so: of a silent one, when it answered last, if that is known."""
    asked: float | None = None
    answered: float | None = None
    """Unix time of its last answer."""
    instance: str = ""
    """Another after each start."""
    in_flight: int | None = None
    weight_version: int | None = None
    weight_epoch: int | None = None
    bridge: dict[str, Any] = field(default_factory=dict)
    """phase, mode, transfer, last_error, quarantine, checksums, updates, failures, last_update, last_bytes."""
    longest_gap: float | None = None
    longest_gap_at: float | None = None
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_HISTORY))
    misses: int = 0

    @classmethod
    def remembered(cls, url: str, row: Mapping[str, Any]) -> Server:
        """A server as an earlier process of this service saw it last, so that a silence that began then is told as that old.

        Args:
            row: of that process, as `row` gave it.
        """
        health = row.get("health")
        return cls(
            url,
            health if health in ("good", "bad", "silent") else "unknown",
            str(row.get("detail") or "")[:MOST_OF_DETAIL],
            number(row.get("since")),
            answered=number(row.get("answered")),
            instance=str(row.get("instance") or "")[:100],
            weight_version=whole(row.get("weight_version")),
            weight_epoch=whole(row.get("weight_epoch")),
            bridge={name: row[name] for name in ("failures", "last_error") if row.get(name) is not None},
        )

    def heard(self, now: float, weights: Mapping[str, Any], bridge: Mapping[str, Any] | None) -> None:
        """It has answered.

        Args:
            now: Unix seconds.
            weights: of GET /weights.
            bridge: of GET /bridge/state; None if it does not say.
        """
        trouble = str(weights.get("trouble") or "")[:MOST_OF_DETAIL]
        self.misses, self.asked, self.answered = 0, now, now
        self._is("good" if weights.get("serving") is not False and not trouble else "bad", trouble, now)
        self.instance = str(weights.get("instance") or "")[:100]
        self.in_flight = whole(weights.get("in_flight"))
        version, epoch = whole(weights.get("weight_version")), whole(weights.get("weight_epoch"))
        moved = (version, epoch) != (self.weight_version, self.weight_epoch)
        self.weight_version, self.weight_epoch = version, epoch
        if bridge is not None:
            self.bridge = _read_bridge(bridge)
        if moved and version is not None:
            self._note_version(now)

    def missed(self, now: float, why: str) -> None:
        """It has not answered."""
        self.misses, self.asked, self.in_flight = self.misses + 1, now, None
        if self.misses >= MISSES or self.health == "unknown":
            self._is("silent", why[:MOST_OF_DETAIL], self.answered or now)

    def _is(self, health: str, detail: str, now: float) -> None:
        if health != self.health:
            self.since = now
        self.health, self.detail = health, detail

    def _note_version(self, now: float) -> None:
        seconds = self.bridge.get("last_update", {})
        gap = next((seconds[name] for name in GAPS if name in seconds), None)
        if gap is not None and gap > (self.longest_gap or 0.0):
            self.longest_gap, self.longest_gap_at = gap, now
        checksums = self.bridge.get("checksums", [])
        self.history.append(
            {
                "time": now, "url": self.url, "version": self.weight_version, "epoch": self.weight_epoch,
                "checksum": checksums[0] if checksums else None, "seconds": seconds, "gap": gap,
            }
        )  # fmt: skip

    def row(self, published: Mapping[str, Any] | None) -> dict[str, Any]:
        """As GET /ui/api/stack lists it.

        Args:
            published: what the trainer says of it; None if it says nothing.
        """
        told = published or {}
        return {
            "url": self.url,
            "standing": told.get("standing") or "",
            "weight_version": told.get("weight_version") if self.weight_version is None else self.weight_version,
            "weight_epoch": told.get("weight_epoch") if self.weight_epoch is None else self.weight_epoch,
            "standing_since": told.get("since"),
            "reason": told.get("reason") or "",
            "health": self.health,
            "since": self.since,
            "detail": self.detail,
            "asked": self.asked,
            "answered": self.answered,
            "instance": self.instance,
            "failures": self.bridge.get("failures"),
            "last_error": self.bridge.get("last_error", ""),
            "running": self.in_flight,
            "waiting": None,
        }

    def weights(self, history: bool = True) -> dict[str, Any]:
        """As GET /ui/api/weights lists it."""
        known: dict[str, Any] = {
            "url": self.url,
            "weight_version": self.weight_version,
            "weight_epoch": self.weight_epoch,
            "checksums": [],
            **dict.fromkeys(_BRIDGE, ""),
            "updates": None,
            "failures": None,
            "last_update": {},
            "last_bytes": None,
            **self.bridge,
            "longest_gap": self.longest_gap,
            "longest_gap_at": self.longest_gap_at,
        }
        return known | ({"history": list(self.history)} if history else {})


def _read_bridge(told: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a bridge's state."""
    seconds = told.get("last_update")
    checksums = told.get("checksums")
    return {
        **{name: str(told.get(name) or "")[:MOST_OF_DETAIL] for name in _BRIDGE},
        "checksums": [str(one)[:64] for one in checksums[:64]] if isinstance(checksums, list) else [],
        "updates": whole(told.get("updates")),
        "failures": whole(told.get("failures")),
        "last_bytes": whole(told.get("last_bytes")),
        "last_update": {
            str(name).removeprefix("to_")[:40]: value
            for name, given in (list(seconds.items())[:40] if isinstance(seconds, dict) else [])
            if (value := number(given)) is not None
        },
    }


def _why(error: BaseException) -> str:
    """Why a server could not be asked: as the system says it, where the client says no more than that it did not work."""
    at: BaseException | None = error
    for _ in range(10):
        if isinstance(at, ExceptionGroup):
            at = at.exceptions[-1]
        elif isinstance(at, OSError) and at.errno is not None and at.errno > 0 and not isinstance(at, socket.gaierror):
            return os.strerror(at.errno).lower()
        elif at is not None:
            at = at.__cause__ or at.__context__
    return str(error) or type(error).__name__


class ServerWatch:
    """Asks all servers, each by itself, and never for longer than ASK_SECONDS.

    Args:
        api_key: the servers'; sent to those alone that the trainer named.
    """

    def __init__(self, api_key: str | None = None) -> None:
        self.servers: dict[str, Server] = {}
        self.remembered: dict[str, Mapping[str, Any]] = {}
        """Rows of an earlier process of this service, by address, until a server of that address is asked."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=MOST_SERVERS, max_keepalive_connections=32)
        # No proxy: these are addresses inside the run.
        self._http = httpx.AsyncClient(headers=headers, timeout=ASK_SECONDS, trust_env=False, limits=limits)

    async def look(self, urls: Iterable[str]) -> None:
        """Ask these servers, and forget all others."""
        wanted = list(dict.fromkeys(urls))[:MOST_SERVERS]
        self.servers = {url: self.servers.get(url) or self._first(url) for url in wanted}
        await asyncio.gather(*(self._ask(server) for server in list(self.servers.values())))

    def _first(self, url: str) -> Server:
        row = self.remembered.pop(url, None)
        return Server(url) if row is None else Server.remembered(url, row)

    async def _ask(self, server: Server) -> None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                weights = await self._get(f"{server.url}/weights")
                bridge = await self._get(f"{server.url}/bridge/state") if weights is not None else None
                if weights is None and (await self._http.get(f"{server.url}/health")).status_code == 200:
                    weights = {}  # a server of another kind: it is there, and no more is known
        except TimeoutError:
            server.missed(time.time(), f"no answer in {ASK_SECONDS:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            server.missed(time.time(), _why(error))
        else:
            if weights is None:
                server.missed(time.time(), "it answers, but neither /weights nor /health says that it is well")
            else:
                server.heard(time.time(), weights, bridge)

    async def _get(self, url: str) -> dict[str, Any] | None:
        """The JSON object there; None if it is not said."""
        parts: list[bytes] = []
        async with self._http.stream("GET", url) as response:
            if response.status_code != 200:
                return None
            async for part in response.aiter_bytes():
                parts.append(part)
                if sum(map(len, parts)) > MOST_OF_ANSWER:
                    return None
        try:
            found = orjson.loads(b"".join(parts))
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    async def close(self) -> None:
        """Let go of the connections."""
        await self._http.aclose()
