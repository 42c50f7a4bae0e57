"""Bounds of the numbers that services store and trainers compute with.

SDK, rollout service and trainer share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LEAST_INTEGER, LARGEST_INTEGER = -(2**63), 2**64 - 1
"""Integers outside of 64 bits are not exact for every JSON reader, and some readers refuse the
whole document."""
LARGEST_SCORE = 1e9
"""Largest magnitude of a score or an advantage. Sums over a batch of 2**20 sequences and squares of
those sums stay far below the largest float32, and so do gradients that are proportional to an
advantage."""
LEAST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""Between these magnitudes a number is neither 0 nor infinite in float32."""


def first_beyond(row: Sequence[float], bound: float) -> int | None:
    """Return the index of the first number that is NaN or whose magnitude exceeds `bound`; None if
    there is none.
    """
    try:
        if not row or (-bound <= min(row) and max(row) <= bound and sum(row) == sum(row)):
            return None
    except OverflowError:  # the sum has integers beyond float64
        pass
    return next((index for index, value in enumerate(row) if not -bound <= value <= bound), None)


def unstorable(value: Any) -> str | None:
    """Say why a JSON document cannot hold `value` for every reader; None if it can.

    Looks at integers and floats alone.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and not LEAST_INTEGER <= value <= LARGEST_INTEGER:
        return f"an integer must lie between {LEAST_INTEGER} and {LARGEST_INTEGER} (64 bits)"
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return "every number must be finite"
    return None
