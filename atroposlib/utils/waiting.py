"""Bounded, logged waits. Nothing in this package waits without a deadline or in silence."""

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import TypeVar

from atroposlib.errors import EnvironmentFailure

T = TypeVar("T")

LOG_EVERY = 10.0
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 2.0


class Patience:
    """The deadline of one wait: pauses that grow, a line in the log now and then, an error at the end.

    A wait that goes on logs at once, then every ten seconds.
    """

    def __init__(self, what: str, timeout: float, error: type[EnvironmentFailure], logger: logging.Logger, remedy: str = ""):
        self.what, self.timeout, self.error, self.logger, self.remedy = what, timeout, error, logger, remedy
        self.started = time.monotonic()
        self.last_logged = -float("inf")
        self.pause = FIRST_PAUSE

    @property
    def waited(self) -> float:
        return time.monotonic() - self.started

    def check(self, why: str) -> float:
        """Note one more failed attempt and return for how long to pause.

        Raises:
            EnvironmentFailure: (the given subclass) when the time is up.
        """
        if self.waited >= self.timeout:
            remedy = f"; {self.remedy}" if self.remedy else ""
            raise self.error(f"{self.what}: {why} for {self.waited:.0f} s, giving up{remedy}")
        if time.monotonic() - self.last_logged >= LOG_EVERY:
            self.last_logged = time.monotonic()
            self.logger.info("waiting for %s: %s (%.0f s of %.0f s)", self.what, why, self.waited, self.timeout)
        pause, self.pause = min(self.pause, self.timeout - self.waited), min(self.pause * 1.5, LONGEST_PAUSE)
        return max(0.01, pause)

    async def wait(self, why: str, at_least: float = 0.0) -> None:
        """Pause once before the next attempt."""
        await asyncio.sleep(max(self.check(why), at_least))

    def wait_blocking(self, why: str) -> None:
        """The same outside an event loop."""
        time.sleep(self.check(why))

    def done(self) -> None:
        """Say that the wait is over, if it was worth a line."""
        if self.last_logged > 0:
            self.logger.info("%s: there after %.1f s", self.what, self.waited)


async def gather_or_cancel(calls: list[Awaitable[T]]) -> list[T]:
    """As `asyncio.gather`, but when one fails the others are cancelled rather than left running."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
