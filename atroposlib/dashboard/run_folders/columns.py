"""Figures over steps, a column for each name, thinned out to the points that a chart can show.

Many rows become one point with their mean, their lowest and their highest figure, so that no peak
is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_COLUMNS = 1000
"""Names that are kept; a row has about 130."""
MAX_CELLS = 24_000_000
"""Figures that are kept of a run, 8 bytes each. Beyond, every second row is let go of, and the rest
stands for it."""
MIN_POINTS, MAX_POINTS = 10, 100_000

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Series:
    """Points of some columns, ready to be drawn.

    Attributes:
        step: [points] int64, the last step of each point.
        exact: every point is one row, and no row is missing; then `low` and `high` are `mean`.
        mean, low, high: by name, [points] float64 each, NaN where no figure is known.
    """

    step: Integers
    exact: bool
    mean: dict[str, Floats]
    low: dict[str, Floats]
    high: dict[str, Floats]


class Columns:
    """The numbers of rows `{"step": n, name: figure, …}`. Steps ascend: a row of a step that has
    passed, as a resumed run writes, takes the place of those from there on."""

    def __init__(self) -> None:
        self.rows = 0
        """Rows that were taken in, without those whose place others have taken."""
        self.thinned = False
        """Rows were let go of, for want of room."""
        self._kept = 0
        self._step: Integers = np.empty(0, np.int64)
        self._columns: dict[str, Floats] = {}

    def __len__(self) -> int:
        return self._kept

    @property
    def cells(self) -> int:
        """Figures that there is room for; 8 bytes each."""
        return len(self._step) * (len(self._columns) + 1)

    @property
    def names(self) -> list[str]:
        """Columns, in the order in which they appeared."""
        return list(self._columns)

    @property
    def last_step(self) -> int | None:
        """Step of the last row; None before the first."""
        return int(self._step[self._kept - 1]) if self._kept else None

    def clear(self) -> None:
        """Begin with another file."""
        self.__init__()  # type: ignore[misc]

    def extend(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Take in rows, in the order of the file. Rows without a step are passed over.

        Returns:
            whether rows that were there before are gone now.
        """
        kept: list[Mapping[str, Any]] = []
        steps: list[int] = []
        cut = False
        for row in rows:
            step = row.get("step")
            if type(step) is not int or not -(2**62) < step < 2**62:
                continue
            while steps and steps[-1] >= step:
                steps.pop()
                kept.pop()
            if not steps and self._kept and step <= self._step[self._kept - 1]:
                self._cut(step)
                cut = True
            steps.append(step)
            kept.append(row)
        if not kept:
            return cut
        self._grow(self._kept + len(kept))
        begin, end = self._kept, self._kept + len(kept)
        self._step[begin:end] = steps
        # A set would give the names another order at each start.
        names = dict.fromkeys(name for row in kept for name in row if name != "step")
        for name in names:
            values = _numbers([row.get(name) for row in kept])
            if values is None or not self._has_column(name):
                continue
            self._columns[name][begin:end] = values
        self._kept, self.rows = end, self.rows + len(kept)
        if self._kept * (len(self._columns) + 1) > MAX_CELLS:
            self._thin()
        return cut

    def _has_column(self, name: str) -> bool:
        """Add a column that is new, unless there are too many."""
        if name not in self._columns and len(self._columns) < MAX_COLUMNS:
            self._columns[name] = np.full(len(self._step), math.nan)
        return name in self._columns

    def _grow(self, rows: int) -> None:
        if rows <= len(self._step):
            return
        room = max(rows, 2 * len(self._step), 256)
        self._step = np.concatenate(
            [self._step[: self._kept], np.zeros(room - self._kept, np.int64)]
        )
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate(
                [column[: self._kept], np.full(room - self._kept, math.nan)]
            )

    def _cut(self, step: int) -> None:
        """Remove the rows from a step on."""
        at = int(np.searchsorted(self._step[: self._kept], step))
        self.rows -= self._kept - at
        for column in self._columns.values():
            column[at : self._kept] = math.nan
        self._kept = at

    def _thin(self) -> None:
        # The last row stays, because the page shows it as the newest.
        keep = slice((self._kept - 1) % 2, self._kept, 2)
        self._step = self._step[keep].copy()
        self._columns = {name: column[keep].copy() for name, column in self._columns.items()}
        self._kept, self.thinned = len(self._step), True

    def last(self, name: str) -> float | None:
        """Return the last known figure of a column; None without one."""
        rows = self._rows_of(name)
        return float(self._columns[name][rows[-1]]) if len(rows) else None

    def _rows_of(self, name: str) -> Integers:
        """Return the rows that have a figure in a column."""
        column = self._columns.get(name, np.empty(0))
        return np.flatnonzero(np.isfinite(column[: self._kept]))

    def totals(self, names: Sequence[str]) -> list[float] | None:
        """Return the sums of columns, over the rows that have a figure in each of them. None if
        there is no such row, or if rows were removed.
        """
        columns = [
            column[: self._kept]
            for name in names
            if (column := self._columns.get(name)) is not None
        ]
        if self.thinned or len(columns) < len(names):
            return None
        finite = np.logical_and.reduce([np.isfinite(column) for column in columns])
        if not finite.any():
            return None
        return [float(column[finite].sum()) for column in columns]

    def peak(self, name: str) -> tuple[float, int] | None:
        """Return the greatest figure of a column, and its first step; None without a figure."""
        rows = self._rows_of(name)
        if not len(rows):
            return None
        column = self._columns[name]
        at = rows[np.argmax(column[rows])]
        return float(column[at]), int(self._step[at])

    def beside(self, other: Columns, names: Sequence[str]) -> dict[str, Floats]:
        """Return columns of other rows at the steps of these, [rows] float64 each, NaN for a step
        that the other rows lack.
        """
        steps, theirs = self._step[: self._kept], other._step[: other._kept]
        if not len(steps) or not len(theirs):
            return {}
        places = np.minimum(np.searchsorted(theirs, steps), len(theirs) - 1)
        same = theirs[places] == steps
        return {
            name: np.where(same, column[places], math.nan)
            for name, column in other._columns.items()
            if name in names
        }

    def series(
        self,
        names: Sequence[str],
        points: int = 2000,
        first: float = -math.inf,
        last: float = math.inf,
        more: Mapping[str, Floats] = MappingProxyType({}),
    ) -> Series:
        """Return points of columns, for a chart.

        Args:
            names: unknown ones have no figures.
            points: most of them.
            first, last: steps to begin and to end with.
            more: further columns, as `beside` gives them.
        """
        points = min(max(points, MIN_POINTS), MAX_POINTS)
        steps = self._step[: self._kept]
        begin = int(np.searchsorted(steps, first))
        end = int(np.searchsorted(steps, last, side="right"))
        steps = steps[begin:end]
        columns = self._columns | dict(more)
        nothing = np.full(self._kept, math.nan)
        shown = {name: columns.get(name, nothing)[begin:end] for name in names}
        if len(steps) <= points:
            shown = {name: column.copy() for name, column in shown.items()}
            return Series(steps.copy(), not self.thinned, shown, shown, shown)
        edges = np.linspace(0, len(steps), points + 1).astype(np.int64)
        starts, ends = edges[:-1], edges[1:] - 1
        buckets = {name: _buckets(column, starts) for name, column in shown.items()}
        means, lows, highs = (
            {name: bucket[place] for name, bucket in buckets.items()} for place in range(3)
        )
        return Series(steps[ends].copy(), False, means, lows, highs)


_FIGURES = frozenset({float, int, bool, type(None)})


def _numbers(values: list[Any]) -> Floats | None:
    """Return a column's figures, NaN for another value; None if it has no figure at all."""
    kinds = set(map(type, values))
    if kinds <= _FIGURES:
        if kinds == {type(None)}:
            return None
        try:
            return np.array(values, np.float64)  # None becomes NaN
        except OverflowError:  # a whole number beyond all of float64
            pass
    numbers = [_number(value) for value in values]
    if all(number is None for number in numbers):
        return None
    return np.array(numbers, np.float64)


def _number(value: Any) -> float | None:
    """Return a figure; None for another value. True and False are 1 and 0."""
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000):
        return float(value)
    return None


def _buckets(column: Floats, starts: Integers) -> tuple[Floats, Floats, Floats]:
    """Return mean, lowest and highest figure of runs of a column, NaN if a run has none.

    Infinities count as unknown.
    """
    finite = np.isfinite(column)
    count = np.add.reduceat(finite, starts, dtype=np.int64)
    lowest = np.minimum.reduceat(np.where(finite, column, math.inf), starts)
    highest = np.maximum.reduceat(np.where(finite, column, -math.inf), starts)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(finite, column, 0.0), starts) / count
    unknown = count == 0
    lowest[unknown] = highest[unknown] = math.nan
    # A sum of very large figures may overflow, and rounding may take a mean out of its bounds.
    mean = np.clip(np.nan_to_num(mean, posinf=math.inf, neginf=-math.inf), lowest, highest)
    return np.where(unknown, math.nan, mean), lowest, highest
