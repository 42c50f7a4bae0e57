"""One sampled token that answers many callers: /health_generate is open to anybody and must not
load the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

CHECK_SECONDS = 30.0
"""Deadline of a check."""
SHARED_SECONDS = 5.0
"""A check also answers those who ask within this time after its end, so that there is at most one
in so many seconds."""


class SharedCheck:
    """Runs a check for all who ask at the same time or shortly afterwards."""

    def __init__(self) -> None:
        self._running: asyncio.Task[float] | None = None
        self._ended = 0.0

    async def result(self, check: Callable[[float], Awaitable[float]]) -> tuple[float, float]:
        """Return how many seconds the latest check took, and how many ago it ended.

        Args:
            check: sample a token within so many seconds.

        Raises:
            whatever the check has raised, such as TimeoutError.
        """
        if self._running is None or (
            self._running.done() and time.monotonic() - self._ended >= SHARED_SECONDS
        ):
            self._running = asyncio.create_task(self._run(check), name="check for /health_generate")
        # A caller that goes away must not cancel the check that others wait for.
        seconds = await asyncio.shield(self._running)
        return seconds, time.monotonic() - self._ended

    async def _run(self, check: Callable[[float], Awaitable[float]]) -> float:
        try:
            return await check(CHECK_SECONDS)
        finally:
            self._ended = time.monotonic()
