"""Seconds by phase of an update."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(table: dict[str, float], phase: str) -> Iterator[None]:
    """Add to `table[phase]` the seconds that the with block took, whether it succeeded or not."""
    started = time.perf_counter()
    try:
        yield
    finally:
        table[phase] = table.get(phase, 0.0) + time.perf_counter() - started
