"""One connection to the rollout service: calls that are tried again while it is away, for so long
and no longer.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

import httpx
import orjson
from httpx import codes

from example_trainer.batch.damaged_answers import salvage
from example_trainer.batch.outage import Outage
from example_trainer.errors import RolloutServiceError
from example_trainer.http_client import direct_client
from example_trainer.process import StopRequested, StopSignal

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 60.0
"""Deadline of one request, for connecting, sending and the answer each."""
_LEAST_REQUEST_SECONDS = 1.0
_FIRST_DELAY, _LONGEST_DELAY = 0.2, 5.0
_LOOK_SECONDS = 0.25
"""How soon an interruption is noticed."""
_LAST_WORD_SECONDS = 10.0
"""How long the service may be away for a call that a signal must not keep from being made."""


class Interrupted(Exception):
    """`interrupt` was called during a wait that it may end."""


class RefusedError(RolloutServiceError):
    """The service answered with a 4xx status.

    Attributes:
        said: why, in its own words; empty if it gave none.
    """

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


class ServiceConnection:
    """Calls to one rollout service.

    Args:
        stop: heeded while the service is away.
        service_timeout: seconds that it may be away at a time.
        caller: who is refused where the key is wrong.
    """

    def __init__(
        self,
        url: str,
        stop: StopSignal,
        api_key: str | None = None,
        service_timeout: float = 300.0,
        caller: str = "trainer",
    ) -> None:
        self.url, self.stop, self.service_timeout, self.caller = (
            url.rstrip("/"),
            stop,
            service_timeout,
            caller,
        )
        self._http = direct_client(self.url, REQUEST_SECONDS, api_key)
        self._outage = Outage(self.url)
        self._interrupted = threading.Event()

    def close(self) -> None:
        """Close the connection."""
        self._outage.close()
        self._http.close()

    def interrupt(self) -> None:
        """From now on, end what is interruptible with Interrupted, in whatever thread it waits."""
        self._interrupted.set()

    def pause(self, seconds: float, interruptible: bool) -> None:
        """Wait, but no longer than until a signal comes, or an interruption if it may end this
        wait.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if interruptible and self._interrupted.is_set():
                raise Interrupted
            self.stop.wait(min(left, _LOOK_SECONDS))

    def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        query: dict[str, int] | None = None,
        patience: float = math.inf,
        interruptible: bool = False,
        last_word: bool = False,
    ) -> dict[str, Any]:
        """One call, tried again while the service is away. Each of them may be repeated without
        harm.

        Args:
            body: numbers in it arrive as they are: a float is written with all digits that it takes
                to read it again.
            patience: seconds that it may be away, if less than `service_timeout`.
            interruptible: `interrupt` ends the wait for the service.
            last_word: a signal does not keep the call from being made: it shortens the wait for the
                service alone.

        Raises:
            RolloutServiceError: it is away for too long, or answers something else than a JSON
                object.
            RefusedError: it answers that the request is wrong.
            StopRequested: a signal came; with `last_word`, and the service is away.
        """
        patience, delay = min(patience, self.service_timeout), _FIRST_DELAY
        content = None if body is None else orjson.dumps(body)
        with self._outage.watching(f"{method} {path}", patience) as call:
            while True:
                if not last_word:
                    self.stop.check()
                deadline = min(
                    REQUEST_SECONDS, max(_LEAST_REQUEST_SECONDS, patience - call.waited())
                )
                call.begin(deadline)
                answer = self._attempt(method, path, content, query, deadline)
                if isinstance(answer, httpx.Response):
                    self._outage.over()
                    return self._answer(answer, method, path)
                if (waited := call.waited()) > patience:
                    raise RolloutServiceError(
                        f"the rollout service at {self.url} did not answer {method} {path} for {patience:.0f} s "
                        f"(--service-timeout); last: {answer}; start it with: python -m atroposlib.cli.run_api"
                    )
                pause = min(delay, patience)
                call.failed(answer, pause)
                self._outage.tell(call)
                try:
                    self.pause(pause, interruptible)
                except StopRequested:
                    if not last_word or waited > _LAST_WORD_SECONDS:
                        raise
                    time.sleep(pause)
                delay = min(_LONGEST_DELAY, delay * 2)

    def _attempt(
        self,
        method: str,
        path: str,
        content: bytes | None,
        query: dict[str, int] | None,
        deadline: float,
    ) -> httpx.Response | str:
        """Send one request. Returns the answer, or the reason why there is no usable one."""
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            response = self._http.request(
                method, path, content=content, headers=headers, params=query, timeout=deadline
            )
        except (httpx.TransportError, httpx.DecodingError) as error:
            return f"{type(error).__name__}: {error}"
        if response.is_server_error or response.status_code == codes.TOO_MANY_REQUESTS:
            return f"HTTP {response.status_code} {response.text[:200]}"
        return response

    def _answer(self, response: httpx.Response, method: str, path: str) -> dict[str, Any]:
        if response.status_code in (codes.UNAUTHORIZED, codes.FORBIDDEN):
            raise RolloutServiceError(
                f"the rollout service at {self.url} refuses this {self.caller} ({response.status_code}); give "
                "--atropos-api-key, or set ROLLOUT_API_KEY"
            )
        try:
            answer = orjson.loads(response.content)
        except orjson.JSONDecodeError as error:
            answer = salvage(response.content) if response.is_success else None
            if answer is not None:
                logger.warning(
                    "%s%s answered JSON that no strict reader takes: %s", self.url, path, error
                )
        if not response.is_success:
            said = answer.get("detail") if isinstance(answer, dict) else None
            raise RefusedError(
                f"{method} {self.url}{path}: {response.status_code} {response.text[:300]}",
                said if isinstance(said, str) else "",
            )
        if not isinstance(answer, dict):
            start = response.text[:80]
            raise RolloutServiceError(
                f"{method} {self.url}{path} answered no JSON object ({start!r}); is --atropos-url a rollout service?"
            )
        return answer
