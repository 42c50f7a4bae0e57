"""What the trainer does that changes how much is wanted of environments, to be waited for."""

from __future__ import annotations

import asyncio


class TrainerActivity:
    """Counts them: a trainer registers, takes a batch, acknowledges one, ends its run.

    Attributes:
        number: of those so far, since this service began.
    """

    def __init__(self) -> None:
        self.number = 0
        self._next = asyncio.Event()

    def count(self) -> None:
        """There was one more: whoever waits goes on."""
        self.number += 1
        self._next.set()
        self._next = asyncio.Event()

    async def wait_for_change(self, known: int, seconds: float) -> None:
        """Wait until there was one since the count was `known`, for so many seconds at most.

        A count of another service's, from before a restart say, may be any: then the wait is too long by as much at most.
        """
        if known != self.number:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._next.wait()
        except TimeoutError:
            return
