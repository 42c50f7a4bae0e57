"""For how long vLLM has not answered what it was asked."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Silence:
    """The questions that wait for an answer."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._numbers = itertools.count()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In the block an answer is waited for."""
        number = next(self._numbers)
        self._since[number] = time.monotonic()
        try:
            yield
        finally:
            del self._since[number]

    @property
    def seconds(self) -> float:
        """Since the oldest question that has no answer yet; 0.0 if there is none."""
        return max(0.0, time.monotonic() - min(self._since.values())) if self._since else 0.0
