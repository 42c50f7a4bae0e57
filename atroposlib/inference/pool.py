"""The servers of one kind that answer for each other: which of them a request goes to, what is known
of their health, and retries.

`Choice` decides, without I/O and without a clock. What it knows of a server comes from two sources. A
*look* asks the server: does it serve, which weights has it, how many requests are in flight there. A
*request* meets the server: it was answered, was refused because the server is away, or failed although
the server is there. A look may find a server well that fails every request, so both count:

* a server that is away, by either source, gets nothing until a later look finds it well;
* one that fails gets nothing for a pause that doubles with every failure in a row, and then one
  request, as a trial;
* of the others, the pool asks those with the freshest weights, and among them the one with the least
  to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import httpx
import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion

from atroposlib.errors import EnvironmentFailure, InferenceUnavailable, RolloutFailure, UsageError
from atroposlib.inference.generation import Generation, Weights
from atroposlib.utils.waiting import Patience

if TYPE_CHECKING:
    from atroposlib.inference.client import APIServer

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Split = Literal["train", "eval"]

DEFAULT_OUTAGE_TIMEOUT = 1800.0
MAX_ATTEMPTS = 3
SERVER_IS_AWAY = (502, 503, 504)
"""Bad gateway, unavailable, gateway timeout: the server restarts, or pauses for an update of its
weights."""
CUT_OFF = ("abort", "error")
"""Finish reasons of samples that the server broke off, from vLLM and SGLang with status 200."""
SETTLING_SECONDS = 2.0
"""Servers take over new weights at nearly the same time, and are looked at a little later one than
the other: only who is still behind after so long counts as behind. Otherwise the first one to be
seen with new weights would be sent everything."""
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0
"""Seconds for which a server gets nothing after its first failure, and at most."""

LOOK_SECONDS = 1.0
"""How often a server is asked how it is, while requests are under way."""
MOVE_AFTER_SECONDS = 15.0
"""A server that is silent, or does not serve, for so long loses the requests that it has, if
another can answer them."""
QUIET_SECONDS = 30.0
"""A server that stands alone is looked at once its requests have had no answer for so long."""
LOOKS_AFTER_WORK = 5
"""Rounds of looks after the last request; then the servers are left in peace."""


@dataclass(frozen=True, slots=True)
class Look:
    """A server's answer to a health probe."""

    wrong: str = ""
    """Why it cannot be asked for anything; empty if it can."""
    weights: Weights | None = None
    """Weights that it serves; None if it does not report them."""
    in_flight: int | None = None
    """Requests that it works on, whoever sent them; None if it does not say."""


@dataclass(frozen=True, slots=True)
class Load:
    """This process's requests at one server."""

    ours: int
    """Requests."""
    most: int
    """As many may be at once."""


@dataclass(slots=True)
class Standing:
    """State of one server."""

    away: str = ""
    """Why it cannot be asked; empty if it can."""
    away_since: float = 0.0
    """When it began to be away, without having been well in between."""
    refused_at: float = 0.0
    """When a request was refused last: only a look that began later knows more."""
    weights: Weights | None = None
    in_flight: int | None = None
    ours_then: int = 0
    """This process's share of the requests in flight."""
    failures: int = 0
    """In a row. What fails at the same time counts once."""
    failed_at: float = 0.0
    avoid_until: float = 0.0

    def load(self, ours: int) -> int:
        """Requests in flight there now, as far as can be known."""
        return ours if self.in_flight is None else max(ours, self.in_flight + ours - self.ours_then)

    @property
    def pause(self) -> float:
        """Seconds for which it gets nothing after its last failure."""
        return (
            min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(self.failures - 1, 16)) if self.failures else 0.0
        )


@dataclass
class Choice(Generic[Key]):
    """The servers' standings, and the choice among them."""

    standings: dict[Key, Standing] = field(default_factory=dict)
    _newest: deque[tuple[float, Weights]] = field(default_factory=deque)
    """The newest weights seen anywhere, each with when they were first seen."""

    def of(self, key: Key) -> Standing:
        """A server's standing; one that was not heard of is taken to be well."""
        known = self.standings.get(key)
        if known is None:
            known = self.standings[key] = Standing()
        return known

    def keep_only(self, keys: Collection[Key]) -> None:
        """Forget all other servers."""
        self.standings = {key: standing for key, standing in self.standings.items() if key in keys}

    # ---- what is seen ----

    def looked(self, key: Key, began: float, now: float, look: Look, ours: int = 0) -> None:
        """A look is over.

        Args:
            key: the server.
            began: when it was sent.
            now: when it was answered, or given up.
            look: what came of it.
            ours: requests that this process has there now.
        """
        known = self.of(key)
        if look.wrong:
            self._away(known, now, look.wrong)
            known.failures, known.avoid_until = (
                0,
                0.0,
            )  # it is known why; when it is back, it is asked at once
            return
        known.in_flight, known.ours_then = look.in_flight, ours
        if look.weights is not None:
            known.weights = look.weights
            if not self._newest or look.weights > self._newest[-1][1]:
                self._newest.append((now, look.weights))
        if began >= known.refused_at:
            known.away = ""

    def refused(self, key: Key, began: float, now: float, why: str) -> None:
        """A request, sent at `began`, found the server away."""
        known = self.of(key)
        known.refused_at = now
        self._away(known, now, why)
        self.failed(key, began, now)

    def failed(self, key: Key, began: float, now: float) -> None:
        """A request, sent at `began`, failed by the server's fault."""
        known = self.of(key)
        if began < known.failed_at:
            return  # it was under way already when another one failed: that is the same fault
        known.failures += 1
        known.failed_at, known.avoid_until = now, now + known.pause

    def answered(self, key: Key, began: float) -> None:
        """A request, sent at `began`, was answered."""
        known = self.of(key)
        if began >= known.failed_at:
            known.failures, known.avoid_until = 0, 0.0

    @staticmethod
    def _away(known: Standing, now: float, why: str) -> None:
        if not known.away:
            known.away_since = now
        known.away = why

    # ---- what follows ----

    def available(self, keys: Sequence[Key]) -> list[Key]:
        """Return the servers that accept requests."""
        return [key for key in keys if not self.of(key).away]

    def lost(self, keys: Sequence[Key], now: float, patience: float) -> list[Key]:
        """Those whose requests had better be asked elsewhere: away for `patience` seconds while
        others can be asked.
        """
        if not self.available(keys):
            return []
        return [
            key for key in keys if self.of(key).away and now - self.of(key).away_since >= patience
        ]

    def settled_weights(self, now: float) -> Weights | None:
        """The weights that every server should have by now; None if none says which it has."""
        while len(self._newest) > 1 and self._newest[1][0] <= now - SETTLING_SECONDS:
            self._newest.popleft()
        if not self._newest or self._newest[0][0] > now - SETTLING_SECONDS:
            return None
        return self._newest[0][1]

    def choose(
        self,
        loads: Sequence[tuple[Key, Load]],
        now: float,
        preferred: Key | None = None,
        tried: Collection[Key] = (),
    ) -> Key | None:
        """The server that the next request goes to; None if all are away.

        Args:
            loads: the servers that may be asked, each with what is under way there. Among equals
                the first one is taken.
            now: the time.
            preferred: taken whatever its load, if no other is better in any other way: it may still
                have what a conversation said before.
            tried: servers at which this request has failed already: asked again only if there is no
                other.
        """
        settled = self.settled_weights(now)

        def merit(key: Key) -> tuple[bool, bool, float, tuple[int, int]]:
            known = self.of(key)
            avoided = now < known.avoid_until
            behind = (0, 0)
            if settled is not None and known.weights is not None and known.weights < settled:
                # The freshest of those that are behind; any of them is behind those that are not.
                behind = (
                    1 + settled.epoch - known.weights.epoch,
                    settled.version - known.weights.version,
                )
            return key in tried, avoided, known.avoid_until if avoided else 0.0, behind

        def burden(key: Key, load: Load) -> tuple[bool, int]:
            return load.ours >= load.most, self.of(key).load(load.ours)

        candidates = [(merit(key), key, load) for key, load in loads if not self.of(key).away]
        if not candidates:
            return None
        best = min(rank for rank, _, _ in candidates)
        good = [(key, load) for rank, key, load in candidates if rank == best]
        if preferred is not None and any(key == preferred for key, _ in good):
            return preferred
        return min(good, key=lambda entry: burden(*entry))[0]

    def sent(self, key: Key, now: float) -> None:
        """A request goes there.

        After failures it is the trial: what follows waits for what comes of it.
        """
        known = self.of(key)
        if known.failures:
            known.avoid_until = now + known.pause


class HealthGate:
    """Opens while a server is well.

    Args:
        what: says what is waited for.
        probe: returns None when a server is well, else what is wrong.
        address_flag: how its address is passed.
    """

    def __init__(
        self, what: Callable[[], str], probe: Callable[[], Awaitable[str | None]], address_flag: str
    ):
        self.what, self.probe, self.address_flag = what, probe, address_flag
        self.outage_timeout = DEFAULT_OUTAGE_TIMEOUT
        self.failure: InferenceUnavailable | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._away_before = 0.0
        self._away_since: float | None = None

    @property
    def seconds_away(self) -> float:
        """For how long nothing could be asked since the start, all outages together."""
        return self._away_before + (
            0.0 if self._away_since is None else time.monotonic() - self._away_since
        )

    @property
    def open(self) -> bool:
        return self._recovery is None and self.failure is None

    async def wait_until_well(self, why: str) -> None:
        """Return once a server is well.

        Raises:
            InferenceUnavailable: it did not within `outage_timeout` seconds; also for every later
                caller.
        """
        if self.failure is not None:
            raise self.failure
        if self._recovery is None:
            self._recovery = asyncio.create_task(self._recover(why))
        # A caller that is cancelled must not cancel the recovery that others wait for.
        await asyncio.shield(self._recovery)

    async def _recover(self, why: str) -> None:
        patience = Patience(
            self.what(),
            self.outage_timeout,
            InferenceUnavailable,
            logger,
            f"start it, or pass its address as {self.address_flag}",
        )
        self._away_since = time.monotonic()
        try:
            while True:
                await patience.wait(why)
                wrong = await self.probe()
                if wrong is None:
                    patience.done()
                    return
                why = wrong
        except InferenceUnavailable as failure:
            self.failure = failure
            raise
        finally:
            self._recovery, self._away_before, self._away_since = None, self.seconds_away, None


class ServerIsAway(Exception):
    """The server cannot be reached or is not ready: worth waiting for."""


class MovedElsewhere(Exception):
    """The server has been away for so long that its requests are asked of another."""


class CutOff(Exception):
    """A server broke off what it sampled."""


def require_whole(answer: object) -> None:
    """
    Raises:
        CutOff: a completion in the answer to a request was broken off, so it is no sample of the
            model.
    """
    if isinstance(answer, Generation):
        reasons = answer.finish_reasons
    elif isinstance(answer, ChatCompletion | Completion):
        reasons = [str(choice.finish_reason) for choice in answer.choices]
    else:
        return
    if cut := [reason for reason in reasons if reason in CUT_OFF]:
        raise CutOff(f"{len(cut)} of {len(reasons)} completions were broken off ({cut[0]})")


def is_away(error: Exception) -> bool:
    """Return whether the failure says that the server is not there, rather than that the request
    was wrong.
    """
    if isinstance(error, ServerIsAway | httpx.TransportError) and not isinstance(
        error, httpx.TimeoutException
    ):
        return True
    if isinstance(error, httpx.ConnectTimeout):
        return True
    if isinstance(error, openai.APIConnectionError) and not isinstance(
        error, openai.APITimeoutError
    ):
        return True
    return status_of(error) in SERVER_IS_AWAY


def worth_retrying(error: Exception) -> bool:
    """Return whether the same request may succeed a second time: not when the server refused it as
    wrong.
    """
    status = status_of(error)
    return status is None or status == 429 or status >= 500


def status_of(error: Exception) -> int | None:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code
    if isinstance(error, openai.APIStatusError):
        return error.status_code
    return None


def describe(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"{error.response.status_code}: {error.response.text[:300]}"
    return f"{type(error).__name__}: {error}"


def require_temperature(temperature: Any, highest: float | None, server: str) -> None:
    """
    Raises:
        UsageError: the server would refuse every request at this temperature.
    """
    if (
        highest is not None
        and isinstance(temperature, int | float)
        and not 0 <= temperature <= highest
    ):
        raise UsageError(
            f"temperature {temperature:g} is outside what the {server} takes, 0 to {highest:g}: change it"
        )


@dataclass
class Attempts:
    """Course of one request.

    Attributes:
        tried: servers that did not answer it.
        failures: attempts that failed at a server that was there.
        away_since: when it met a server that was away for the first time.
    """

    tried: list[APIServer] = field(default_factory=list)
    failures: int = 0
    away_since: float | None = None


class ServerPool:
    """The servers of one kind that answer for each other.

    Args:
        servers: at least one; `adopt` changes them.
        role: what each is, for messages.
        address_flag: how their addresses are passed.
    """

    def __init__(self, servers: Sequence[APIServer], role: str, address_flag: str):
        self.servers: list[APIServer] = []
        self.choice: Choice[APIServer] = Choice()
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
            server.pool = self
        self.servers = list(servers)
        self.choice.keep_only(self._all())

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
        return self.gate.open and not self.choice.of(server).away

    # ---- choosing ----

    def pick(
        self, split: Split, preferred: APIServer | None = None, tried: Collection[APIServer] = ()
    ) -> APIServer | None:
        """The server for the next request; None if all are away."""
        # Start at another server each time, so that requests sent together spread over equally good
        # ones.
        self._turn += preferred is None
        start = self._turn % len(self.servers)
        loads = []
        for server in self.servers[start:] + self.servers[:start]:
            slots = server.slots(split)
            loads.append((server, Load(slots.in_use, slots.limit)))
        return self.choice.choose(loads, time.monotonic(), preferred, tried)

    async def server_for(
        self, asked: APIServer, split: Split, tried: Collection[APIServer]
    ) -> APIServer:
        """The server that a request, made on `asked`, goes to now; waits while all are away.

        Raises:
            InferenceUnavailable: all were away for too long.
        """
        self._keep_watch()
        while (server := self.pick(split, preferred=asked, tried=tried)) is None:
            await self.gate.wait_until_well(self._reasons())
        self.choice.sent(server, time.monotonic())
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
                raise MovedElsewhere(self.choice.of(server).away or "away") from error
            raise
        finally:
            if not under_way:
                self._under_way.pop(server, None)

    async def request(self, asked: APIServer, method: str, fields: dict[str, Any]) -> Any:
        """Call a method of `asked`, or the same one of a server that answers for it.

        A server that is away is not an attempt: the request goes to another one, or waits.

        Args:
            asked: preferred as long as no other server is better.
            method: name of a coroutine method that takes the request's fields.
            fields: of the request, and `split`.

        Raises:
            InferenceUnavailable: all were away for too long.
            UsageError: the servers refuse this temperature.
        """
        require_temperature(
            fields.get("temperature"),
            asked.highest_temperature,
            f"{asked.role} at {asked.root_url}",
        )
        split: Split = fields.get("split", "train")
        fields = {name: value for name, value in fields.items() if name != "split"}
        attempts = Attempts()
        while True:
            server = await self.server_for(asked, split, attempts.tried)
            began = time.monotonic()
            try:
                async with self.carrying(server), server.slots(split):
                    began = time.monotonic()
                    answer = await getattr(server, method)(
                        **{"model": await server.model(), **fields}
                    )
                require_whole(answer)
            except (EnvironmentFailure, RolloutFailure, NotImplementedError):
                raise
            except MovedElsewhere:
                attempts.tried.append(server)
            except Exception as error:
                attempts.tried.append(server)
                if not await self._tries_again(server, began, error, attempts):
                    raise
            else:
                server.note_timing(split, time.monotonic() - began, attempts.failures + 1)
                self.answered(server, began)
                return answer

    async def _tries_again(
        self, server: APIServer, began: float, error: Exception, attempts: Attempts
    ) -> bool:
        """Note that a request failed, and return whether to send it again, after a pause if no
        other server is left.

        Raises:
            InferenceUnavailable: servers were away for too long.
        """
        if server.config.health_check and is_away(error):
            # A server may pass its health check and still refuse this request: that ends, too.
            attempts.away_since = attempts.away_since or time.monotonic()
            waited = time.monotonic() - attempts.away_since
            if waited > self.gate.outage_timeout:
                raise InferenceUnavailable(
                    f"{self.role} at {server.root_url}: {describe(error)} for {waited:.0f} s, giving up"
                ) from error
            self.refused(server, began, f"cannot be reached ({describe(error)})")
            return True
        if not worth_retrying(error):
            return False
        self.failed(server, began)
        attempts.failures += 1
        if attempts.failures >= MAX_ATTEMPTS:
            return False
        logger.warning(
            "request to %s failed, attempt %d of %d: %s",
            server.root_url,
            attempts.failures,
            MAX_ATTEMPTS,
            describe(error),
        )
        if len(set(attempts.tried)) >= len(self.servers):
            await asyncio.sleep(0.5 * attempts.failures)
        return True

    # ---- what is experienced ----

    def refused(self, server: APIServer, began: float, why: str) -> None:
        """A request found it away."""
        self._last_answer = time.monotonic()
        known = self.choice.of(server)
        if not known.away and len(self.servers) > 1:
            logger.info(
                "%s at %s is away (%s): requests go to the others", self.role, server.root_url, why
            )
        self.choice.refused(server, began, time.monotonic(), why)

    def failed(self, server: APIServer, began: float) -> None:
        """A request failed by its fault."""
        self._last_answer = time.monotonic()
        self.choice.failed(server, began, time.monotonic())

    def answered(self, server: APIServer, began: float) -> None:
        """A request was answered."""
        self._last_answer = time.monotonic()
        self.choice.answered(server, began)

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
        if self.choice.of(server).away:
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
        began, known = time.monotonic(), self.choice.of(server)
        try:
            look = await server.look()
        except Exception as error:  # noqa: BLE001  # whatever it says that nobody can read: it is not well
            look = Look(wrong=f"{type(error).__name__}: {error}")
        was_away = known.away
        self.choice.looked(
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
        for server in self.choice.lost(list(self._all()), now, MOVE_AFTER_SECONDS):
            under_way = [moved for moved in self._under_way.get(server, ()) if moved.when() is None]
            if under_way and self.choice.available(self.servers):
                logger.warning("%d requests at %s are asked elsewhere: it is away (%s)", len(under_way), server.root_url,
                               self.choice.of(server).away)  # fmt: skip
                for moved in under_way:
                    moved.reschedule(asyncio.get_running_loop().time())

    async def _look_at_all(self) -> str | None:
        """The gate's probe: None when some server can be asked, else what is wrong with each."""
        await asyncio.gather(*(self._look_at(server) for server in self.servers))
        return None if self.choice.available(self.servers) else self._reasons()

    def _reasons(self) -> str:
        if len(self.servers) == 1:
            return self.choice.of(self.servers[0]).away
        return ", ".join(
            f"{server.root_url} ({self.choice.of(server).away})" for server in self.servers
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
