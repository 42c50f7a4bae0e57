"""Clients of inference servers, and the pool of servers that answer for each other.

`APIServer` is a client of one server. Each client belongs to a `ServerPool`, which chooses a server
for every request, polls them, and tries again.

`Choice` decides, without I/O and without a clock. It has two sources. A *poll* asks a server: does
it serve, which weights has it, how many requests are in flight there. A *request* meets the server:
it was answered, was refused because the server is away, or failed although the server is there. A
server may look well in a poll and fail every request, so both count:

* a server that is away, by either source, gets nothing until a later poll shows that it is well;
* one that fails gets nothing for a pause that doubles with every failure in a row, and then one
  request, as a trial;
* of the others, the pool asks those with the freshest weights, and among them the one with the
  least to do.

`OpenAIServer` takes text and returns text. `VLLMServer` and `SGLangServer` have a native
`/generate`: token ids in, token ids and logprobs out, and from vLLM the weight versions.
`TrlVllmServer` takes text and returns token ids, without logprobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, Generic, Literal, TypeVar
from urllib.parse import urlparse, urlsplit

import httpx
import numpy as np
import openai
import orjson
from anyio import CapacityLimiter
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionMessage, chat_completion
from pydantic import BaseModel, Field, model_validator

from atroposlib.errors import (
    EnvironmentFailure,
    InferenceUnavailable,
    NoRoom,
    RolloutFailure,
    UsageError,
)
from atroposlib.inference.chat_template import checked_messages, encode_plain
from atroposlib.inference.generation import (
    Generation,
    Weights,
    current_versions,
    sampling_of,
    spans_of,
)
from atroposlib.utils.waiting import Patience
from atroposlib.web.addresses import HttpAddresses, proxy_for
from atroposlib.web.connections import LIMITS, end_slow_answer_async
from atroposlib.web.keys import LOOPBACK, OPENAI_KEY, VLLM_KEY, bearer, given_or_variable, host_of
from atroposlib.wire import StrictNumbers

logger = logging.getLogger(__name__)


class WarnsOfUnknownKeys(BaseModel):
    """Unknown keys from a flag or a YAML file are refused by the command line; from Python code
    they only warn.

    Environments written for other versions of the interface name settings that no longer exist in
    their `config_init`; they are to run unchanged.
    """

    @model_validator(mode="before")
    @classmethod
    def _warn_of_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data.keys() - cls.model_fields.keys():
                logger.warning("%s has no setting named %r: it is ignored", cls.__name__, key)
        return data


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
        return pause_after(self.failures)


def pause_after(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row; each doubles them."""
    return min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(failures - 1, 16)) if failures else 0.0


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
        outages: attempts that met a server which was away.
        away_since: when the first of them did.
    """

    tried: list[APIServer] = field(default_factory=list)
    failures: int = 0
    outages: int = 0
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
        return f"{self.role}s, {len(self.servers)} in all and none available"

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

    async def _request(
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
                    own: dict[str, Any] = {"model": await server.model()}
                    if method == "_generate_wrapper" and split == "train":
                        own |= server.training_fields
                    answer = await getattr(server, method)(**{**own, **fields})
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
            # A proxy or a server that breaks off this request alone is healthy at once.
            if len(set(attempts.tried)) >= len(self.servers):
                await asyncio.sleep(pause_after(attempts.outages))
            attempts.outages += 1
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


__all__ = [
    "VALID_REASONING_EFFORTS",
    "APIServer",
    "APIServerConfig",
    "AsyncSemWithAdaptiveWeight",
    "ReasoningConfig",
    "ServerBaseline",
]


VALID_REASONING_EFFORTS = {"none", "minimal", "low", "medium", "high", "xhigh"}

OPENAI_EFFORT = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
}
"""OpenAI's own endpoint knows three levels."""
MODEL_NOT_NAMED = ("", "default", "none")


@dataclass
class ReasoningConfig:
    """Amount of reasoning before an answer.

    Attributes:
        enabled: ask for reasoning; set by itself when one of the others is.
        effort: one of `VALID_REASONING_EFFORTS`.
        max_tokens: most tokens of reasoning, 1024 to 32000.

    Raises:
        ValueError: a value out of range.
    """

    EFFORT_TO_MAX_TOKENS: ClassVar[dict[str, int]] = {
        "none": 1024,
        "minimal": 3200,
        "low": 6400,
        "medium": 16000,
        "high": 25600,
        "xhigh": 30400,
    }

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in VALID_REASONING_EFFORTS:
            raise ValueError(
                f"reasoning effort {self.effort!r}: choose one of {', '.join(sorted(VALID_REASONING_EFFORTS))}"
            )
        if self.max_tokens is not None and not 1024 <= self.max_tokens <= 32000:
            raise ValueError(f"{self.max_tokens} reasoning tokens: give 1024 to 32000")
        if self.effort is not None or self.max_tokens is not None:
            self.enabled = True

    def is_reasoning_kwargs_active(self) -> bool:
        return self.enabled

    def build_extra_body(
        self, base_url: str | None = None, use_max_tokens: bool = False
    ) -> dict[str, Any] | None:
        """The request's extra body for the endpoint at `base_url`, or None when no reasoning is
        asked for.

        `use_max_tokens` is for endpoints that take a number of tokens only: an effort becomes one.
        """
        if not self.enabled:
            return None
        if base_url and (urlparse(base_url).hostname or "").endswith("api.openai.com"):
            return {"reasoning_effort": OPENAI_EFFORT[self.effort or "medium"]}
        reasoning: dict[str, Any] = {"enabled": True}
        if self.max_tokens is not None and (use_max_tokens or self.effort is None):
            reasoning["max_tokens"] = self.max_tokens
        elif self.effort is not None and use_max_tokens:
            reasoning["max_tokens"] = self.EFFORT_TO_MAX_TOKENS[self.effort]
        elif self.effort is not None:
            reasoning["effort"] = self.effort
        return {"reasoning": reasoning}

    @classmethod
    def from_env_config(cls, env_config: Any) -> ReasoningConfig:
        return cls(
            env_config.thinking_mode, env_config.reasoning_effort, env_config.max_reasoning_tokens
        )


class AsyncSemWithAdaptiveWeight:
    """Slots: at weight `w`, at most `max(1, floor(max_val * w))` holders at once.

    Holders keep their slots when the weight falls. Waiters are served first come, first served.
    """

    def __init__(self, value: int):
        self.max_val = value
        self.weight = 1.0
        self._limiter = CapacityLimiter(self.limit)
        # The limiter counts borrowers. A fresh object borrows each slot, so that one task can hold
        # several.
        self._slots: list[object] = []

    @property
    def limit(self) -> int:
        return max(1, math.floor(self.max_val * self.weight))

    @property
    def in_use(self) -> int:
        return self._limiter.borrowed_tokens

    @property
    def free(self) -> int:
        """Slots that could be taken now."""
        return max(0, self.limit - self.in_use)

    def min_val(self) -> float:
        """Return the slots that the weight leaves unused."""
        return self.max_val * (1.0 - self.weight)

    def update_weight(self, weight: float) -> None:
        self.weight = min(1.0, max(0.0, weight))
        self._limiter.total_tokens = self.limit

    def locked(self) -> bool:
        return self.in_use >= self.limit or self._limiter.statistics().tasks_waiting > 0

    async def acquire(self) -> bool:
        slot = object()
        await self._limiter.acquire_on_behalf_of(slot)
        self._slots.append(slot)
        return True

    def release(self) -> None:
        self._limiter.release_on_behalf_of(self._slots.pop())

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class ServerBaseline(WarnsOfUnknownKeys, StrictNumbers):
    """Settings of a server, without its address."""

    timeout: int = Field(default=1200, description="Longest time for one request, in seconds")
    num_max_requests_at_once: int = Field(
        default=512, ge=1, description="Most concurrent requests for training"
    )
    num_requests_for_eval: int = Field(
        default=64, ge=1, description="Most concurrent requests for evaluation"
    )
    model_name: str = Field(
        default="default", description="Model to ask for; by default the server's own"
    )
    rolling_buffer_length: int = Field(
        default=1000, ge=1, description="Requests over which timings are averaged"
    )
    server_type: Literal["openai", "trl", "sglang", "vllm"] = Field(
        default="openai",
        description="vllm: token in, token out through /generate; openai: any OpenAI-compatible endpoint",
    )
    tokenizer_name: str = Field(
        default="none", description="Tokenizer to use; by default the environment's"
    )


class APIServerConfig(ServerBaseline):
    """Settings of a server at one address."""

    api_key: str | None = Field(
        default="",
        exclude=True,
        repr=False,
        description="Bearer token; by default $VLLM_API_KEY for a vLLM server and $OPENAI_API_KEY for OpenAI's own endpoint",
    )
    base_url: HttpAddresses | None = Field(
        default="",
        description="Address, with or without /v1; of an openai server, an address with any other path is taken as it is",
    )
    n_kwarg_is_ignored: bool = Field(
        default=False, description="The server ignores n: ask n times instead"
    )
    health_check: bool = Field(
        default=True, description="Wait for the server to be well after it could not be reached"
    )


class APIServer(InferenceCalls):
    """A client of one inference server.

    `chat_completion`, `completion`, `tokens_and_logprobs_completion` and `generate` take the
    request's fields as keyword arguments, and `split="eval"` to run within the evaluation's share
    of the concurrency. If the server is away, another one of its pool answers. If all are away, the
    request waits. After other failures it is sent up to three times.
    """

    role = "inference server"
    address_flag = "--openai.base_url"
    highest_temperature: float | None = None
    """The limit of the server, if it has one. Requests above it are refused here."""
    polled_always = False
    """The pool polls it all the time if it has other servers; otherwise only while it is away."""
    training_fields: Mapping[str, Any] = MappingProxyType({})
    """Fields that `generate` adds to a request whose answer may be trained on."""
    pool: ServerPool
    """Servers that answer for each other; one of its own until a manager has several."""

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None):
        self.config = config
        self.reasoning_config = reasoning_config
        self.sem = AsyncSemWithAdaptiveWeight(config.num_max_requests_at_once)
        self.eval_sem = AsyncSemWithAdaptiveWeight(config.num_requests_for_eval)
        self.pool = ServerPool([self], self.role, self.address_flag)
        self.max_sequence_length: int | None = None
        """Most tokens of prompt and completion together that a trainer takes; set by the
        environment."""
        length = config.rolling_buffer_length
        self.timings: dict[Split, deque[tuple[float, int]]] = {
            "train": deque(maxlen=length),
            "eval": deque(maxlen=length),
        }
        """(seconds, attempts) of each answered request."""

    @property
    def root_url(self) -> str:
        """The address without /v1."""
        return (self.config.base_url or "").rstrip("/").removesuffix("/v1")

    @property
    def openai_url(self) -> str:
        """The address below which OpenAI's routes are, such as /models."""
        return f"{self.root_url}/v1"

    @property
    def key_variable(self) -> str | None:
        """The environment variable that holds the key when the configuration gives none."""
        return None

    @property
    def api_key(self) -> str | None:
        """Bearer token, or None."""
        return given_or_variable(self.config.api_key, self.key_variable)

    @property
    def honours_proxies(self) -> bool:
        """Return whether HTTP_PROXY and similar variables apply.

        A proxy does not reach the user's own servers.
        """
        return False

    def slots(self, split: Split) -> AsyncSemWithAdaptiveWeight:
        """Return the share of the concurrency that a request takes a slot of."""
        return self.eval_sem if split == "eval" else self.sem

    @property
    def server_healthy(self) -> bool:
        return self.pool.healthy(self)

    async def probe(self) -> str | None:
        """None when the server is well, else what is wrong."""
        return None

    def like(self, other: APIServer) -> None:
        """Take over what an environment has set on another server."""
        self.max_sequence_length = other.max_sequence_length
        self.sem.update_weight(other.sem.weight)
        self.eval_sem.update_weight(other.eval_sem.weight)
        if hasattr(self, "tokenizer"):
            self.tokenizer = getattr(other, "tokenizer", None)

    async def health(self) -> HealthReport:
        """Return the server's health."""
        return HealthReport(wrong=(await self.probe() if self.config.health_check else None) or "")

    async def model(self) -> str:
        """The name of the model to ask for."""
        return self.config.model_name

    async def close(self) -> None:
        """Close the connections, if there are any."""

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Wait until the server is well."""
        await self.pool.wait_until_well("being checked")

    async def update_weight(self, weight: float) -> None:
        """Use this share of the concurrency: several environments divide one server between them."""
        self.sem.update_weight(weight)
        self.eval_sem.update_weight(weight)

    @abstractmethod
    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion: ...

    @abstractmethod
    async def _completion_wrapper(self, **kwargs: Any) -> Completion: ...

    async def _tokens_and_logprobs_completion_wrapper(
        self, **kwargs: Any
    ) -> tuple[list, list, list, list]:
        """(prompt tokens, [completion][position] tokens, the same of logprobs, finish reasons)."""
        raise NotImplementedError(
            f"{type(self).__name__} at {self.root_url} gives no token ids with logprobs to train on: "
            "use a vLLM server with /generate and --openai.server_type vllm"
        )

    async def _generate_wrapper(self, **kwargs: Any) -> Generation:
        answer = await self._tokens_and_logprobs_completion_wrapper(**kwargs)
        return Generation(*answer, sampling=sampling_of(kwargs, len(answer[1])))

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} cannot give the logprobs of a prompt")

    async def _request(self, method: str, fields: dict[str, Any]) -> Any:
        return await self.pool._request(method, fields, preferred=self)

    async def wandb_metrics(
        self, metrics_dict: dict[str, Any] | None, server_name: str | None
    ) -> dict[str, Any]:
        """Request times in seconds and mean attempts, added to those in `metrics_dict` under
        `server/<server_name>_…`.
        """
        metrics = metrics_dict or {}
        for prefix, timings in (("", self.timings["train"]), ("eval_", self.timings["eval"])):
            if timings:
                seconds, attempts = zip(*timings, strict=True)
                name = f"server/{server_name}_{prefix}"
                metrics[f"{name}request_time_avg"] = float(np.mean(seconds))
                metrics[f"{name}request_time_std"] = float(np.std(seconds))
                metrics[f"{name}request_time_99p"] = float(np.percentile(seconds, 99))
                metrics[f"{name}average_num_attempts"] = float(np.mean(attempts))
        return metrics


Answer = TypeVar("Answer", ChatCompletion, Completion)
PROBE_TIMEOUT = 10.0
MAX_TEMPERATURE = 2.0
"""The limit of OpenAI's interface, and of vLLM in all of its routes."""
OPENAI_ADDRESS = "https://api.openai.com/v1"
"""Used by the client if a configuration names no address."""


class OpenAIRoutes(APIServer):
    """The part that all servers with OpenAI's routes share."""

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None):
        super().__init__(config, reasoning_config)
        self._client: AsyncOpenAI | None = None
        self._http: httpx.AsyncClient | None = None
        self._served: dict[str, Any] | None = None

    @property
    def openai(self) -> AsyncOpenAI:
        """Made on first use, in the event loop that uses it."""
        if self._client is None:
            self._client = AsyncOpenAI(
                api_key=self.api_key or "x",
                base_url=self.openai_url if self.config.base_url else None,
                timeout=self.config.timeout,
                max_retries=0,
                http_client=DefaultAsyncHttpxClient(**self._proxy_options()),
            )
        return self._client

    @property
    def http(self) -> httpx.AsyncClient:
        if self._http is None:
            self._http = httpx.AsyncClient(
                base_url=self.root_url,
                headers=bearer(self.api_key),
                **self._proxy_options(),
                timeout=httpx.Timeout(self.config.timeout, connect=5.0),
                limits=LIMITS,
                event_hooks={"response": [end_slow_answer_async]},
            )
        return self._http

    def _proxy_options(self) -> dict[str, Any]:
        """Return the part of a client's arguments that decides about proxies.

        The proxy is chosen here, because httpx makes no client at all if it cannot read NO_PROXY.
        """
        if not self.honours_proxies:
            return {"trust_env": False}
        if proxy := proxy_for(self.root_url or OPENAI_ADDRESS):
            return {"trust_env": True, "proxy": proxy}
        return {
            "trust_env": True,
            "transport": httpx.AsyncHTTPTransport(trust_env=True, limits=LIMITS),
        }

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._http is not None:
            await self._http.aclose()

    async def probe(self) -> str | None:
        if not self.config.base_url:
            return None
        return await self._fault_of(f"{self.openai_url}/models")

    async def _fault_of(self, path: str, good: range = range(500)) -> str | None:
        """GET a path, and return what is wrong with the server.

        Args:
            path: of the route.
            good: statuses of a server that is well. By default it may lack the route, or require
                another key: it is there all the same.
        """
        try:
            response = await self.http.get(path, timeout=PROBE_TIMEOUT)
        except httpx.HTTPError as error:
            return f"no answer ({type(error).__name__})"
        if response.status_code in good:
            return None
        return f"{response.url.path} answered {response.status_code}"

    async def served_model(self) -> dict[str, Any]:
        """The first entry of /v1/models: `id`, and with vLLM `max_model_len`."""
        if self._served is None:
            response = await self.http.get(f"{self.openai_url}/models", timeout=PROBE_TIMEOUT)
            response.raise_for_status()
            models = response.json().get("data") or []
            if not models:
                raise ServerIsAway(f"{self.openai_url}/models lists no model")
            self._served = models[0]
        return self._served

    async def model(self) -> str:
        if self.config.model_name in MODEL_NOT_NAMED and self.config.base_url:
            return (await self.served_model())["id"]
        return self.config.model_name

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        reasoning = self.reasoning_config or ReasoningConfig()
        if extra := reasoning.build_extra_body(self.config.base_url):
            kwargs["extra_body"] = extra | (kwargs.get("extra_body") or {})
        return await self._ask(self.openai.chat.completions.create, kwargs)

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        return await self._ask(self.openai.completions.create, kwargs)

    async def _ask(
        self, create: Callable[..., Awaitable[Answer]], kwargs: dict[str, Any]
    ) -> Answer:
        """One request, or `n` of them when the server ignores `n`."""
        n = kwargs.get("n") or 1
        if n > 1 and self.config.n_kwarg_is_ignored:
            return await self._ask_separately(create, kwargs, n)
        answer = await self._ask_once(create, kwargs)
        if len(answer.choices) == n:
            return answer
        if len(answer.choices) != 1:
            raise ValueError(
                f"{self.root_url} answered {len(answer.choices)} choices where {n} were asked for"
            )
        logger.warning("%s ignores n: asking %d times instead from now on", self.root_url, n)
        self.config.n_kwarg_is_ignored = True
        rest = await self._ask_separately(create, kwargs, n - 1)
        answer.choices.extend(rest.choices)
        return answer

    async def _ask_once(
        self, create: Callable[..., Awaitable[Answer]], kwargs: dict[str, Any]
    ) -> Answer:
        answer = await create(**kwargs)
        if not isinstance(
            getattr(answer, "choices", None), list
        ):  # the client checks nothing; a page of HTML is a text
            raise ValueError(f"{self.openai_url} answered no completion, but {str(answer)!r:.200}")
        return answer

    async def _ask_separately(
        self, create: Callable[..., Awaitable[Answer]], kwargs: dict[str, Any], n: int
    ) -> Answer:
        single = {key: value for key, value in kwargs.items() if key != "n"}
        answers = await asyncio.gather(*(self._ask_once(create, single) for _ in range(n)))
        for answer in answers[1:]:
            answers[0].choices.extend(answer.choices)
        return answers[0]


class OpenAIServer(OpenAIRoutes):
    """An OpenAI-compatible endpoint, for evaluation and for data that is not trained token by
    token.

    It may be anywhere: proxies apply unless it is on this machine, and a key goes only to where it
    belongs.
    """

    highest_temperature = MAX_TEMPERATURE

    @property
    def openai_url(self) -> str:
        """Other providers have these routes below other paths: only an address without any lacks
        /v1.
        """
        path = urlsplit(self.config.base_url or "").path.rstrip("/")
        return self.root_url if path and not path.endswith("/v1") else super().openai_url

    @property
    def key_variable(self) -> str | None:
        host = host_of(self.config.base_url)
        if not host or host == "api.openai.com" or host.endswith(".api.openai.com"):
            return OPENAI_KEY
        return VLLM_KEY if host in LOOPBACK else None

    @property
    def honours_proxies(self) -> bool:
        return host_of(self.config.base_url) not in LOOPBACK


# Names of max_tokens in other interfaces.
MAX_TOKENS_NAMES = ("max_tokens", "max_new_tokens", "max_completion_tokens")

POLL_TIMEOUT = 5.0
"""Longest time in seconds for an answer to GET /weights."""
MIN_TEMPERATURE = 0.01
"""vLLM raises a temperature between 0 and this one to it, which only its log shows."""


class VLLMServer(OpenAIRoutes):
    """Requests for training go to `/generate`, so that no text is ever tokenised twice; the OpenAI
    routes work too.
    """

    key_variable: str | None = VLLM_KEY
    highest_temperature: float | None = MAX_TEMPERATURE
    tokenizer: Any = None
    """Encodes prompts given as text; set by the environment. Prompts given as token ids need
    none."""
    _options: list[str] | None = None
    polled_always = True
    training_fields = MappingProxyType({"routed_experts": True})
    """A server that keeps no experts is not asked for them. It is started so for a trainer that
    replays them."""
    reports_weights = True
    """The client polls GET /weights. Cleared once the server has answered that it lacks the route."""

    async def health(self) -> HealthReport:
        """Poll GET /weights, or GET /health on servers without that route."""
        report = await self._report()
        if report.wrong:
            self._options = None  # it may come back with other ones
        return report

    async def _report(self) -> HealthReport:
        if not (self.reports_weights and self.config.health_check):
            return await super().health()
        try:
            response = await self.http.get("/weights", timeout=POLL_TIMEOUT)
        except httpx.TimeoutException:
            return HealthReport(wrong=f"silent for {POLL_TIMEOUT:g} s")
        except httpx.HTTPError as error:
            return HealthReport(wrong=f"no answer ({type(error).__name__})")
        if response.status_code == 200:
            return read_health(orjson.loads(response.content))
        if response.status_code >= 500:
            return HealthReport(wrong=f"/weights answered {response.status_code}")
        self.reports_weights = False
        return await super().health()

    async def probe(self) -> str | None:
        return await self._fault_of("/health", good=range(200, 201))

    async def _generate_wrapper(self, **kwargs: Any) -> Generation:
        prompt_tokens = self._prompt_tokens(kwargs)
        kwargs.pop("model", None)
        for name in MAX_TOKENS_NAMES[1:]:
            if name in kwargs:
                kwargs["max_tokens"] = kwargs.pop(name)
        kwargs["max_tokens"] = await self._room_for(prompt_tokens, kwargs.get("max_tokens"))
        if 0 < (kwargs.get("temperature") or 0) < MIN_TEMPERATURE:
            kwargs["temperature"] = MIN_TEMPERATURE
        if "routed_experts" not in await self._generate_options():
            kwargs.pop("routed_experts", None)
        body = {
            **await self._shortest_answer(kwargs),
            **kwargs,
            "prompt": {"prompt_token_ids": prompt_tokens},
        }
        answer = await self._post(body)
        generation = parse_generation(prompt_tokens, answer)
        generation.sampling = sampling_of(kwargs, len(generation.output_tokens), temperature=1.0)
        return generation

    async def _shortest_answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return fields of a request for ids and logprobs only, as far as the server has them."""
        options = {"return_text": False}
        if not request.get("logprobs"):
            options["token_logprobs"] = True
        return {
            name: value for name, value in options.items() if name in await self._generate_options()
        } or {"logprobs": 0}

    async def _generate_options(self) -> list[str]:
        """Return the options of /generate that GET /sampling lists; none on servers without that
        route. Asked once, and again after the server was away.
        """
        if self._options is None:
            response = await self.http.get("/sampling", timeout=PROBE_TIMEOUT)
            if response.status_code >= 500:
                response.raise_for_status()
            self._options = []
            if response.status_code == 200 and isinstance(options := response.json(), dict):
                self._options = options.get("generate_options", [])
        return self._options

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        response = await self.http.post(
            "/generate", content=orjson.dumps(body), headers={"Content-Type": "application/json"}
        )
        response.raise_for_status()
        return orjson.loads(response.content)

    def _prompt_tokens(self, kwargs: dict[str, Any]) -> list[int]:
        """Take the prompt out of the request: `input_ids`, else `prompt` encoded, without a second
        start token.
        """
        text = kwargs.pop("prompt", None)
        ids = kwargs.pop("input_ids", None)
        if ids is not None:
            return [int(token) for token in ids]
        if text is None:
            raise ValueError("a request for tokens needs `input_ids` or `prompt`")
        if isinstance(text, list):
            return [int(token) for token in text]
        if self.tokenizer is None:
            raise ValueError(
                "a prompt given as text needs a tokenizer: set `server.tokenizer`, or pass `input_ids`"
            )
        return encode_plain(self.tokenizer, text)

    async def _room_for(self, prompt_tokens: list[int], max_tokens: int | None) -> int:
        """Return the `max_tokens` that the model's context and the trainer's longest sequence leave after the
        prompt.
        """
        limits = [
            limit for limit in (await self._context_length(), self.max_sequence_length) if limit
        ]
        if not limits:
            return max_tokens or 1024
        room = min(limits) - len(prompt_tokens)
        if room < 1:
            owner = "of the model's context"
            if min(limits) == self.max_sequence_length:
                owner = "below the trainer's --seq-len"
            raise NoRoom(
                f"a prompt of {len(prompt_tokens)} tokens leaves no room within {min(limits)} tokens, "
                f"the most {owner}"
            )
        return min(max_tokens or room, room)

    async def _context_length(self) -> int | None:
        return (await self.served_model()).get("max_model_len")

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        top_k = max(1, int(kwargs.pop("top_k", kwargs.pop("top_logprobs", 1))))
        prompt_tokens = self._prompt_tokens(kwargs)
        body = {
            "prompt": {"prompt_token_ids": prompt_tokens},
            "prompt_logprobs": top_k,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        rows = (await self._post(body)).get("prompt_logprobs")
        if rows is None:
            raise ValueError(f"{self.root_url}/generate gave no prompt_logprobs")
        tables = [merge_logprob_row(row) for row in rows]
        return {
            "prompt_tokens": prompt_tokens,
            "prompt_topk_token_ids": [list(table) for table in tables],
            "prompt_topk_logprobs": [list(table.values()) for table in tables],
        }


class SGLangServer(VLLMServer):
    """An SGLang server. It does not report weight versions."""

    key_variable = None
    highest_temperature = None
    training_fields = MappingProxyType({})
    reports_weights = False

    async def _generate_wrapper(self, **kwargs: Any) -> Generation:
        prompt_tokens = self._prompt_tokens(kwargs)
        kwargs.pop("model", None)
        max_tokens = next((kwargs.pop(name) for name in MAX_TOKENS_NAMES if name in kwargs), None)
        room = await self._room_for(prompt_tokens, max_tokens)
        sampling = kwargs | {"max_new_tokens": room}
        answer = await self._post(
            {"input_ids": prompt_tokens, "sampling_params": sampling, "return_logprob": True}
        )
        completions: list[dict[str, Any]] = answer if isinstance(answer, list) else [answer]
        # Each entry of output_token_logprobs is (logprob, token id, text or None).
        rows = [completion["meta_info"]["output_token_logprobs"] for completion in completions]
        return Generation(
            prompt_tokens=prompt_tokens,
            output_tokens=[[int(token) for _, token, *_ in row] for row in rows],
            output_logprobs=[[float(logprob) for logprob, *_ in row] for row in rows],
            finish_reasons=[
                completion["meta_info"]["finish_reason"]["type"] for completion in completions
            ],
            texts=[completion.get("text", "") for completion in completions],
            # A server may have sampling parameters of its own for requests that name none.
            sampling=sampling_of({**kwargs, "max_tokens": room}, len(rows)),
        )

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("SGLangServer cannot give the logprobs of a prompt")


def read_health(answer: Any) -> HealthReport:
    """Read the answer of GET /weights. Missing fields and fields that are not numbers become None.

    Raises:
        ValueError: the answer is not an object.
    """
    if not isinstance(answer, dict):
        raise ValueError(f"/weights answered {answer!r:.80}")
    version, epoch, in_flight = (
        value
        if isinstance(value := answer.get(name), int) and not isinstance(value, bool)
        else None
        for name in ("weight_version", "weight_epoch", "in_flight")
    )
    wrong = ""
    if not answer.get("serving", True):
        wrong = str(answer.get("trouble") or "it does not serve")[:300]
    return HealthReport(
        wrong=wrong,
        weights=None if version is None else Weights(epoch or 0, version),
        in_flight=in_flight,
    )


def merge_logprob_row(row: Any) -> dict[int, float]:
    """One position's logprobs, `{id: logprob}` or `[{id: logprob}, …]`, as one table; empty for the
    first position.
    """
    table: dict[int, float] = {}
    for part in row if isinstance(row, list) else [row or {}]:
        table.update({int(token): float(logprob) for token, logprob in (part or {}).items()})
    return table


def parse_generation(prompt_tokens: list[int], answer: dict[str, Any]) -> Generation:
    """Read `/generate`'s answer.

    `token_logprobs[completion][position]` is the logprob of the token at that place in `token_ids`.
    Where there is none, `logprobs[completion][position]` is a table whose first entry is
    `{token_id: logprob}` of the sampled token, or a list that begins with one. Servers without
    `token_ids` are read through these alone.

    Raises:
        ValueError: ids and logprobs do not line up, so they are not the tokens that were sampled.
    """
    tokens, logprobs = answer.get("token_ids"), answer.get("token_logprobs")
    if tokens is None or logprobs is None:
        sampled, logprobs = read_tables(answer["logprobs"])
        if tokens is not None and tokens != sampled:
            raise ValueError(
                "/generate answered token_ids that differ from the ids of its logprobs"
            )
        tokens = sampled
    elif list(map(len, tokens)) != list(map(len, logprobs)):
        raise ValueError("/generate answered token_ids and token_logprobs of different lengths")
    if (prompt := answer.get("prompt_token_ids")) is not None and prompt != prompt_tokens:
        raise ValueError("/generate answered a prompt_token_ids other than it was sent")
    return Generation(
        prompt_tokens=prompt_tokens,
        output_tokens=tokens,
        output_logprobs=logprobs,
        finish_reasons=list(answer["finish_reasons"]),
        texts=answer.get("text"),
        weight_versions=answer.get("weight_versions"),
        weight_epochs=answer.get("weight_epochs"),
        weight_spans=spans_of(answer.get("weight_version_spans"), answer.get("weight_epoch_spans")),
        routed_experts=answer.get("routed_experts"),
    )


def read_tables(rows: list[list[Any]]) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and logprobs of the sampled tokens, which come first in the table of each position."""
    tokens: list[list[int]] = []
    logprobs: list[list[float]] = []
    for completion in rows:
        pairs = [
            next(iter((position[0] if isinstance(position, list) else position).items()))
            for position in completion
        ]
        tokens.append([int(token) for token, _ in pairs])
        logprobs.append([float(logprob) for _, logprob in pairs])
    return tokens, logprobs


class TrlVllmServer(OpenAIRoutes):
    """Prompts are rendered here, with `tokenizer`, because the server knows no chat."""

    tokenizer: Any = None
    """Renders messages and decodes completions; set by the environment."""

    async def probe(self) -> str | None:
        return await self._fault_of("/health/", good=range(200, 201))

    async def model(self) -> str:
        return self.config.model_name

    async def _texts(self, prompt: str, kwargs: dict[str, Any]) -> list[str]:
        if self.tokenizer is None:
            raise ValueError(
                "a TRL server answers token ids: set `server.tokenizer` to decode them"
            )
        body = {
            "prompts": [prompt],
            "n": kwargs.get("n", 1),
            "temperature": kwargs.get("temperature", 1.0),
            "top_p": kwargs.get("top_p", 1.0),
            "max_tokens": kwargs.get("max_tokens") or kwargs.get("max_completion_tokens") or 1024,
        }
        response = await self.http.post("/generate/", json=body)
        response.raise_for_status()
        return [
            self.tokenizer.decode(ids, skip_special_tokens=True)
            for ids in response.json()["completion_ids"]
        ]

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        messages = checked_messages(kwargs["messages"])
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        choices = [
            chat_completion.Choice(
                index=i,
                finish_reason="stop",
                message=ChatCompletionMessage(role="assistant", content=text),
            )
            for i, text in enumerate(await self._texts(prompt, kwargs))
        ]
        return ChatCompletion(
            id=str(uuid.uuid4()),
            choices=choices,
            created=int(time.time()),
            model=kwargs["model"],
            object="chat.completion",
        )

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        choices = [
            CompletionChoice(index=i, finish_reason="stop", text=text)
            for i, text in enumerate(await self._texts(kwargs["prompt"], kwargs))
        ]
        return Completion(
            id=str(uuid.uuid4()),
            choices=choices,
            created=int(time.time()),
            model=kwargs["model"],
            object="text_completion",
        )
