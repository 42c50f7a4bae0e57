"""Bounded, logged waits. Nothing in this package waits without a deadline or in silence."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from atroposlib.errors import EnvironmentFailure

T = TypeVar("T")

LOG_EVERY = 10.0
FIRST_PAUSE = 0.2
MAX_PAUSE = 2.0


@dataclass
class Logged:
    """The log lines about one thing. Waits for it that share this are logged as one.

    Attributes:
        at: when the last line was written.
        since: when the wait began that a line is about; None when it is over.
    """

    at: float = -math.inf
    since: float | None = None


class Patience:
    """The deadline of one wait: pauses that grow, a line in the log now and then, an error at the
    end.

    A wait that goes on logs at once, then every ten seconds.

    Args:
        what: is waited for.
        timeout: seconds after which the wait ends with `error`.
        logged: shared by waits for the same thing.
        longest_attempt: seconds that an attempt takes at most. If more have passed, this process
            was stopped (SIGSTOP), and the rest does not count.
    """

    def __init__(
        self,
        what: str,
        timeout: float,
        error: type[EnvironmentFailure],
        logger: logging.Logger,
        remedy: str = "",
        logged: Logged | None = None,
        longest_attempt: float = math.inf,
    ):
        self.what, self.timeout, self.error, self.logger, self.remedy = (
            what,
            timeout,
            error,
            logger,
            remedy,
        )
        self.logged, self.longest_attempt = logged or Logged(), longest_attempt
        self.started = self.checked = time.monotonic()
        self.pause = FIRST_PAUSE

    @property
    def waited(self) -> float:
        return time.monotonic() - self.started

    def check(self, why: str) -> float:
        """Note one more failed attempt and return for how long to pause.

        Raises:
            EnvironmentFailure: (the given subclass) when the time is up.
        """
        now = time.monotonic()
        self.started += max(0.0, now - self.checked - self.longest_attempt)
        self.checked = now
        if self.waited >= self.timeout:
            remedy = f"; {self.remedy}" if self.remedy else ""
            raise self.error(f"{self.what}: {why} for {self.waited:.0f} s, giving up{remedy}")
        self.tell(why)
        pause, self.pause = (
            min(self.pause, self.timeout - self.waited),
            min(self.pause * 1.5, MAX_PAUSE),
        )
        return max(0.01, pause)

    def tell(self, why: str) -> None:
        """Log that the wait goes on, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self.logged.at < LOG_EVERY:
            return
        self.logged.at = now
        if self.logged.since is None:
            self.logged.since = self.started
        self.logger.info(
            "waiting for %s: %s (%.0f s of %.0f s)", self.what, why, self.waited, self.timeout
        )

    async def wait(self, why: str, at_least: float = 0.0) -> None:
        """Pause once before the next attempt."""
        await asyncio.sleep(max(self.check(why), at_least))

    def wait_blocking(self, why: str) -> None:
        """The same outside an event loop."""
        time.sleep(self.check(why))

    def done(self) -> None:
        """Log that the wait is over, if it was worth a line."""
        if self.logged.since is not None:
            self.logger.info(
                "%s: there after %.1f s", self.what, time.monotonic() - self.logged.since
            )
            self.logged.since = None


async def gather_or_cancel(calls: list[Awaitable[T]]) -> list[T]:
    """As `asyncio.gather`, but when one fails the others are cancelled rather than left running."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
