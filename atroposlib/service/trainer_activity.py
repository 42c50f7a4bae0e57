"""A counter of the trainer's actions, on which environments wait."""

from __future__ import annotations

import asyncio


class TrainerActivity:
    """Counts registrations, batches taken, acknowledgements and ends of runs.

    Attributes:
        number: of actions since this service began.
    """

    def __init__(self) -> None:
        self.number = 0
        self._next = asyncio.Event()

    def count(self) -> None:
        """Count an action, and wake everything that waits for one."""
        self.number += 1
        self._next.set()
        self._next = asyncio.Event()

    async def wait_for_change(self, known: int, seconds: float) -> None:
        """Wait until the count differs from `known`, for at most so many seconds.

        A count from before a restart of the service may equal the present one by chance. Then the
        wait lasts `seconds`.
        """
        if known != self.number:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._next.wait()
        except TimeoutError:
            return
