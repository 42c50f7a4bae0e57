"""The log lines about a rollout service that does not answer: one for all threads that wait, while
they wait.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0
"""Without an answer for so long, a request is logged, and again after as long."""
_LOOK_SECONDS = 1.0


@dataclass
class Call:
    """One call and its attempts, none of which has been answered.

    Attributes:
        what: method and path.
        limit: seconds after which the caller gives up.
        lost: seconds of attempts that failed, and of the pauses between them. Each counts for no
            longer than it may take: if this process was stopped itself, the service is not blamed
            for that time.
        reason: why the last attempt failed.
    """

    what: str
    limit: float
    lost: float = 0.0
    reason: str = "no answer so far"
    _began: float = 0.0
    _most: float = 0.0

    def begin(self, most: float) -> None:
        """Begin an attempt, or a pause, that takes so many seconds at most."""
        self.lost, self._began, self._most = self.waited(), time.monotonic(), most

    def failed(self, reason: str, pause: float) -> None:
        """End an attempt. A pause follows."""
        self.reason = reason
        self.begin(pause)

    def waited(self) -> float:
        """Seconds without an answer."""
        return self.lost + min(time.monotonic() - self._began, self._most)


class Outage:
    """Watches the calls of one connection.

    Args:
        url: of the rollout service.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        """Guards what follows."""
        self._calls: list[Call] = []
        self._logged = -math.inf
        self._since: float | None = None
        """When the first call began whose wait was logged; None after an answer."""
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()

    def close(self) -> None:
        """End the watching thread."""
        self._closed.set()

    @contextlib.contextmanager
    def watching(self, what: str, limit: float) -> Iterator[Call]:
        """Log the call for as long as it has no answer."""
        call = Call(what, limit)
        with self._lock:
            self._calls.append(call)
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._watch, name="rollout-service-watch", daemon=True
                )
                self._watcher.start()
        try:
            yield call
        finally:
            with self._lock:
                self._calls.remove(call)

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            with self._lock:
                oldest = max(self._calls, key=Call.waited, default=None)
            if oldest is not None and oldest.waited() >= PROGRESS_SECONDS:
                self.tell(oldest)

    def tell(self, call: Call) -> None:
        """Log that a call waits, unless a line about this service was logged a moment ago."""
        waited, now = call.waited(), time.monotonic()
        with self._lock:
            if now - self._logged < PROGRESS_SECONDS:
                return
            self._logged = now
            if self._since is None:
                self._since = now - waited
        logger.warning(
            "Waiting for the rollout service at %s for %.0f of %.0f s (%s: %s)",
            self.url, waited, call.limit, call.what, call.reason,
        )  # fmt: skip

    def over(self) -> None:
        """The service has answered."""
        with self._lock:
            since, self._since = self._since, None
        if since is not None:
            logger.info(
                "The rollout service at %s is there, after %.0f s",
                self.url,
                time.monotonic() - since,
            )
