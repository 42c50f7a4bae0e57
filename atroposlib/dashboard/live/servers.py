"""Poll the state of a run's vLLM servers.

A browser never polls them: it may not reach them, and it has no key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import orjson

from atroposlib.dashboard.events import number, whole
from atroposlib.utils.jsonl import last_rows
from atroposlib.web.connections import LIMITS
from atroposlib.web.keys import bearer

logger = logging.getLogger(__name__)

ASK_SECONDS = 4.0
"""Time for one server to answer all requests of a poll."""
MISSES = 2
"""Polls in a row without an answer after which a server counts as silent: a busy server may miss
one."""
MAX_SERVERS = 256
MAX_ANSWER = 1 << 20
"""Bytes."""
MAX_HISTORY = 2000
"""Versions of one server that are kept."""
GAPS = ("stalled", "halted")
"""Phases of an update that measure for how long nothing was sampled, the best measure first."""
_READ_BYTES = 4 << 20
"""At the end of servers.jsonl."""
MAX_DETAIL = 500
"""Characters of what is wrong with a server."""
_BRIDGE = {
    "phase": "state",
    "mode": "mode",
    "transfer": "transfer",
    "last_error": "last_error",
    "quarantine": "quarantine",
}
"""Name on the page -> name at the server, for texts of a bridge's state."""


@dataclass(slots=True)
class Server:
    """One server, with its last answers."""

    url: str
    health: str = "unknown"
    """good, bad, silent or unknown."""
    detail: str = ""
    since: float | None = None
    """Unix time since which its health is so: of a silent one, when it answered last, if that is
    known."""
    asked: float | None = None
    answered: float | None = None
    """Unix time of its last answer."""
    instance: str = ""
    """Another after each start."""
    in_flight: int | None = None
    weight_version: int | None = None
    weight_epoch: int | None = None
    bridge: dict[str, Any] = field(default_factory=dict)
    """phase, mode, transfer, last_error, quarantine, checksums, updates, failures, last_update,
    last_bytes."""
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    misses: int = 0

    @classmethod
    def remembered(
        cls, url: str, row: Mapping[str, Any], versions: Sequence[Mapping[str, Any]] = ()
    ) -> Server:
        """Return a server as an earlier process of this service saw it last, so that the page shows
        the real begin of a silence.

        Args:
            url: of the server.
            row: from that process's `row`; empty if only the versions are kept.
            versions: from its file, as `read_versions` returns them.
        """
        last = versions[-1] if versions else {"version": None, "epoch": None}
        server = cls(
            url,
            row["health"] if row.get("health") in ("good", "bad", "silent") else "unknown",
            str(row.get("detail") or "")[:MAX_DETAIL],
            number(row.get("since")),
            answered=number(row.get("answered")),
            instance=str(row.get("instance") or "")[:100],
            weight_version=whole(row.get("weight_version", last["version"])),
            weight_epoch=whole(row.get("weight_epoch", last["epoch"])),
            bridge={
                name: row[name] for name in ("failures", "last_error") if row.get(name) is not None
            },
        )
        if versions:
            checksums = [last["checksum"]] if last["checksum"] else []
            server.bridge |= {"checksums": checksums, "last_update": last["seconds"]}
        server.history.extend(map(dict, versions))
        return server

    def answer(
        self, now: float, weights: Mapping[str, Any], bridge: Mapping[str, Any] | None
    ) -> None:
        """Take the server's answers to a poll.

        Args:
            now: Unix seconds.
            weights: of GET /weights.
            bridge: of GET /bridge/state; None if the server has no such state.
        """
        trouble = str(weights.get("trouble") or "")[:MAX_DETAIL]
        self.misses, self.asked, self.answered = 0, now, now
        is_bad = weights.get("serving") is False or trouble
        self._is("bad" if is_bad else "good", trouble, now)
        self.instance = str(weights.get("instance") or "")[:100]
        self.in_flight = whole(weights.get("in_flight"))
        # An update may have come between the two answers. The checksums belong to the version of
        # the bridge.
        named = bridge if bridge is not None and "weight_version" in bridge else weights
        version, epoch = whole(named.get("weight_version")), whole(named.get("weight_epoch"))
        moved = (version, epoch) != (self.weight_version, self.weight_epoch)
        self.weight_version, self.weight_epoch = version, epoch
        if bridge is not None:
            self.bridge = _read_bridge(bridge)
        if moved and version is not None:
            self._note_version(now)
        elif self.history and "stalled" in self.bridge.get("last_update", {}):
            self._note_stall()

    def missed(self, now: float, why: str) -> None:
        """Count a poll without an answer."""
        self.misses, self.asked, self.in_flight = self.misses + 1, now, None
        if self.misses >= MISSES or self.health == "unknown":
            self._is("silent", why[:MAX_DETAIL], self.answered or now)

    def _is(self, health: str, detail: str, now: float) -> None:
        if health != self.health:
            self.since = now
        self.health, self.detail = health, detail

    def _note_stall(self) -> None:
        """Replace the duration of the last update: its true duration is known half a second later."""
        noted, seconds = self.history[-1], self.bridge["last_update"]
        if "stalled" not in noted["seconds"] and noted["seconds"].items() <= seconds.items():
            self.history[-1] = noted | {"seconds": seconds, "gap": seconds["stalled"]}

    def longest_gap(self) -> tuple[float | None, float | None]:
        """Return the longest gap of the versions that are kept, and when it was."""
        gaps = [(one["gap"], one["time"]) for one in self.history if one["gap"] is not None]
        return max(gaps, key=itemgetter(0), default=(None, None))

    def _note_version(self, now: float) -> None:
        seconds = self.bridge.get("last_update", {})
        gap = next((seconds[name] for name in GAPS if name in seconds), None)
        checksum = next(iter(self.bridge.get("checksums", [])), None)
        self.history.append(
            {
                "time": now, "url": self.url, "version": self.weight_version, "epoch": self.weight_epoch,
                "checksum": checksum, "seconds": seconds, "gap": gap,
            }
        )  # fmt: skip

    def row(self, published: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's row in GET /ui/api/stack.

        Args:
            published: the trainer's row about the server; empty if there is none.
        """
        version, epoch = self.weight_version, self.weight_epoch
        return {
            "url": self.url,
            "standing": published.get("standing") or "",
            "weight_version": published.get("weight_version") if version is None else version,
            "weight_epoch": published.get("weight_epoch") if epoch is None else epoch,
            "standing_since": published.get("since"),
            "reason": published.get("reason") or "",
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
        """Return the server's row in GET /ui/api/weights."""
        longest, longest_at = self.longest_gap()
        row: dict[str, Any] = {
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
            "longest_gap": longest,
            "longest_gap_at": longest_at,
        }
        if history:
            row["history"] = list(self.history)
        return row


def read_versions(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the weight versions of servers by address, oldest first, from the end of the file."""
    versions: dict[str, dict[Any, dict[str, Any]]] = {}
    for row in last_rows(path, _READ_BYTES):
        url, at = str(row.get("url", "?"))[:300], number(row.get("time"))
        checksum, seconds = row.get("checksum"), row.get("seconds")
        version, epoch = whole(row.get("version")), whole(row.get("epoch"))
        # A later line about the same version has a better duration.
        versions.setdefault(url, {})[at, version, epoch] = {
            "time": at, "url": url, "version": version, "epoch": epoch, "gap": number(row.get("gap")),
            "checksum": checksum if isinstance(checksum, str) else None,
            "seconds": seconds if isinstance(seconds, dict) else {},
        }  # fmt: skip
    return {url: list(rows.values()) for url, rows in versions.items()}


def _read_bridge(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a bridge's state that the page shows."""
    seconds, checksums = state.get("last_update"), state.get("checksums")
    if not isinstance(seconds, dict):
        seconds = {}
    if not isinstance(checksums, list):
        checksums = []
    return {
        **{name: str(state.get(theirs) or "")[:MAX_DETAIL] for name, theirs in _BRIDGE.items()},
        "checksums": [str(one)[:64] for one in checksums[:64]],
        **{name: whole(state.get(name)) for name in ("updates", "failures", "last_bytes")},
        "last_update": {
            str(name).removeprefix("to_")[:40]: value
            for name, duration in list(seconds.items())[:40]
            if (value := number(duration)) is not None
        },
    }


def _why(error: BaseException) -> str:
    """Return the reason why a poll failed: the system's message, if the client's has no reason."""
    at: BaseException | None = error
    for _ in range(10):
        if isinstance(at, ExceptionGroup):
            at = at.exceptions[-1]
        elif (
            isinstance(at, OSError)
            and at.errno is not None
            and at.errno > 0
            and not isinstance(at, socket.gaierror)
        ):
            return os.strerror(at.errno).lower()
        elif at is not None:
            at = at.__cause__ or at.__context__
    return str(error) or type(error).__name__


class ServerWatch:
    """Polls all servers concurrently, each for at most ASK_SECONDS.

    Args:
        api_key: key of the vLLM servers.
        key_addresses: addresses, as `server_address` writes them, to which the key is sent. They
            must come from this process's options: anyone who can register a trainer can name a
            server. Other servers are polled without the key.
    """

    def __init__(
        self, api_key: str | None = None, key_addresses: frozenset[str] = frozenset()
    ) -> None:
        self.servers: dict[str, Server] = {}
        self.remembered: dict[str, Mapping[str, Any]] = {}
        """Rows of an earlier process of this service by address, until that server is polled."""
        self.versions: Mapping[str, Sequence[Mapping[str, Any]]] = {}
        """Weight versions that it saw, by address."""
        self._api_key, self._key_addresses = api_key, key_addresses
        self._reported_without_key: set[str] = set()
        # No proxy: these are addresses inside the run. No redirects: the key goes to the named
        # address only.
        self._http = httpx.AsyncClient(
            timeout=ASK_SECONDS, trust_env=False, limits=LIMITS, follow_redirects=False
        )

    async def look(self, urls: Iterable[str]) -> None:
        """Poll these servers, and forget all others."""
        addresses = list(dict.fromkeys(urls))[:MAX_SERVERS]
        self.servers = {url: self.servers.get(url) or self._first(url) for url in addresses}
        self._reported_without_key &= self.servers.keys()
        await asyncio.gather(*(self._ask(server) for server in list(self.servers.values())))

    def _first(self, url: str) -> Server:
        row = self.remembered.pop(url, None)
        if row is None:
            return Server(url)
        return Server.remembered(url, row, self.versions.get(url, ()))

    async def _ask(self, server: Server) -> None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                weights, bridge = await self._get(server.url, "/weights"), None
                if weights is not None:
                    bridge = await self._get(server.url, "/bridge/state")
                elif (await self._http.get(f"{server.url}/health")).status_code == 200:
                    weights = {}  # a server of another kind: it is there, and no more is known
        except TimeoutError:
            server.missed(time.time(), f"no answer in {ASK_SECONDS:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            # A ValueError comes from a name that cannot be encoded for a resolver.
            server.missed(time.time(), _why(error))
        else:
            if weights is not None:
                server.answer(time.time(), weights, bridge)
                return
            text = "it answers, but neither /weights nor /health reports that it is well"
            server.missed(time.time(), text)

    async def _get(self, server: str, path: str) -> dict[str, Any] | None:
        """Return the JSON object at this path; None if the server does not answer with one."""
        parts: list[bytes] = []
        headers = bearer(self._api_key) if server in self._key_addresses else {}
        async with self._http.stream("GET", server + path, headers=headers) as response:
            if response.status_code == 401:
                self._report_without_key(server)
            if response.status_code != 200:
                return None
            async for part in response.aiter_bytes():
                parts.append(part)
                if sum(map(len, parts)) > MAX_ANSWER:
                    return None
        try:
            answer = orjson.loads(b"".join(parts))
        except ValueError:
            return None
        return answer if isinstance(answer, dict) else None

    def _report_without_key(self, server: str) -> None:
        if (
            not self._api_key
            or server in self._key_addresses
            or server in self._reported_without_key
        ):
            return
        self._reported_without_key.add(server)
        logger.warning(
            "vLLM server %s requires its key, which is sent only to servers that the options "
            "name. The page shows no bridge state of it. If the server is yours, start this "
            "service with --vllm-server %s",
            server,
            server,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
