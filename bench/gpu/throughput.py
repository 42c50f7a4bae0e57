"""What generation loses by updates: spells with and without them in turn, under one load that is never interrupted.

The rate of one spell differs from the next by more than an update costs, and drifts; so each spell with updates is compared
with the one without beside it, and which of the two comes first changes from pair to pair.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pair:
    """Tokens per second of two spells of equal length that follow one another."""

    without: float
    with_updates: float


def alternate(spell: Callable[[bool], float], pairs: int) -> list[Pair]:
    """Measure spells in turn: without, with, with, without, without, with, …

    Args:
        spell: measures one spell, given whether updates are to be made in it. Returns tokens per second.
        pairs: how many of each.
    """
    found = []
    for index in range(pairs):
        if index % 2:
            with_updates = spell(True)
            found.append(Pair(spell(False), with_updates))
        else:
            without = spell(False)
            found.append(Pair(without, spell(True)))
    return found


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Means over the spells, their ratio, and each pair's own ratio, whose spread says how far the first can be trusted."""
    without = statistics.fmean(pair.without for pair in pairs)
    with_updates = statistics.fmean(pair.with_updates for pair in pairs)
    return {
        "pairs": len(pairs),
        "tokens_per_s_without_updates": round(without, 1),
        "tokens_per_s": round(with_updates, 1),
        "ratio": round(with_updates / without, 4) if without else None,
        "ratios": [round(pair.with_updates / pair.without, 4) if pair.without else None for pair in pairs],
    }
