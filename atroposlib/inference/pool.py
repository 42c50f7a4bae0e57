"""Carries requests to the servers that can answer them: looks at the servers, moves what one cannot
answer to another, waits when all are away. Which server is asked is decided in `routing`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import TYPE_CHECKING

from atroposlib.inference.health import HealthGate
from atroposlib.inference.selection import Load, Look, Routing

if TYPE_CHECKING:
    from atroposlib.inference.client import APIServer

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often a server is asked how it is, while requests are under way."""
MOVE_AFTER_SECONDS = 15.0
"""A server that is silent, or does not serve, for so long loses the requests that it has, if
another can answer them."""
QUIET_SECONDS = 30.0
"""A server that stands alone is looked at once its requests have had no answer for so long."""
LOOKS_AFTER_WORK = 5
"""Rounds of looks after the last request; then the servers are left in peace."""


class MovedElsewhere(Exception):
    """The server has been away for so long that its requests are asked of another."""


class Router:
    """The servers of one kind that answer for each other.

    Args:
        servers: at least one; `adopt` changes them.
        role: what each is, for messages.
        address_flag: how their addresses are passed.
    """

    def __init__(self, servers: Sequence[APIServer], role: str, address_flag: str):
        self.servers: list[APIServer] = []
        self.routing: Routing[APIServer] = Routing()
        self.role = role
        self.gate = HealthGate(self._what, self._look_at_all, address_flag)
        self._turn = 0
        self._under_way: dict[APIServer, set[asyncio.Timeout]] = {}
        self._looking: dict[APIServer, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._last_answer = 0.0
        """time.monotonic() of the last answer, or of the first request after a time without any."""
        self.adopt(servers)

    def adopt(self, servers: Sequence[APIServer]) -> None:
        """From now on these answer for each other. Requests that are under way elsewhere go on
        where they are, and what is made on a server that is no longer among them goes to those that
        are."""
        for server in servers:
            server.router = self
        self.servers = list(servers)
        self.routing.keep_only(self._all())

    def _all(self) -> set[APIServer]:
        """The servers, and those that have requests still."""
        return {*self.servers, *self._under_way}

    def works_on(self, server: APIServer) -> bool:
        """Return whether requests are under way there."""
        return server in self._under_way

    def _what(self) -> str:
        if len(self.servers) == 1:
            return f"{self.role} at {self.servers[0].root_url}"
        return f"{self.role}s, {len(self.servers)} of which none can be asked"

    def healthy(self, server: APIServer) -> bool:
        """Return whether a request would be sent to it."""
        return self.gate.open and not self.routing.of(server).away

    # ---- choosing ----

    def pick(
        self, split: str, preferred: APIServer | None = None, tried: Collection[APIServer] = ()
    ) -> APIServer | None:
        """The server for the next request; None if all are away."""
        # Start at another server each time, so that requests sent together spread over equally good
        # ones.
        self._turn += preferred is None
        start = self._turn % len(self.servers)
        loads = []
        for server in self.servers[start:] + self.servers[:start]:
            slots = server.eval_sem if split == "eval" else server.sem
            loads.append((server, Load(slots.in_use, slots.limit)))
        return self.routing.choose(loads, time.monotonic(), preferred, tried)

    async def server_for(
        self, asked: APIServer, split: str, tried: Collection[APIServer]
    ) -> APIServer:
        """The server that a request, made on `asked`, goes to now; waits while all are away.

        Raises:
            InferenceUnavailable: all were away for too long.
        """
        self._keep_watch()
        while (server := self.pick(split, preferred=asked, tried=tried)) is None:
            await self.gate.wait_until_well(self._reasons())
        self.routing.sent(server, time.monotonic())
        return server

    @contextlib.asynccontextmanager
    async def carrying(self, server: APIServer) -> AsyncGenerator[None, None]:
        """While a request is under way there.

        Raises:
            MovedElsewhere: the server was away for so long that the request had better be asked
                elsewhere.
        """
        if not self._under_way:
            self._last_answer = time.monotonic()
        under_way = self._under_way.setdefault(server, set())
        try:
            async with asyncio.timeout(None) as moved:
                under_way.add(moved)
                try:
                    yield
                finally:
                    under_way.discard(moved)
        except TimeoutError as error:
            if moved.expired():
                raise MovedElsewhere(self.routing.of(server).away or "away") from error
            raise
        finally:
            if not under_way:
                self._under_way.pop(server, None)

    # ---- what is experienced ----

    def refused(self, server: APIServer, began: float, why: str) -> None:
        """A request found it away."""
        self._last_answer = time.monotonic()
        known = self.routing.of(server)
        if not known.away and len(self.servers) > 1:
            logger.info(
                "%s at %s is away (%s): requests go to the others", self.role, server.root_url, why
            )
        self.routing.refused(server, began, time.monotonic(), why)

    def failed(self, server: APIServer, began: float) -> None:
        """A request failed by its fault."""
        self._last_answer = time.monotonic()
        self.routing.failed(server, began, time.monotonic())

    def answered(self, server: APIServer, began: float) -> None:
        """A request was answered."""
        self._last_answer = time.monotonic()
        self.routing.answered(server, began)

    # ---- looking ----

    def _keep_watch(self) -> None:
        """Look at the servers while there are requests."""
        if self._can_be_watched() and (self._watcher is None or self._watcher.done()):
            self._watcher = asyncio.create_task(
                self._watch(), name="looks at the inference servers"
            )

    def _can_be_watched(self) -> bool:
        return len(self.servers) > 1 or self.servers[0].looked_at_always

    def _is_looked_at(self, server: APIServer) -> bool:
        """Return whether to look at a server now.

        One that stands alone is left alone while it answers requests.
        """
        if self.routing.of(server).away:
            return True
        quiet = bool(self._under_way) and time.monotonic() - self._last_answer >= QUIET_SECONDS
        return server.looked_at_always and (len(self.servers) > 1 or quiet)

    async def _watch(self) -> None:
        idle = 0
        while idle < LOOKS_AFTER_WORK and self._can_be_watched():
            try:
                for server in self._all():
                    if self._is_looked_at(server):
                        self._look_at(server)
                self._move_what_is_lost()
            except (
                Exception
            ):  # looks must go on; what they tell is a help, requests find out by themselves
                logger.exception("looking at the inference servers failed; it is tried again")
            idle = 0 if self._under_way or not self.gate.open else idle + 1
            await asyncio.sleep(LOOK_SECONDS)

    def _look_at(self, server: APIServer) -> asyncio.Task[None]:
        """Ask one server how it is, unless it is being asked already."""
        task = self._looking.get(server)
        if task is None or task.done():
            task = self._looking[server] = asyncio.create_task(
                self._look(server), name=f"look at {server.root_url}"
            )
        return task

    async def _look(self, server: APIServer) -> None:
        began, known = time.monotonic(), self.routing.of(server)
        try:
            look = await server.look()
        except Exception as error:  # noqa: BLE001  # whatever it says that nobody can read: it is not well
            look = Look(wrong=f"{type(error).__name__}: {error}")
        was_away = known.away
        self.routing.looked(
            server, began, time.monotonic(), look, server.sem.in_use + server.eval_sem.in_use
        )
        if server in self.servers and bool(was_away) != bool(known.away):
            self._log_change(server, known.away)

    def _log_change(self, server: APIServer, away: str) -> None:
        """Log that a server is away, or back if `away` is empty.

        A gate logs the same for one that has no requests.
        """
        waiting = len(self._under_way.get(server, ()))
        if len(self.servers) == 1 and not waiting:
            return
        if not away:
            logger.info("%s at %s is back", self.role, server.root_url)
        elif len(self.servers) > 1:
            logger.info(
                "%s at %s is away (%s): requests go to the others", self.role, server.root_url, away
            )
        else:
            logger.warning(
                "%s at %s is away (%s): %d requests wait for it; start it again if it does not come back",
                self.role,
                server.root_url,
                away,
                waiting,
            )

    def _move_what_is_lost(self) -> None:
        now = time.monotonic()
        for server in self.routing.lost(list(self._all()), now, MOVE_AFTER_SECONDS):
            under_way = [moved for moved in self._under_way.get(server, ()) if moved.when() is None]
            if under_way and self.routing.available(self.servers):
                logger.warning("%d requests at %s are asked elsewhere: it is away (%s)", len(under_way), server.root_url,
                               self.routing.of(server).away)  # fmt: skip
                for moved in under_way:
                    moved.reschedule(asyncio.get_running_loop().time())

    async def _look_at_all(self) -> str | None:
        """The gate's probe: None when some server can be asked, else what is wrong with each."""
        await asyncio.gather(*(self._look_at(server) for server in self.servers))
        return None if self.routing.available(self.servers) else self._reasons()

    def _reasons(self) -> str:
        if len(self.servers) == 1:
            return self.routing.of(self.servers[0]).away
        return ", ".join(
            f"{server.root_url} ({self.routing.of(server).away})" for server in self.servers
        )

    async def wait_until_well(self) -> None:
        """Return once some server is well.

        Raises:
            InferenceUnavailable: none was in time.
        """
        if (wrong := await self._look_at_all()) is not None:
            await self.gate.wait_until_well(wrong)

    async def close(self) -> None:
        """Look no longer."""
        tasks = [
            task
            for task in (self._watcher, *self._looking.values())
            if task is not None and not task.done()
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
