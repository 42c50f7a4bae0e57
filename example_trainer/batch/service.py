"""The trainer's connection to the rollout service, whose waits a signal ends."""

from __future__ import annotations

import functools
import math
import threading
import time
from typing import Any

from atroposlib.service_client import BlockingServiceClient, RejectedByService
from example_trainer.errors import RolloutServiceError
from example_trainer.process import StopRequested, StopSignal

_LOOK_SECONDS = 0.25
"""Longest time until an interruption is noticed."""
_LAST_WORD_SECONDS = 10.0
"""Longest wait for an absent service after a signal, for a call that a signal must not prevent."""


class Interrupted(Exception):
    """`interrupt` was called during a wait that it may end."""


class RefusedError(RejectedByService, RolloutServiceError):
    """The service answered with a 4xx status."""


class ServiceConnection(BlockingServiceClient):
    """Calls to one rollout service.

    Args:
        stop: heeded while the service is away.
        service_timeout: seconds that it may be away at a time.
        caller: program that is refused if the key is wrong.
    """

    key_remedy = "give --atropos-api-key, or set ROLLOUT_API_KEY"
    start_remedy = (
        "start it with `python -m atroposlib.cli.run_api`, or raise the limit (--service-timeout)"
    )
    unavailable = failure = RolloutServiceError
    rejected = RefusedError

    def __init__(
        self,
        url: str,
        stop: StopSignal,
        api_key: str | None = None,
        service_timeout: float = 300.0,
        caller: str = "trainer",
    ) -> None:
        super().__init__(url, service_timeout, api_key)
        self.stop, self.caller = stop, caller
        self._interrupted = threading.Event()

    def interrupt(self) -> None:
        """From now on, end what is interruptible with Interrupted, in whatever thread it waits."""
        self._interrupted.set()

    def wait(self, seconds: float, interruptible: bool) -> None:
        """Wait, but no longer than until a signal comes, or an interruption if it may end this
        wait.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if interruptible and self._interrupted.is_set():
                raise Interrupted
            self.stop.wait(min(left, _LOOK_SECONDS))

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        query: dict[str, int] | None = None,
        timeout: float = math.inf,
        interruptible: bool = False,
    ) -> dict[str, Any]:
        """See `request`. A signal ends the wait.

        Args:
            interruptible: `interrupt` ends the wait for the service.

        Raises:
            RolloutServiceError: it is away for too long, or answers something else than a JSON
                object.
            RefusedError: it answers that the request is wrong.
            StopRequested: a signal came.
        """
        wait = functools.partial(self.wait, interruptible=interruptible)
        return self.request(method, path, body, query, timeout, wait, self.stop.check)

    def last_call(
        self, path: str, body: dict[str, Any], timeout: float = math.inf
    ) -> dict[str, Any]:
        """POST what a signal must not keep from being sent: it shortens the wait for a service that
        is away.

        Raises:
            StopRequested: a signal came, and the service is away.
        """
        began = time.monotonic()

        def wait(seconds: float) -> None:
            try:
                self.wait(seconds, interruptible=False)
            except StopRequested:
                if time.monotonic() - began > _LAST_WORD_SECONDS:
                    raise
                time.sleep(seconds)

        return self.request("POST", path, body, timeout=timeout, pause=wait)
