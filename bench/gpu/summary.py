"""Numbers and tables of the benchmarks. Pure: no I/O, no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Interval = tuple[float, float]
"""Start and end on the monotonic clock, seconds."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed.

    Raises:
        ValueError: the list is empty.
    """
    if not values:
        raise ValueError("a percentile of no values was asked for")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile and maximum in milliseconds, and how many values there were; only `n`
    if there were none.
    """
    if not seconds:
        return {"n": 0}
    return {
        "median": round(statistics.median(seconds) * 1e3, 3),
        "p90": round(percentile(seconds, 0.9) * 1e3, 3),
        "max": round(max(seconds) * 1e3, 3),
        "n": len(seconds),
    }


def spread_by_phase(reports: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """spread_ms for each phase that occurs, in the order of the first report."""
    names = list(dict.fromkeys(name for report in reports for name in report))
    return {
        name: spread_ms([report[name] for report in reports if name in report]) for name in names
    }


def gigabytes_per_second(num_bytes: float, seconds: float) -> float:
    """10**9 bytes per second; 0 if no time passed."""
    return round(num_bytes / seconds / 1e9, 2) if seconds > 0 else 0.0


def gaps_of(streams: Sequence[Sequence[float]]) -> list[Interval]:
    """The time between each two neighbouring arrivals of a stream, over all streams, by start.

    Args:
        streams: for each request, when its tokens arrived; the time between two requests is not a
            gap.
    """
    return sorted((before, after) for arrivals in streams for before, after in pairwise(arrivals))


@dataclass(frozen=True)
class Halts:
    """The mark that updates leave in the stream of tokens.

    Attributes:
        usual: spread of the gaps that touch no update, ms.
        around_updates: spread over the updates of each one's largest gap, ms.
        unseen: updates that no gap touches, so that their halt is unknown.
    """

    usual: dict[str, float]
    around_updates: dict[str, float]
    unseen: int

    def to_json(self) -> dict[str, object]:
        return {
            "usual_gap_ms": self.usual,
            "largest_gap_per_update_ms": self.around_updates,
            "updates_unseen": self.unseen,
        }


def windows_of(updates: Sequence[Interval], after: float) -> list[Interval]:
    """In which an update is seen: from its start to `after` seconds behind its end, half the way to
    the next one at most.
    """
    bounds = sorted(updates)
    ends = [end + after for _, end in bounds]
    for index, ((_, end), (following, _)) in enumerate(pairwise(bounds)):
        ends[index] = min(ends[index], max(end, (end + following) / 2))
    return [(start, limit) for (start, _), limit in zip(bounds, ends, strict=True)]


def find_halts(
    streams: Sequence[Sequence[float]], updates: Sequence[Interval], after: float = 0.5
) -> Halts:
    """Compare the gaps between tokens around updates with all others.

    Args:
        streams: see gaps_of.
        updates: when each update ran.
        after: a gap that begins within so many seconds of an update's end still belongs to it,
            since cached values must be computed again. It is half the way to the next update at
            most.
    """
    windows = windows_of(updates, after)
    largest = [0.0] * len(windows)
    usual = []
    first = 0
    for begin, finish in gaps_of(streams):
        while first < len(windows) and windows[first][1] < begin:
            first += 1
        touched = False
        for index in range(first, len(windows)):
            if windows[index][0] > finish:
                break
            touched = True
            largest[index] = max(largest[index], finish - begin)
        if not touched:
            usual.append(finish - begin)
    seen = [gap for gap in largest if gap > 0]
    return Halts(spread_ms(usual), spread_ms(seen), len(largest) - len(seen))


@dataclass(frozen=True)
class Pair:
    """Tokens per second of two spells of equal length that follow one another."""

    without: float
    with_updates: float


def alternate(spell: Callable[[bool], float], pairs: int) -> list[Pair]:
    """Measure the cost of updates to generation: spells with and without them in turn, under one
    load that is never interrupted.

    The rate of one spell differs from the next by more than an update costs, and drifts. So each
    spell with updates is compared with the one without beside it. Their order changes: without,
    with, with, without, without, with, …

    Args:
        spell: measures one spell, given whether updates are to be made in it. Returns tokens per
            second.
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


def summary_of_pairs(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return means over the spells, their ratio, and each pair's own ratio, whose spread shows how
    far the first can be trusted.
    """
    without = statistics.fmean(pair.without for pair in pairs)
    with_updates = statistics.fmean(pair.with_updates for pair in pairs)
    return {
        "pairs": len(pairs),
        "tokens_per_s_without_updates": round(without, 1),
        "tokens_per_s": round(with_updates, 1),
        "ratio": round(with_updates / without, 4) if without else None,
        "ratios": [
            round(pair.with_updates / pair.without, 4) if pair.without else None for pair in pairs
        ],
    }


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path of keys, separated by `/`; None if there is none."""
    value: Any = row
    for key in path.split("/"):
        value = value.get(key)
        if value is None:
            return None
    return value


def result_table(
    rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str], corner: str = ""
) -> list[str]:
    """Return a table of results as one text; an empty list without rows.

    Args:
        rows: label -> result.
        columns: heading -> path in each result.
        corner: heading of the labels.
    """
    cells = [
        [label, *(value_at(row, path) for path in columns.values())] for label, row in rows.items()
    ]
    if not cells:
        return []
    return [table([corner, *(heading.strip() for heading in columns)], cells)]


def updates_of(sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the results of updates, idle and under load, of each side: `SIDE, CONDITION` -> result."""
    return {
        f"{side}, {condition}": row
        for side, part in sides.items()
        for condition, row in part.items()
        if isinstance(row, Mapping) and "updates" in row
    }


def phases_line(title: str, phases: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return one line with the medians of phases; nothing if there are none."""
    medians = [f"{key} {row['median']:.2f}" for key, row in phases.items() if "median" in row]
    if not medians:
        return []
    return [f"{title}, median ms by phase: {', '.join(medians)}"]


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Plain text: the first column to the left, the others to the right; floats with one decimal,
    or two below 10.

    Raises:
        ValueError: a row has another number of cells than the header.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    for row in cells:
        if len(row) != len(headers):
            raise ValueError(f"a row has {len(row)} cells for {len(headers)} headers: {row}")
    widths = [
        max(len(str(header)), *(len(row[i]) for row in cells), 0)
        for i, header in enumerate(headers)
    ]
    lines = [_line([str(h) for h in headers], widths), "  ".join("-" * width for width in widths)]
    return "\n".join(lines + [_line(row, widths) for row in cells])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, float):
        return str(value)
    if abs(value) < 10:
        return f"{value:.2f}"
    return f"{value:.1f}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(w) if i == 0 else cell.rjust(w)
        for i, (cell, w) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()
