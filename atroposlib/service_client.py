"""The environment's connection to the rollout service: retries, back-off and re-registration over
HTTP.

A transient outage never loses a group and never ends the process: every call is tried again, with
growing pauses and a line in the log, until `timeout` seconds have passed. A post carries an
idempotency key, so that a retry is not counted twice.
"""

import asyncio
import gzip
import logging
import math
import os
import socket
import time
from typing import Any

import httpx
import orjson

from atroposlib.errors import EnvironmentFailure, ServiceUnavailable
from atroposlib.utils import waiting
from atroposlib.utils.jsonl import encode
from atroposlib.utils.waiting import LOG_EVERY, Logged, Patience
from atroposlib.web.connections import LIMITS, end_slow_answer_async
from atroposlib.web.keys import LOOPBACK, SERVICE_KEY, bearer, host_of

logger = logging.getLogger(__name__)

COMPRESS_ABOVE_BYTES = 4096
CONNECT_SECONDS, REQUEST_SECONDS = 5.0, 60.0
"""Deadlines of one request: to connect; then to send it, and for the answer, each."""
LONGEST_ATTEMPT = CONNECT_SECONDS + 2 * REQUEST_SECONDS
LONGEST_RETRY_AFTER = 30.0
FULL_DISK = 507
FULL_DISK_SECONDS = 24 * 3600.0
"""Longest wait for space on the service's disk, which a person has to free, or a trainer that takes
batches."""
PROCESS_NAME = "LOCKSTEP_PROCESS"
"""Variable with a supervisor's name for this process."""


class RejectedByService(Exception):
    """The service understood the request and will never accept it (4xx other than 429): the message
    holds its reason.
    """

    def __init__(self, status: int, detail: str):
        super().__init__(f"{status}: {detail}")
        self.status = status


class RolloutServiceClient:
    """HTTP calls of one environment to one rollout service.

    Args:
        url: the service's address, for example `http://localhost:8000`.
        timeout: longest wait for the service, in seconds, before `ServiceUnavailable` is raised.
        api_key: bearer token, if the service wants one.
    """

    def __init__(self, url: str, timeout: float, api_key: str | None = None):
        self.url = url.rstrip("/")
        self.timeout = timeout
        # HTTP_PROXY is for the world outside: it must not stand between the processes of one run.
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=bearer(api_key),
            timeout=httpx.Timeout(REQUEST_SECONDS, connect=CONNECT_SECONDS),
            trust_env=False,
            limits=LIMITS,
            event_hooks={"response": [end_slow_answer_async]},
        )
        self._logged = Logged()
        # On one machine compressing costs more than it saves.
        self._compress = host_of(self.url) not in LOOPBACK
        self._full_since: float | None = None
        """When the service refused a call for want of disk space, if it has taken no post since."""

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> dict[str, Any]:
        return await self._call("GET", path, None)

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        return await self._call("POST", path, body)

    async def status_env(
        self, env_id: int, moves: int | None = None, wait: float = 0.0
    ) -> dict[str, Any]:
        """`/status-env` takes its arguments as the JSON body of a GET.

        Args:
            moves: of the last answer, to get this one when the trainer has done something since.
            wait: seconds after which it comes nevertheless.
        """
        waiting = {} if moves is None else {"moves": moves, "wait": wait}
        return await self._call(
            "GET", "/status-env", {"env_id": env_id, "process": this_process(), **waiting}
        )

    async def disconnect(self, env_id: int) -> None:
        """Tell the service that this environment is gone; one attempt, since a service that is gone
        too needs no telling.
        """
        try:
            response = await self._http.post(
                "/disconnect-env", json={"env_id": env_id}, timeout=5.0
            )
            response.raise_for_status()
            logger.info("disconnected environment %s from the rollout service", env_id)
        except httpx.HTTPError as error:
            logger.info(
                "the rollout service at %s was not told that environment %s stops: %s",
                self.url,
                env_id,
                error,
            )

    async def _call(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """One request, repeated until it is answered.

        Raises:
            ServiceUnavailable: no usable answer within the timeout.
            RejectedByService: an answer that a retry cannot change.
        """
        content, headers = self._encode(body)
        patience, full_since = self._patience(), None
        while True:
            reminder = asyncio.create_task(remind(patience, f"no answer to {path} so far"))
            try:
                response = await self._http.request(method, path, content=content, headers=headers)
            except httpx.HTTPError as error:
                await patience.wait(f"no answer to {path} ({type(error).__name__})")
                continue
            finally:
                reminder.cancel()
            if response.status_code == FULL_DISK:
                full_since = time.monotonic() if full_since is None else full_since
                await self._wait_for_space(path, response, full_since)
                patience = (
                    self._patience()
                )  # the service is there, and what it lacks later is another matter
                continue
            if response.status_code == 429:
                await patience.wait(
                    f"it is full ({path} answered 429)", at_least=retry_after(response)
                )
                continue
            if response.status_code >= 500:
                await patience.wait(
                    f"{path} answered {response.status_code}",
                    at_least=retry_after(response, default=0.0),
                )
                continue
            if response.status_code in (401, 403):
                raise EnvironmentFailure(
                    f"rollout service at {self.url} refused {path} with {response.status_code}: "
                    f"set {SERVICE_KEY} to its key (or --env.rollout_server_api_key, which other users of the machine can see)"
                )
            if response.status_code >= 400:
                raise RejectedByService(response.status_code, response.text[:500])
            try:
                answer = orjson.loads(response.content)
            except orjson.JSONDecodeError:
                await patience.wait(f"{path} answered no JSON: {response.text[:80]!r}")
                continue
            patience.done()
            if method == "POST" and self._full_since is not None:
                waited, self._full_since = time.monotonic() - self._full_since, None
                logger.info(
                    "the rollout service at %s has space again after %.0f s", self.url, waited
                )
            return answer if isinstance(answer, dict) else {"value": answer}

    def _patience(self) -> Patience:
        return Patience(
            f"rollout service at {self.url}",
            self.timeout,
            ServiceUnavailable,
            logger,
            "start it with `python -m atroposlib.cli.run_api` or pass its address as --env.rollout_server_url",
            self._logged,
            LONGEST_ATTEMPT,
        )

    async def _wait_for_space(self, path: str, refusal: httpx.Response, since: float) -> None:
        """Pause once while the service's disk is full. All calls that wait log one line together.

        Raises:
            ServiceUnavailable: this call has waited for `FULL_DISK_SECONDS`.
        """
        reason = _detail(refusal)
        if time.monotonic() - since > FULL_DISK_SECONDS:
            raise ServiceUnavailable(
                f"rollout service at {self.url}: no disk space for {path} within {FULL_DISK_SECONDS:.0f} s: {reason}"
            )
        if self._full_since is None:
            self._full_since = time.monotonic()
            logger.warning(
                "the rollout service at %s has no disk space: %s. Posts wait up to %.0f s and go on by themselves",
                self.url, reason, FULL_DISK_SECONDS,
            )  # fmt: skip
        await asyncio.sleep(max(waiting.FIRST_PAUSE, retry_after(refusal, default=5.0)))

    def _encode(self, body: Any) -> tuple[bytes | None, dict[str, str]]:
        if body is None:
            return None, {}
        content = encode(body)
        headers = {"Content-Type": "application/json"}
        if self._compress and len(content) > COMPRESS_ABOVE_BYTES:
            return gzip.compress(content, compresslevel=1), headers | {"Content-Encoding": "gzip"}
        return content, headers


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


async def remind(patience: Patience, why: str) -> None:
    """Log every ten seconds that a request has no answer yet: a service that is stopped takes
    requests and answers none.
    """
    while True:
        due = time.monotonic() + LOG_EVERY
        await asyncio.sleep(LOG_EVERY)
        if (
            time.monotonic() < due + 1.0
        ):  # else this process was busy or stopped itself, and the answer may be there
            patience.tell(why)


def retry_after(response: httpx.Response, default: float = 1.0) -> float:
    """Seconds that the server asks to wait; its Retry-After header where it is a number, else
    `default`.
    """
    try:
        seconds = float(response.headers.get("Retry-After", default))
    except ValueError:
        return default
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER) if math.isfinite(seconds) else default
