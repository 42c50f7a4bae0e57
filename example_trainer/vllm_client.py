"""The trainer's client of a vLLM server: one place for deadlines, keys, retries and errors with
what to do.

All requests go through `VLLMClient`. It serves the weight bridges (`weight_bridge/server.py`,
`weight_bridge/lora.py`) and the sampler of `batch/local_sampler.py`. The look at its logprobs, and
the watch over a server that the trainer has started, use it too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import httpx

from atroposlib.web.connections import direct_client
from example_trainer.errors import BridgeError

logger = logging.getLogger(__name__)

QUICK_SECONDS = 5.0
"""Limit of the calls that a server answers at once, however busy it is."""
_MARGIN_SECONDS = 10.0
_LOG_EVERY_SECONDS = 10.0
_POLL_SECONDS = 0.5


class ServerSilent(BridgeError):
    """There was no answer; the server may have got the request."""


class ServerRefused(BridgeError):
    """The server answered with another status than 200; `status` is that.

    The message holds its reason.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class VLLMClient:
    """Speaks HTTP to one server. Its methods may be called by several threads."""

    what = "vLLM server"
    options = "--vllm-host and --vllm-port"
    """The name of a server and the options that name it, for messages."""

    def __init__(
        self,
        url: str,
        timeout: float,
        api_key: str | None = None,
        startup_timeout: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            url: where the server listens.
            timeout: seconds that the server may work on one request.
            api_key: bearer token, if the server asks for one.
            startup_timeout: seconds for the server to be there at first, and to come back; by
                default the same as `timeout`.
            sleep: how to wait between two questions; may raise to end the wait.
        """
        self.url = url
        self.timeout = timeout
        self.startup_timeout = timeout if startup_timeout is None else startup_timeout
        self.sleep = sleep
        self._said_away = False
        # The server answers within its own deadline; the margin lets its explanation arrive before
        # ours.
        self._http = direct_client(url, timeout + _MARGIN_SECONDS, api_key)

    @property
    def longest_wait(self) -> float:
        """Seconds after which `call` or `wait_for` has returned or raised, one after the other."""
        return self.startup_timeout + self.timeout + _MARGIN_SECONDS + QUICK_SECONDS

    def call(self, path: str, body: dict[str, Any], what: str | None = None) -> dict[str, Any]:
        """POST a request, once: nothing here knows whether it may be repeated.

        Args:
            path: of the route.
            body: JSON values.
            what: the request as an error names it; by default the path.

        Raises:
            ServerSilent: no answer came in time, or the connection broke.
            ServerRefused: the server refused, with its reason, or is not a server of this project.
        """
        what = what or path
        try:
            response = self._http.post(path, json=body)
        except httpx.TransportError as error:
            raise ServerSilent(
                f"{self.url} did not answer {what} ({_first_words(error)}); see the server's log, "
                "and restart it if it has ended"
            ) from error
        if response.status_code != 200:
            raise ServerRefused(
                f"{self.url} refused {what}: {_reason(response)}", response.status_code
            )
        answer = json_object(response)
        if answer is None:
            raise ServerRefused(
                f"{self.url} answered {what} with no JSON object ({response.text[:80]!r}); is that a vllm_api_server.py?",
                200,
            )
        return answer

    def look(self, path: str, seconds: float = QUICK_SECONDS) -> dict[str, Any] | None:
        """GET what the server answers at once; None without a good answer."""
        try:
            response = self._http.get(path, timeout=seconds)
        except httpx.HTTPError as error:
            logger.debug("no answer to %s%s: %s", self.url, path, error)
            return None
        except RuntimeError:
            if not self._http.is_closed:
                raise
            return None  # another thread has closed this client: the server has left
        if response.status_code != 200:
            return None
        return json_object(response)

    def why_not_serving(self) -> str:
        """Return the address of a server that cannot be sampled from now, and the reason in
        brackets; empty if it can.
        """
        weights = self.look("/weights")
        if weights is None:  # away, or a server of another project
            reason = self.missing("/health")
        elif weights.get("serving", True):
            reason = None
        else:
            reason = weights.get("trouble") or "does not serve"
        if reason is None:
            return ""
        return f"{self.url} ({reason})"

    def watch(self, path: str, owed: str, seconds: float = QUICK_SECONDS) -> dict[str, Any] | None:
        """As `look`; log once that a server is away, and what it will get (`owed`)
        when it is back.
        """
        answer = self.look(path, seconds)
        if answer is None and not self._said_away:
            logger.warning(
                "[Bridge] the %s at %s does not answer; start it again, it will get %s",
                self.what,
                self.url,
                owed,
            )
        self._said_away = answer is None
        return answer

    def status(self, path: str) -> int | None:
        """The HTTP status of GET `path`; None without an answer."""
        try:
            return self._http.get(path, timeout=QUICK_SECONDS).status_code
        except httpx.TransportError as error:
            logger.debug("no answer to %s%s: %s", self.url, path, error)
            return None

    def missing(self, path: str) -> str | None:
        """Return the reason why GET `path` has no good answer, in a few words; None if it has one."""
        try:
            status = self._http.get(path, timeout=QUICK_SECONDS).status_code
        except httpx.TransportError as error:
            return f"{path}: {_first_words(error)}"
        if status == 200:
            return None
        return f"{path} answers {status}"

    def wait_for(self, path: str, feature: str, start: str, instead: str = "") -> dict[str, Any]:
        """GET `path` from a server that may still be loading (503), or not be there yet.

        Args:
            feature: what the route is of, for errors: `the bridge`.
            start: the command that starts a server which has it.
            instead: what else a user can do who has a server without it.

        Raises:
            BridgeError: it is not there after `startup_timeout`, or it is there and has no such
                route, or refuses.
        """
        deadline = time.monotonic() + self.startup_timeout
        next_log = time.monotonic() + 1
        while True:
            try:
                response = self._http.get(path, timeout=QUICK_SECONDS)
                if response.status_code == 404:
                    routes = "/" + path.split("/")[1]
                    raise BridgeError(
                        f"{self.url} is a server without {routes} routes; start it with {start}{instead}"
                    )
                reason = _reason(response)
                if response.status_code == 200:
                    answer = json_object(response)
                    if answer is not None:
                        self._said_away = False
                        return answer
                    reason = f"no JSON object: {reason}"
                if response.status_code != 503:
                    raise ServerRefused(
                        f"{self.url} refuses {feature}: {reason}", response.status_code
                    )
            except httpx.TransportError as error:
                reason = _first_words(error)
            if time.monotonic() > deadline:
                raise BridgeError(
                    f"no {self.what} at {self.url} after {self.startup_timeout:g} s ({reason}); start it ({start}), or correct "
                    f"{self.options}, or wait longer with --service-timeout"
                )
            if time.monotonic() >= next_log:
                logger.info("[Bridge] Waiting for the %s at %s (%s)", self.what, self.url, reason)
                next_log = time.monotonic() + _LOG_EVERY_SECONDS
            self.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        self._http.close()


def _first_words(error: Exception) -> str:
    return str(error) or type(error).__name__


def json_object(response: httpx.Response) -> dict[str, Any] | None:
    """Return the body of an answer; None if it is not a JSON object."""
    try:
        answer = response.json()
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _reason(response: httpx.Response) -> str:
    """Return the reason in a server's error answer."""
    try:
        body = response.json()
    except ValueError:
        return f"{response.status_code} {response.text[:200]}"
    if isinstance(body, dict):
        body = body.get("error") or body.get("detail") or body
    return str(body)
