"""Bounds on the bytes of bodies and on the number of large answers that a server works on at a
time. Pure.

A request waits in a queue, first in, first out, until there is space for it. After WAIT_SECONDS it
is refused with 503. Three budgets keep small requests and large ones apart. A request that needs
two takes them in this order, so that no two requests wait for each other:

1. packed: gzip bodies of more than SMALL_BODY bytes, as they arrive,
2. large: bodies of more than SMALL_BODY bytes after decompression,
3. small: all others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

SMALL_BODY = 1 << 20
"""Bytes of the largest body that never waits behind large ones."""
TINY_BODY = 1 << 16
"""Bytes of the largest body that never waits: the bound on connections bounds these too."""
SMALL_BUDGET = 128 << 20
"""Bytes of all small bodies that are worked on at a time."""
WAIT_SECONDS = 20.0
"""Time after which a request that waits for space is refused."""
ANSWERS_AT_ONCE = 8
"""Large answers of one path that are made or sent at a time."""
PAGE_ANSWERS_AT_ONCE = 32
"""Answers to open pages that are made or sent at a time, event streams left out."""


class NoSpaceError(Exception):
    """A request waited for space for too long. The message is for the client."""


class Budget:
    """A number of bytes, or of other units, for all requests together.

    Args:
        most: units in all. A request that asks for more gets all of them.
        name: of the units, for messages.
    """

    def __init__(self, most: int, name: str) -> None:
        self.most, self.name = most, name
        self.taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int, seconds: float = WAIT_SECONDS) -> int:
        """Wait for space, and return the units that were taken, to be given back.

        Raises:
            NoSpaceError: there was no space for so many seconds.
        """
        count = min(count, self.most)
        if not self._waiting and self.taken + count <= self.most:
            self.taken += count
            return count
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            async with asyncio.timeout(seconds):
                await turn
        except TimeoutError:
            self._leave(count, turn)
            raise NoSpaceError(
                f"{self.taken} of {self.most} {self.name} are in work and this request needs {count}; it has waited for "
                f"{seconds:g} s: try again"
            ) from None
        except BaseException:
            self._leave(count, turn)
            raise
        return count

    def _leave(self, count: int, turn: asyncio.Future[None]) -> None:
        """Give up waiting, also if the turn came in the same moment."""
        if turn.done() and not turn.cancelled():
            self.give(count)
        else:
            self._waiting.remove((count, turn))
            self._wake()

    def give(self, count: int) -> None:
        """Give units back."""
        self.taken -= count
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.taken + self._waiting[0][0] <= self.most:
            count, turn = self._waiting.popleft()
            if not turn.done():
                self.taken += count
                turn.set_result(None)


@dataclass(slots=True)
class Share:
    """The part of the budgets that one request has."""

    _held: dict[str, tuple[Budget, int]] = field(default_factory=dict)

    async def take(self, budget: Budget, count: int, seconds: float) -> None:
        """Take units of a budget of which the request has none.

        Raises:
            NoSpaceError: there was no space for so many seconds.
        """
        self._held[budget.name] = (budget, await budget.take(count, seconds))

    def shrink(self, budget: Budget, count: int) -> None:
        """Give back all but `count` units of a budget, if the request has more."""
        _, held = self._held.get(budget.name, (budget, 0))
        if count < held:
            budget.give(held - count)
            self._held[budget.name] = (budget, count)

    def give_all(self) -> None:
        """Give everything back."""
        for budget, held in self._held.values():
            budget.give(held)
        self._held.clear()


class Budgets:
    """The budgets of a server.

    Args:
        max_body: bytes of the largest body after decompression.
        seconds: time for which a request waits at most.
        large: bytes of all large bodies after decompression; None for twice the largest one.
    """

    def __init__(
        self, max_body: int, seconds: float = WAIT_SECONDS, large: int | None = None
    ) -> None:
        self.seconds = min(seconds, WAIT_SECONDS)
        self.packed = Budget(max_body, "bytes of gzip bodies")
        self.large = Budget(
            2 * max_body if large is None else max(large, max_body), "bytes of bodies"
        )
        self.small = Budget(SMALL_BUDGET, "bytes of small bodies")
        self._answers: dict[str, Budget] = {}

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[Share]:
        """Give back, at the end of the block, everything that the request has taken in it."""
        share = Share()
        try:
            yield share
        finally:
            share.give_all()

    @asynccontextmanager
    async def answering(self, path: str, most: int = ANSWERS_AT_ONCE) -> AsyncIterator[None]:
        """Make and send one of at most so many large answers of a path in the block.

        Raises:
            NoSpaceError: other answers took too long.
        """
        budget = self._answers.setdefault(path, Budget(most, f"answers to {path}"))
        held = await budget.take(1, self.seconds)
        try:
            yield
        finally:
            budget.give(held)
