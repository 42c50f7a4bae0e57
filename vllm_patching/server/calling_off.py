"""A wait for the workers that is broken off, because the trainer does not want any more what it is
for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CallingOff:
    """Why whoever waits for the workers should not go on waiting. Calls take turns by a lock, and
    one that waits for workers has it; so the call that comes next says here that it is there.
    """

    def __init__(self) -> None:
        self._reasons: list[str] = []

    @contextmanager
    def by(self, reason: str) -> Iterator[None]:
        """In the block waits are broken off. An empty reason breaks nothing off."""
        if reason:
            self._reasons.append(reason)
        try:
            yield
        finally:
            if reason:
                self._reasons.remove(reason)

    @property
    def reason(self) -> str:
        """Why not to wait; empty if nobody has called it off."""
        return next(iter(self._reasons), "")
