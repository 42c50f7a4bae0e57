"""Lets requests through in the order in which they arrived, although their bodies arrive at different speeds."""

from __future__ import annotations

import asyncio
from collections import deque


class Turn:
    """One request's place in the order."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.complete = False
        """All of its body has arrived."""


class Turnstile:
    """Oldest first has to mean the order in which clients posted, not the order in which their last bytes got here.

    A request takes its turn when it arrives (`enter`), waits for it when its body is complete (`reached`), and gives it up
    when it is accepted or refused (`leave`). One slow body may hold up the others only for `patience` seconds; after that
    it has lost its place, and counts as having arrived when it is complete.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._turns: deque[Turn] = deque()

    def enter(self) -> Turn:
        """Take the last place."""
        turn = Turn()
        self._turns.append(turn)
        return turn

    async def reached(self, turn: Turn) -> None:
        """Wait until everyone before this turn is through, or has lost its place."""
        turn.complete = True
        while not turn.over.is_set() and self._turns[0] is not turn:
            try:
                async with asyncio.timeout(self.patience):
                    await self._turns[0].over.wait()
            except TimeoutError:
                for other in list(self._turns):
                    if other is turn:
                        break
                    if not other.complete:
                        self.leave(other)

    def leave(self, turn: Turn) -> None:
        """Give the turn up. Doing it again changes nothing."""
        turn.over.set()
        while self._turns and self._turns[0].over.is_set():
            self._turns.popleft()
