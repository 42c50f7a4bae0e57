"""For how long vLLM has not answered what it was asked, and for how long it is worth waiting for
more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FURTHER_SECONDS = 1.0
"""How long anything else is waited for while an answer is overdue. vLLM answers in order, so that
it would come after that one; each step of giving an update up would else wait for as long as the
first did."""


class Silence:
    """The questions that wait for an answer, those that nobody waits for any more among them."""

    def __init__(self) -> None:
        self._since: dict[object, float] = {}
        self._overdue: set[asyncio.Future[Any]] = set()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In the block an answer is waited for."""
        question = object()
        self._since[question] = time.monotonic()
        try:
            yield
        finally:
            del self._since[question]

    def overdue(self, question: asyncio.Future[Any], asked_for: float) -> None:
        """Nobody waits for this answer any more; it ends the silence when it comes.

        Args:
            asked_for: seconds for which it has been waited for.
        """
        self._since[question] = time.monotonic() - asked_for
        self._overdue.add(question)
        question.add_done_callback(self._has_come)

    def patience(self, seconds: float) -> float:
        """How long a new question is waited for that might take so many seconds."""
        return min(seconds, FURTHER_SECONDS) if self._overdue else seconds

    @property
    def seconds(self) -> float:
        """Since the oldest question that has no answer yet; 0.0 if there is none."""
        return max(0.0, time.monotonic() - min(self._since.values())) if self._since else 0.0

    def _has_come(self, question: asyncio.Future[Any]) -> None:
        self._overdue.discard(question)
        self._since.pop(question, None)
        if not question.cancelled():
            question.exception()  # else asyncio would complain that nobody has looked at it
