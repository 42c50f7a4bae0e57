"""Bounded, logged waits. Nothing in this package waits without a deadline or in silence."""

import asyncio
import inspect
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from atroposlib.errors import UsageError

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
    lock: threading.Lock = field(default_factory=threading.Lock)


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
        error: Callable[[str], Exception],
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
        self.why = "no answer so far"
        """Result of the last attempt."""
        self.pause = FIRST_PAUSE
        self._checked, self._waited_then = time.monotonic(), 0.0

    @property
    def waited(self) -> float:
        """Seconds since the begin, without the time for which this process was stopped."""
        return self._waited_then + min(time.monotonic() - self._checked, self.longest_attempt)

    def check(self, why: str) -> float:
        """Note one more failed attempt and return for how long to pause.

        Raises:
            Exception: `error`, when the time is up.
        """
        self.why = why
        self._waited_then, self._checked = self.waited, time.monotonic()
        left = self.timeout - self._waited_then
        if left <= 0:
            text = f"{self.what}: {why} for {self.waited:.0f} s, giving up"
            raise self.error("; ".join(filter(None, [text, self.remedy])))
        self.tell()
        pause = min(self.pause, left)
        self.pause = min(self.pause * 1.5, MAX_PAUSE)
        return max(0.01, pause)

    def tell(self) -> None:
        """Log that the wait goes on, unless that was done a moment ago."""
        now, waited = time.monotonic(), self.waited
        with self.logged.lock:
            if now - self.logged.at < LOG_EVERY:
                return
            self.logged.at = now
            if self.logged.since is None:
                self.logged.since = now - waited
        line = f"Waiting for {self.what} for {waited:.0f} of {self.timeout:.0f} s ({self.why})"
        self.logger.warning("%s", "; ".join(filter(None, [line, self.remedy])))

    async def wait(self, why: str, at_least: float = 0.0) -> None:
        """Pause once before the next attempt."""
        await asyncio.sleep(max(self.check(why), at_least))

    def wait_blocking(self, why: str) -> None:
        """The same outside an event loop."""
        time.sleep(self.check(why))

    def done(self) -> None:
        """Log that the wait is over, if it was worth a line."""
        with self.logged.lock:
            since, self.logged.since = self.logged.since, None
        if since is not None:
            self.logger.info("%s: there after %.1f s", self.what, time.monotonic() - since)


async def awaited(returned: Awaitable[T], method: str, author: object) -> T:
    """Return the result of an author's method, which must be asynchronous.

    Args:
        returned: the value that the call of the method returned.

    Raises:
        UsageError: the method is not asynchronous, or an iterator in it has ended.
    """
    if not inspect.isawaitable(returned):
        raise UsageError(
            f"{method} of {type(author).__name__} returned {returned!r:.80} at once: "
            f"write `async def {method}`"
        )
    try:
        return await returned
    except RuntimeError as error:
        if not isinstance(error.__cause__, StopIteration):
            raise
        raise UsageError(
            f"{method} of {type(author).__name__} raised StopIteration, as `next` does at the end "
            "of an iterator: use `next(iterator, None)`"
        ) from error


def plain(returned: T, method: str, author: object) -> T:
    """Return the result of an author's method, which must not be asynchronous.

    Args:
        returned: the value that the call of the method returned.

    Raises:
        UsageError: the method is asynchronous.
    """
    if not inspect.isawaitable(returned):
        return returned
    if inspect.iscoroutine(returned):
        returned.close()  # Python warns of a coroutine that nothing waits for
    raise UsageError(
        f"{method} of {type(author).__name__} is asynchronous: write `def {method}` without `async`"
    )


async def gather_or_cancel(calls: list[Awaitable[T]]) -> list[T]:
    """As `asyncio.gather`, but when one fails the others are cancelled rather than left running."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
