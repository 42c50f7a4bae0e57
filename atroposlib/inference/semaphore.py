"""A semaphore whose number of slots follows a weight between 0 and 1."""

import math
from types import TracebackType

from anyio import CapacityLimiter


class AsyncSemWithAdaptiveWeight:
    """Slots: at weight `w`, at most `max(1, floor(max_val * w))` holders at once.

    Holders keep their slots when the weight falls. Waiters are served first come, first served.
    """

    def __init__(self, value: int):
        self.max_val = value
        self.weight = 1.0
        self._limiter = CapacityLimiter(self.limit)
        # The limiter counts borrowers. A fresh object borrows each slot, so that one task can hold
        # several.
        self._slots: list[object] = []

    @property
    def limit(self) -> int:
        return max(1, math.floor(self.max_val * self.weight))

    @property
    def in_use(self) -> int:
        return self._limiter.borrowed_tokens

    @property
    def free(self) -> int:
        """Slots that could be taken now."""
        return max(0, self.limit - self.in_use)

    def min_val(self) -> float:
        """Return the slots that the weight leaves unused."""
        return self.max_val * (1.0 - self.weight)

    def update_weight(self, weight: float) -> None:
        self.weight = min(1.0, max(0.0, weight))
        self._limiter.total_tokens = self.limit

    def locked(self) -> bool:
        return self.in_use >= self.limit or self._limiter.statistics().tasks_waiting > 0

    async def acquire(self) -> bool:
        slot = object()
        await self._limiter.acquire_on_behalf_of(slot)
        self._slots.append(slot)
        return True

    def release(self) -> None:
        self._limiter.release_on_behalf_of(self._slots.pop())

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
