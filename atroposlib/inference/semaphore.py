"""A semaphore whose number of slots follows a weight between 0 and 1."""

import asyncio
import math
from collections import deque
from types import TracebackType


class AsyncSemWithAdaptiveWeight:
    """At weight `w`, at most `max(1, floor(max_val * w))` holders at once; holders of before a change keep their slot.

    Waiters are served first come, first served.
    """

    def __init__(self, value: int):
        self.max_val = value
        self.weight = 1.0
        self.in_use = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        return max(1, math.floor(self.max_val * self.weight))

    @property
    def free(self) -> int:
        """Slots that could be taken now."""
        return max(0, self.limit - self.in_use)

    @property
    def _value(self) -> int:
        return self.max_val - self.in_use

    def min_val(self) -> float:
        """Slots that the weight leaves unused."""
        return self.max_val * (1.0 - self.weight)

    def update_weight(self, weight: float) -> None:
        self.weight = min(1.0, max(0.0, weight))
        self._wake()

    def locked(self) -> bool:
        return self.in_use >= self.limit or any(not waiter.done() for waiter in self._waiters)

    async def acquire(self) -> bool:
        if not self.locked():
            self.in_use += 1
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter  # whoever wakes it has already taken the slot in its name
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()
            raise
        return True

    def release(self) -> None:
        self.in_use -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiters and self.in_use < self.limit:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.in_use += 1
                waiter.set_result(None)

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
