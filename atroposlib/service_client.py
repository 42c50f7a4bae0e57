"""Clients of the rollout service: for the event loop of an environment, and for the threads of a
trainer.

A transient outage never loses a group and never ends the process. Every call is tried again, with
growing pauses and a line in the log, until `timeout` seconds have passed. A post carries an
idempotency key, so that a retry is not counted twice.
"""

import asyncio
import contextlib
import gzip
import logging
import math
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import orjson

from atroposlib.errors import EnvironmentFailure, ServiceUnavailable
from atroposlib.utils import waiting
from atroposlib.utils.waiting import LOG_EVERY, Logged, Patience
from atroposlib.web.connections import direct_async_client, direct_client
from atroposlib.web.keys import LOOPBACK, SERVICE_KEY, host_of
from atroposlib.wire import encode

logger = logging.getLogger(__name__)

COMPRESS_ABOVE_BYTES = 4096
CONNECT_SECONDS, REQUEST_SECONDS = 5.0, 60.0
"""Deadlines of one request: to connect; then to send it, and for the answer, each."""
MIN_REQUEST_SECONDS = 1.0
LONGEST_ATTEMPT = CONNECT_SECONDS + 2 * REQUEST_SECONDS
LONGEST_RETRY_AFTER = 30.0
WATCH_SECONDS = 1.0
"""Time between two looks at the calls that wait, for the log."""
FULL_DISK = 507
FULL_DISK_SECONDS = 24 * 3600.0
"""Longest wait for space on the service's disk, which a person has to free, or a trainer that takes
batches."""
PROCESS_NAME = "LOCKSTEP_PROCESS"
"""Variable with a supervisor's name for this process."""


class RejectedByService(Exception):
    """The service understood the request and will never accept it (4xx other than 429).

    Attributes:
        status: of HTTP.
        detail: the service's reason.
    """

    def __init__(self, status: int, detail: str, call: str = ""):
        super().__init__(f"{call}{status}: {detail}")
        self.status, self.detail = status, detail


class TryAgain(Exception):
    """The service cannot answer now.

    Attributes:
        at_least: seconds that it asks to wait.
    """

    def __init__(self, why: str, at_least: float = 0.0):
        super().__init__(why)
        self.at_least = at_least


class ServiceClient:
    """The part that both clients share: what an answer means, and how long to wait for one.

    Args:
        url: the service's address, for example `http://localhost:8000`.
        timeout: longest wait for the service, in seconds.
    """

    caller = "environment"
    key_remedy = (
        f"set {SERVICE_KEY} to its key "
        "(or --env.rollout_server_api_key, which other users of the machine can see)"
    )
    start_remedy = (
        "start it with `python -m atroposlib.cli.run_api` "
        "or pass its address as --env.rollout_server_url"
    )
    unavailable: type[Exception] = ServiceUnavailable
    failure: type[Exception] = EnvironmentFailure
    rejected = RejectedByService

    def __init__(self, url: str, timeout: float):
        self.url, self.timeout = url.rstrip("/"), timeout
        self._logged = Logged()
        # On one machine compressing costs more than it saves.
        self._compress = host_of(self.url) not in LOOPBACK

    def _patience(self, call: str, timeout: float = math.inf) -> Patience:
        patience = Patience(
            f"the rollout service at {self.url}",
            min(timeout, self.timeout),
            self.unavailable,
            logger,
            self.start_remedy,
            self._logged,
            LONGEST_ATTEMPT,
        )
        patience.why = f"{call}: no answer so far"
        return patience

    def _content_of(self, call: str, response: httpx.Response) -> bytes:
        """Return the content of an answer with success.

        Raises:
            TryAgain: the service cannot answer now.
            EnvironmentFailure: `failure`, it refuses the key.
            RejectedByService: `rejected`, it refuses the request.
        """
        status = response.status_code
        if status == 429:
            raise TryAgain(f"{call}: answered 429, it is full", retry_after(response))
        if status >= 500:
            text = response.text[:200]
            raise TryAgain(f"{call}: answered {status} {text}", retry_after(response, default=0.0))
        if status in (401, 403):
            raise self.failure(
                f"the rollout service at {self.url} refuses this {self.caller} ({status}); "
                f"{self.key_remedy}"
            )
        if status >= 400:
            raise self.rejected(status, _detail(response), self._named(call))
        return response.content

    def _named(self, call: str) -> str:
        return ""

    def _encode(self, body: Any) -> tuple[bytes | None, dict[str, str]]:
        if body is None:
            return None, {}
        content = encode(body)
        headers = {"Content-Type": "application/json"}
        if self._compress and len(content) > COMPRESS_ABOVE_BYTES:
            return gzip.compress(content, compresslevel=1), headers | {"Content-Encoding": "gzip"}
        return content, headers


class RolloutServiceClient(ServiceClient):
    """HTTP calls of one environment to one rollout service.

    Args:
        url: the service's address.
        timeout: longest wait for the service, in seconds, before `ServiceUnavailable` is raised.
        api_key: bearer token, if the service requires one.
    """

    def __init__(self, url: str, timeout: float, api_key: str | None = None):
        super().__init__(url, timeout)
        seconds = httpx.Timeout(REQUEST_SECONDS, connect=CONNECT_SECONDS)
        self._http = direct_async_client(self.url, seconds, api_key)
        self._full_since: float | None = None
        """When the service refused a call for want of disk space, if it has taken no post since."""

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> dict[str, Any]:
        return await self._call("GET", path, None)

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        return await self._call("POST", path, body)

    async def status_env(
        self, env_id: int, moves: int | None = None, wait: float = 0.0, *, trouble: str = ""
    ) -> dict[str, Any]:
        """`/status-env` takes its arguments as the JSON body of a GET.

        Args:
            moves: of the last answer, to get this one when the trainer has done something since.
            wait: seconds after which it comes nevertheless.
            trouble: why this environment posts no groups; empty if it does.
        """
        body: dict[str, Any] = {"env_id": env_id, "process": this_process()}
        if trouble:
            body["trouble"] = trouble
        if moves is not None:
            body |= {"moves": moves, "wait": wait}
        return await self._call("GET", "/status-env", body)

    async def disconnect(self, env_id: int) -> None:
        """Deregister this environment; one attempt, because a service that is gone too does not
        need it.
        """
        try:
            response = await self._http.post(
                "/disconnect-env", json={"env_id": env_id}, timeout=5.0
            )
            failure = f"{response.status_code} {_detail(response)}" * response.is_error
        except httpx.HTTPError as error:
            failure = f"no answer ({type(error).__name__})"
        if not failure:
            logger.info("disconnected environment %s from the rollout service", env_id)
            return
        logger.info(
            "environment %s could not be deregistered at the rollout service at %s: %s",
            env_id,
            self.url,
            failure,
        )

    async def _call(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """One request, repeated until it is answered.

        Raises:
            ServiceUnavailable: no usable answer within the timeout.
            RejectedByService: an answer that a retry cannot change.
        """
        call = f"{method} {path}"
        content, headers = self._encode(body)
        patience, full_since = self._patience(call), None
        while True:
            try:
                async with reminded(patience):
                    response = await self._http.request(
                        method, path, content=content, headers=headers
                    )
                if response.status_code == FULL_DISK:
                    full_since = full_since or time.monotonic()
                    await self._wait_for_space(path, response, full_since)
                    # The service answers, so that a later failure gets the full time again.
                    patience = self._patience(call)
                    continue
                answer = orjson.loads(self._content_of(call, response))
            except httpx.HTTPError as error:
                await patience.wait(f"{call}: no answer ({type(error).__name__})")
            except orjson.JSONDecodeError:
                await patience.wait(f"{call}: answered no JSON: {response.text[:80]!r}")
            except TryAgain as error:
                await patience.wait(str(error), error.at_least)
            else:
                patience.done()
                if method == "POST" and self._full_since is not None:
                    waited, self._full_since = time.monotonic() - self._full_since, None
                    logger.info(
                        "the rollout service at %s stores data again after %.0f s", self.url, waited
                    )
                return answer if isinstance(answer, dict) else {"value": answer}

    async def _wait_for_space(self, path: str, refusal: httpx.Response, since: float) -> None:
        """Pause once while the service's disk is full. All calls that wait log one line together.

        Raises:
            ServiceUnavailable: this call has waited for `FULL_DISK_SECONDS`.
        """
        reason = _detail(refusal)
        if time.monotonic() - since > FULL_DISK_SECONDS:
            raise ServiceUnavailable(
                f"rollout service at {self.url}: stored nothing of {path} within {FULL_DISK_SECONDS:.0f} s: {reason}"
            )
        if self._full_since is None:
            self._full_since = time.monotonic()
            logger.warning(
                "the rollout service at %s cannot store data: %s. Posts wait up to %.0f s and go on by themselves",
                self.url, reason, FULL_DISK_SECONDS,
            )  # fmt: skip
        await asyncio.sleep(max(waiting.FIRST_PAUSE, retry_after(refusal, default=5.0)))


class BlockingServiceClient(ServiceClient):
    """Calls of threads to one rollout service. Each call may be repeated without harm."""

    def __init__(self, url: str, timeout: float, api_key: str | None = None):
        super().__init__(url, timeout)
        self._http = direct_client(self.url, REQUEST_SECONDS, api_key)
        self._lock = threading.Lock()
        """Guards `_waits` and `_watcher`."""
        self._waits: list[Patience] = []
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()

    def close(self) -> None:
        """Close the connection."""
        self._closed.set()
        self._http.close()

    def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        query: dict[str, int] | None = None,
        timeout: float = math.inf,
        pause: Callable[[float], object] = time.sleep,
        check: Callable[[], object] = lambda: None,
    ) -> dict[str, Any]:
        """One call, tried again while the service is away.

        Args:
            method, path: of the route.
            body: numbers in it arrive as they are: a float is written with all digits that it takes
                to read it again.
            query: arguments of the address.
            timeout: seconds that the service may be away, if less than the client's.
            pause: waits for so many seconds between two attempts.
            check: called before each attempt; it raises to end the call.

        Raises:
            ServiceUnavailable: `unavailable`, the service is away for too long.
            EnvironmentFailure: `failure`, it refuses the key or answers something else than a JSON
                object.
            RejectedByService: `rejected`, it refuses the request.
        """
        call = f"{method} {path}"
        content, headers = self._encode(body)
        with self._logging(self._patience(call, timeout)) as patience:
            while True:
                check()
                left = max(MIN_REQUEST_SECONDS, patience.timeout - patience.waited)
                try:
                    response = self._http.request(
                        method,
                        path,
                        content=content,
                        headers=headers,
                        params=query,
                        timeout=min(REQUEST_SECONDS, left),
                    )
                    self._content_of(call, response)
                except (httpx.TransportError, httpx.DecodingError) as error:
                    pause(patience.check(f"{call}: {type(error).__name__}: {error}"))
                except TryAgain as error:
                    pause(max(patience.check(str(error)), error.at_least))
                else:
                    patience.done()
                    return self._object(call, response)

    def _object(self, call: str, response: httpx.Response) -> dict[str, Any]:
        try:
            answer = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise self.failure(
                f"{self._named(call)}answered no JSON object ({response.text[:80]!r}); "
                "is this the address of a rollout service?"
            )
        return answer

    def _named(self, call: str) -> str:
        method, _, path = call.partition(" ")
        return f"{method} {self.url}{path} "

    @contextlib.contextmanager
    def _logging(self, patience: Patience) -> Iterator[Patience]:
        """Log the wait also while an attempt has no answer: a service that is stopped takes
        requests and answers none.
        """
        with self._lock:
            self._waits.append(patience)
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._watch, name="rollout-service-watch", daemon=True
                )
                self._watcher.start()
        try:
            yield patience
        finally:
            with self._lock:
                self._waits.remove(patience)

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            with self._lock:
                waits = [patience for patience in self._waits if patience.waited >= LOG_EVERY]
            if waits:
                max(waits, key=lambda patience: patience.waited).tell()


def _detail(response: httpx.Response) -> str:
    """Return the reason in a refusal of the service, in one line."""
    try:
        content = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        content = None
    detail = content.get("detail") if isinstance(content, dict) else None
    return " ".join((detail if isinstance(detail, str) else response.text).split())[:500]


def this_process() -> str:
    """Name this process as the rollout service shows it: by its supervisor's name for it, else by
    its id and host.
    """
    return os.environ.get(PROCESS_NAME) or f"process {os.getpid()} on {socket.gethostname()}"


@contextlib.asynccontextmanager
async def reminded(patience: Patience) -> AsyncIterator[None]:
    """Log every ten seconds that a request has no answer yet: a service that is stopped takes
    requests and answers none.
    """

    async def remind() -> None:
        while True:
            due = time.monotonic() + LOG_EVERY
            await asyncio.sleep(LOG_EVERY)
            # Later, this process was busy or stopped itself, and the answer may be there.
            if time.monotonic() < due + 1.0:
                patience.tell()

    reminder = asyncio.create_task(remind())
    try:
        yield
    finally:
        reminder.cancel()


def retry_after(response: httpx.Response, default: float = 1.0) -> float:
    """Seconds that the server asks to wait; its Retry-After header where it is a number, else
    `default`.
    """
    try:
        seconds = float(response.headers.get("Retry-After", default))
    except ValueError:
        return default
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER) if math.isfinite(seconds) else default
