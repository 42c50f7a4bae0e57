"""Pools of inference servers that answer for each other: choice of a server, health and retries.

`Choice` decides, without I/O and without a clock. It has two sources. A *poll* asks a server: does it
serve, which weights has it, how many requests are in flight there. A *request* meets the server: it was
answered, was refused because the server is away, or failed although the server is there. A server may
look well in a poll and fail every request, so both count:

* a server that is away, by either source, gets nothing until a later poll shows that it is well;
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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import httpx
import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion

from atroposlib.errors import EnvironmentFailure, InferenceUnavailable, RolloutFailure, UsageError
from atroposlib.inference.generation import Generation, Weights, current_versions
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
"""Servers load new weights at almost the same time but are polled one after another. A server counts
as behind only if it still has old weights after this many seconds. Otherwise the first server that
reports new weights would get all requests."""
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0
"""Seconds for which a server gets nothing after its first failure, and at most."""

POLL_SECONDS = 1.0
"""Seconds between two polls of a server while requests are under way."""
MOVE_AFTER_SECONDS = 15.0
"""A server that is silent or does not serve for this many seconds loses its requests, if another
server can answer them."""
QUIET_SECONDS = 30.0
"""The pool polls a single server once its requests have had no answer for this many seconds."""
POLLS_AFTER_WORK = 5
"""Rounds of polls after the last request; then they stop."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """A server's answer to a health probe."""

    wrong: str = ""
    """Reason for which it accepts no requests; empty if it does."""
    weights: Weights | None = None
    """Weights that it serves; None if it does not report them."""
    in_flight: int | None = None
    """Requests that it works on, from all senders; None if it does not report them."""


@dataclass(frozen=True, slots=True)
class Load:
    """This process's requests at one server."""

    ours: int
    """Requests under way."""
    most: int
    """Limit of requests at once."""


@dataclass(slots=True)
class ServerState:
    """State of one server."""

    away: str = ""
    """Reason for which it accepts no requests; empty if it does."""
    away_since: float = 0.0
    """Begin of the present outage."""
    refused_at: float = 0.0
    """Time of the last refused request: only a poll that began later can end the outage."""
    weights: Weights | None = None
    in_flight: int | None = None
    ours_then: int = 0
    """This process's share of the requests in flight."""
    failures: int = 0
    """In a row. Requests that fail at the same time count once."""
    failed_at: float = 0.0
    avoid_until: float = 0.0

    def load(self, ours: int) -> int:
        """Estimate the requests in flight there now."""
        if self.in_flight is None:
            return ours
        return max(ours, self.in_flight + ours - self.ours_then)

    @property
    def pause(self) -> float:
        """Seconds for which it gets nothing after its last failure."""
        if not self.failures:
            return 0.0
        return min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(self.failures - 1, 16))


@dataclass
class Choice(Generic[Key]):
    """The servers' states, and the choice among them."""

    states: dict[Key, ServerState] = field(default_factory=dict)
    _newest: deque[tuple[float, Weights]] = field(default_factory=deque)
    """(time, weights) of each poll that reported newer weights than all before."""

    def of(self, key: Key) -> ServerState:
        """Return a server's state. An unknown server counts as well."""
        state = self.states.get(key)
        if state is None:
            state = self.states[key] = ServerState()
        return state

    def keep_only(self, keys: Collection[Key]) -> None:
        """Forget all other servers."""
        self.states = {key: state for key, state in self.states.items() if key in keys}

    # ---- events ----

    def polled(
        self, key: Key, began: float, now: float, report: HealthReport, ours: int = 0
    ) -> None:
        """Note the result of a poll.

        Args:
            key: the server.
            began: when it was sent.
            now: when it was answered, or given up.
            report: the result.
            ours: requests that this process has there now.
        """
        state = self.of(key)
        if report.wrong:
            self._away(state, now, report.wrong)
            # The reason is known: once the server is back, it gets requests at once.
            state.failures, state.avoid_until = 0, 0.0
            return
        state.in_flight, state.ours_then = report.in_flight, ours
        if report.weights is not None:
            state.weights = report.weights
            if not self._newest or report.weights > self._newest[-1][1]:
                self._newest.append((now, report.weights))
        if began >= state.refused_at:
            state.away = ""

    def refused(self, key: Key, began: float, now: float, why: str) -> None:
        """Note that a request, sent at `began`, found the server away."""
        state = self.of(key)
        state.refused_at = now
        self._away(state, now, why)
        self.failed(key, began, now)

    def failed(self, key: Key, began: float, now: float) -> None:
        """Note that a request, sent at `began`, failed by the server's fault."""
        state = self.of(key)
        if began < state.failed_at:
            return  # The request was under way when another one failed: the same fault.
        state.failures += 1
        state.failed_at, state.avoid_until = now, now + state.pause

    def answered(self, key: Key, began: float) -> None:
        """Note that a request, sent at `began`, was answered."""
        state = self.of(key)
        if began >= state.failed_at:
            state.failures, state.avoid_until = 0, 0.0

    @staticmethod
    def _away(state: ServerState, now: float, why: str) -> None:
        if not state.away:
            state.away_since = now
        state.away = why

    # ---- decisions ----

    def available(self, keys: Sequence[Key]) -> list[Key]:
        """Return the servers that accept requests."""
        return [key for key in keys if not self.of(key).away]

    def overdue(self, keys: Sequence[Key], now: float, seconds: float) -> list[Key]:
        """Return the servers that should lose their requests: away for `seconds` or longer, while
        another server accepts requests.
        """
        if not self.available(keys):
            return []
        return [
            key for key in keys if self.of(key).away and now - self.of(key).away_since >= seconds
        ]

    def settled_weights(self, now: float) -> Weights | None:
        """Return the weights that every server should have by now; None if no server reports its own."""
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
        """Return the server that the next request goes to; None if all are away.

        Args:
            loads: the candidates with their loads. The first of equal ones is taken.
            now: the time.
            preferred: taken whatever its load, if no other is better in any other way. It may hold
                the beginning of the conversation in its cache.
            tried: servers at which this request failed; taken only if there is no other.
        """
        settled = self.settled_weights(now)

        def merit(key: Key) -> tuple[bool, bool, float, tuple[int, int]]:
            state = self.of(key)
            avoided = now < state.avoid_until
            behind = (0, 0)
            if settled is not None and state.weights is not None and state.weights < settled:
                # Servers with settled weights come first, then the freshest of the others.
                behind = (
                    1 + settled.epoch - state.weights.epoch,
                    settled.version - state.weights.version,
                )
            return key in tried, avoided, state.avoid_until if avoided else 0.0, behind

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
        """Note that a request goes to a server.

        After failures it is a trial: the server gets no other request until its pause is over.
        """
        state = self.of(key)
        if state.failures:
            state.avoid_until = now + state.pause


class ServerIsAway(Exception):
    """The server cannot be reached or is not ready: worth waiting for."""


class MovedElsewhere(Exception):
    """The server has been away for so long that its requests go to another one."""


class CutOff(Exception):
    """A server broke off what it sampled."""


def require_whole(answer: object) -> None:
    """Refuse an answer with incomplete completions.

    Raises:
        CutOff: the server broke a completion off, so that it is not a sample of the model.
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
    """Return whether a request failed because the server is away, not because of its content."""
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
    """Return whether the same request may succeed a second time, because the server did not refuse
    its content.
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
    """Refuse a temperature that a server does not support.

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


class InferenceCalls(ABC):
    """The requests that environments make: of a pool, or of a server that they prefer to others of
    its pool.
    """

    @abstractmethod
    async def _request(self, method: str, fields: dict[str, Any]) -> Any:
        """Have one server's coroutine method answer a request."""

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        return await self._request("_chat_completion_wrapper", kwargs)

    async def completion(self, **kwargs: Any) -> Completion:
        return await self._request("_completion_wrapper", kwargs)

    async def generate(self, **kwargs: Any) -> Generation:
        """Token ids in (`input_ids`, or `prompt` as text), token ids, logprobs and weight versions
        out.
        """
        generation = await self._request("_generate_wrapper", kwargs)
        if record := current_versions.get():
            record.note_generation(generation, training=kwargs.get("split") != "eval")
        return generation

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> tuple[list, list, list, list]:
        result = await self.generate(**kwargs)
        return (
            result.prompt_tokens,
            result.output_tokens,
            result.output_logprobs,
            result.finish_reasons,
        )

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Logprobs of a prompt: `prompt_tokens`, `prompt_topk_token_ids`, `prompt_topk_logprobs`."""
        return await self._request("_get_logprobs_wrapper", kwargs)


class ServerPool(InferenceCalls):
    """The servers of one kind that answer for each other.

    Args:
        servers: at least one; `adopt` changes them.
        role: name of the kind, for messages.
        address_flag: flag that passes their addresses.
    """

    def __init__(self, servers: Sequence[APIServer], role: str, address_flag: str):
        self.servers: list[APIServer] = []
        self.choice: Choice[APIServer] = Choice()
        self.role, self.address_flag = role, address_flag
        self.outage_timeout = DEFAULT_OUTAGE_TIMEOUT
        """Seconds for which requests wait while all servers are away."""
        self.failure: InferenceUnavailable | None = None
        """Set once all were away for longer; the pool then fails every request that finds all
        away."""
        self._recovery: asyncio.Task[None] | None = None
        self._away_before = 0.0
        self._away_since: float | None = None
        self._turn = 0
        self._under_way: dict[APIServer, set[asyncio.Timeout]] = {}
        self._polls: dict[APIServer, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._last_answer = 0.0
        """time.monotonic() of the last answer, or of the first request after a time without any."""
        self.adopt(servers)

    def adopt(self, servers: Sequence[APIServer]) -> None:
        """Replace the servers of the pool.

        Requests under way at a former server stay there. Later requests made on it go to the new
        ones.
        """
        for server in servers:
            server.pool = self
        self.servers = list(servers)
        self.choice.keep_only(self._all())

    def _all(self) -> set[APIServer]:
        """Return the servers, and former ones that still have requests."""
        return {*self.servers, *self._under_way}

    def works_on(self, server: APIServer) -> bool:
        """Return whether requests are under way at a server."""
        return server in self._under_way

    def _what(self) -> str:
        if len(self.servers) == 1:
            return f"{self.role} at {self.servers[0].root_url}"
        return f"{self.role}s, {len(self.servers)} of which none can be asked"

    def healthy(self, server: APIServer) -> bool:
        """Return whether the server gets requests."""
        return self._is_open() and not self.choice.of(server).away

    # ---- choosing ----

    def free(self, split: Split) -> int:
        """Return the number of requests that servers would take at once; -1 if all are away."""
        well = self.choice.available(self.servers)
        return sum(server.slots(split).free for server in well) if well else -1

    def pick(
        self, split: Split, preferred: APIServer | None = None, tried: Collection[APIServer] = ()
    ) -> APIServer | None:
        """Return the best server for the next request; None if all are away."""
        # Start at another server each time, so that requests sent together spread over equal ones.
        self._turn += preferred is None
        start = self._turn % len(self.servers)
        loads = []
        for server in self.servers[start:] + self.servers[:start]:
            slots = server.slots(split)
            loads.append((server, Load(slots.in_use, slots.limit)))
        return self.choice.choose(loads, time.monotonic(), preferred, tried)

    @contextlib.asynccontextmanager
    async def track_request(self, server: APIServer) -> AsyncGenerator[None, None]:
        """Note that a request is under way at a server during the block.

        Raises:
            MovedElsewhere: the server was away for so long that another one should answer.
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

    async def _request(self, method: str, fields: dict[str, Any]) -> Any:
        return await self.request(method, fields)

    async def request(
        self, method: str, fields: dict[str, Any], preferred: APIServer | None = None
    ) -> Any:
        """Call a method of the best server. Wait while all are away.

        A server that is away is not an attempt: the request goes to another one, or waits.

        Args:
            method: name of a coroutine method that takes the request's fields.
            fields: of the request, and `split`.
            preferred: the server that gets it as long as no other one is better.

        Raises:
            InferenceUnavailable: all were away for too long.
            UsageError: the servers refuse this temperature.
        """
        first = preferred or self.servers[0]
        require_temperature(
            fields.get("temperature"),
            first.highest_temperature,
            f"{first.role} at {first.root_url}",
        )
        split: Split = fields.get("split", "train")
        fields = {name: value for name, value in fields.items() if name != "split"}
        attempts = Attempts()
        while True:
            self._keep_watch()
            server = self.pick(split, preferred, attempts.tried)
            if server is None:
                await self.wait_until_well(self._reasons())
                continue
            began = time.monotonic()
            self.choice.sent(server, began)
            try:
                async with self.track_request(server), server.slots(split):
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
                self.choice.answered(server, began)
                self._last_answer = now = time.monotonic()
                server.timings[split].append((now - began, attempts.failures + 1))
                return answer

    async def _tries_again(
        self, server: APIServer, began: float, error: Exception, attempts: Attempts
    ) -> bool:
        """Note that a request failed, and return whether to send it again, after a pause if no
        other server is left.

        Raises:
            InferenceUnavailable: servers were away for too long.
        """
        away = server.config.health_check and is_away(error)
        if not away and not worth_retrying(error):
            return False
        self._last_answer = now = time.monotonic()
        if away:
            # A server may pass its health check and still refuse this request: that ends, too.
            attempts.away_since = attempts.away_since or now
            waited = now - attempts.away_since
            if waited > self.outage_timeout:
                raise InferenceUnavailable(
                    f"{self.role} at {server.root_url}: {describe(error)} for {waited:.0f} s, giving up"
                ) from error
            was_away = self.choice.of(server).away
            self.choice.refused(server, began, now, f"cannot be reached ({describe(error)})")
            if len(self.servers) > 1:
                self._log_change(server, was_away)
            return True
        self.choice.failed(server, began, now)
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

    # ---- polling ----

    def _keep_watch(self) -> None:
        """Poll the servers while there are requests."""
        if self._can_be_watched() and (self._watcher is None or self._watcher.done()):
            self._watcher = asyncio.create_task(self._watch(), name="polls the inference servers")

    def _can_be_watched(self) -> bool:
        return len(self.servers) > 1 or self.servers[0].polled_always

    def _is_polled(self, server: APIServer) -> bool:
        """Return whether to poll a server now.

        A single server is not polled while it answers requests.
        """
        if self.choice.of(server).away:
            return True
        quiet = bool(self._under_way) and time.monotonic() - self._last_answer >= QUIET_SECONDS
        return server.polled_always and (len(self.servers) > 1 or quiet)

    async def _watch(self) -> None:
        idle = 0
        while idle < POLLS_AFTER_WORK and self._can_be_watched():
            try:
                for server in self._all():
                    if self._is_polled(server):
                        self._start_poll(server)
                self._move_overdue()
            except Exception:  # Polls must go on; without them, requests still meet the servers.
                logger.exception("polling the inference servers failed; it is tried again")
            idle += 1
            if self._under_way or not self._is_open():
                idle = 0
            await asyncio.sleep(POLL_SECONDS)

    def _start_poll(self, server: APIServer) -> asyncio.Task[None]:
        """Poll one server, unless a poll is under way."""
        task = self._polls.get(server)
        if task is None or task.done():
            task = self._polls[server] = asyncio.create_task(
                self._poll(server), name=f"poll of {server.root_url}"
            )
        return task

    async def _poll(self, server: APIServer) -> None:
        began, state = time.monotonic(), self.choice.of(server)
        try:
            report = await server.health()
        except Exception as error:  # noqa: BLE001  # An answer that cannot be read is not a healthy one.
            report = HealthReport(wrong=f"{type(error).__name__}: {error}")
        was_away = state.away
        self.choice.polled(
            server, began, time.monotonic(), report, server.sem.in_use + server.eval_sem.in_use
        )
        if server in self.servers:
            self._log_change(server, was_away)

    def _log_change(self, server: APIServer, was_away: str) -> None:
        """Log that a server is away now, or back.

        For a single server without requests, the wait for it is logged instead.
        """
        away, waiting = self.choice.of(server).away, len(self._under_way.get(server, ()))
        if bool(was_away) == bool(away) or (len(self.servers) == 1 and not waiting):
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

    def _move_overdue(self) -> None:
        now = time.monotonic()
        for server in self.choice.overdue(list(self._all()), now, MOVE_AFTER_SECONDS):
            under_way = [moved for moved in self._under_way.get(server, ()) if moved.when() is None]
            if under_way and self.choice.available(self.servers):
                logger.warning("%d requests at %s are asked elsewhere: it is away (%s)", len(under_way), server.root_url,
                               self.choice.of(server).away)  # fmt: skip
                for moved in under_way:
                    moved.reschedule(asyncio.get_running_loop().time())

    async def probe(self) -> str | None:
        """Poll all servers. Return None if one accepts requests, else the reason of each."""
        await asyncio.gather(*(self._start_poll(server) for server in self.servers))
        if self.choice.available(self.servers):
            return None
        return self._reasons()

    def _reasons(self) -> str:
        if len(self.servers) == 1:
            return self.choice.of(self.servers[0]).away
        return ", ".join(
            f"{server.root_url} ({self.choice.of(server).away})" for server in self.servers
        )

    # ---- waiting ----

    @property
    def seconds_away(self) -> float:
        """Seconds for which all servers were away since the start, all outages together."""
        if self._away_since is None:
            return self._away_before
        return self._away_before + time.monotonic() - self._away_since

    def _is_open(self) -> bool:
        return self._recovery is None and self.failure is None

    async def wait_until_well(self, why: str = "") -> None:
        """Return once a server accepts requests. All callers wait together, with one line in the log.

        Args:
            why: the reason for which no server does; empty to poll them first.

        Raises:
            InferenceUnavailable: none did within `outage_timeout` seconds; also for every later
                caller.
        """
        why = why or await self.probe() or ""
        if not why:
            return
        if self.failure is not None:
            raise self.failure
        if self._recovery is None:
            self._recovery = asyncio.create_task(self._recover(why))
        # A caller that is cancelled must not cancel the recovery that others wait for.
        await asyncio.shield(self._recovery)

    async def _recover(self, why: str) -> None:
        wait = Patience(
            self._what(),
            self.outage_timeout,
            InferenceUnavailable,
            logger,
            f"start it, or pass its address as {self.address_flag}",
        )
        self._away_since = time.monotonic()
        try:
            while why:
                await wait.wait(why)
                why = await self.probe() or ""
            wait.done()
        except InferenceUnavailable as failure:
            self.failure = failure
            raise
        finally:
            self._recovery, self._away_before, self._away_since = None, self.seconds_away, None

    async def close(self) -> None:
        """End all polls."""
        tasks = [
            task
            for task in (self._watcher, *self._polls.values())
            if task is not None and not task.done()
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
