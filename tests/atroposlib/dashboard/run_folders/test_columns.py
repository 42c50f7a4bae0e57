"""Figures over steps: no row is lost, no peak is hidden, and a value that is not a number is
unknown.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.dashboard.run_folders import columns
from atroposlib.dashboard.run_folders.columns import MIN_POINTS, Columns

NO_FIGURES = st.one_of(st.none(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
FIGURES = st.one_of(st.floats(), st.integers(), st.booleans(), NO_FIGURES)
TABLE = st.lists(st.dictionaries(st.sampled_from("abc"), FIGURES), max_size=60)


def numbered(table: list[dict[str, Any]], first: int = 1) -> list[dict[str, Any]]:
    return [{"step": step} | row for step, row in enumerate(table, first)]


def as_number(value: Any) -> float:
    fits = isinstance(value, float | bool) or (isinstance(value, int) and abs(value) < 2**1000)
    return float(value) if fits else math.nan


@given(TABLE, st.lists(st.integers(1, 20), max_size=10))
def test_every_row_is_a_point_while_there_is_room(
    table: list[dict[str, Any]], pieces: list[int]
) -> None:
    rows, found, at = numbered(table), Columns(), 0
    for piece in [*pieces, len(rows)]:
        assert not found.extend(rows[at : at + piece])
        at += piece
    series = found.series(["a", "b", "unknown"], points=100)
    assert series.exact
    assert series.step.tolist() == [row["step"] for row in rows]
    assert found.rows == len(rows)
    for name in "ab":
        np.testing.assert_array_equal(series.mean[name], [as_number(row.get(name)) for row in rows])
    assert np.isnan(series.mean["unknown"]).all()


@given(
    st.lists(
        st.one_of(st.none(), st.floats(-1e6, 1e6), st.just(math.inf)),
        min_size=MIN_POINTS + 1,
        max_size=300,
    )
)
def test_fewer_points_keep_every_peak(figures: list[float | None]) -> None:
    found = Columns()
    found.extend(numbered([{"a": figure} for figure in figures]))
    series = found.series(["a"], points=MIN_POINTS)
    known = [figure for figure in figures if figure is not None and math.isfinite(figure)]
    assert len(series.step) == MIN_POINTS
    assert series.step[-1] == len(figures)
    assert not series.exact
    if "a" in found.names and known:
        assert np.nanmax(series.high["a"]) == max(known)
        assert np.nanmin(series.low["a"]) == min(known)
        filled = ~np.isnan(series.mean["a"])
        assert (series.low["a"][filled] <= series.mean["a"][filled]).all()
        assert (series.mean["a"][filled] <= series.high["a"][filled]).all()


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 40))
def test_a_resumed_run_takes_the_place_of_what_it_does_again(
    before: int, again: int, more: int
) -> None:
    found = Columns()
    found.extend(numbered([{"a": 0.0, "old": 1.0}] * before))
    cut = found.extend(numbered([{"a": 1.0}] * more, again))
    assert cut == (again <= before)
    series = found.series(["a", "old"], points=1000)
    kept = list(range(1, min(before, again - 1) + 1))
    assert series.step.tolist() == kept + list(range(again, again + more))
    assert series.mean["a"].tolist() == [0.0] * len(kept) + [1.0] * more
    assert np.isnan(series.mean["old"][len(kept) :]).all()
    assert found.rows == len(series.step)


def test_rows_without_a_step_and_too_many_names_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(columns, "MAX_COLUMNS", 2)
    found = Columns()
    found.extend([{"a": 1.0}, {"step": True, "a": 1.0}, {"step": 2**70, "a": 1.0}])
    found.extend([{"step": 1, "a": 1, "b": 2, "c": 3, "text": "x"}])
    assert (found.rows, found.names, found.last_step) == (1, ["a", "b"], 1)


def test_a_run_of_any_length_stays_within_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_CELLS", 3000)
    found = Columns()
    for begin in range(1, 20_000, 250):
        found.extend(numbered([{"a": float(step)} for step in range(begin, begin + 250)], begin))
    series = found.series(["a"], points=100_000)
    assert len(found) <= 1500
    assert found.rows == 20_000
    assert not series.exact
    assert series.step[-1] == 20_000, "the newest is always there"
    assert series.step[0] < 1000, "and the run is seen from its beginning"
    assert found.last("a") == 20_000


def test_a_part_of_the_steps() -> None:
    found = Columns()
    found.extend(numbered([{"a": float(step)} for step in range(1, 101)]))
    series = found.series(["a"], points=1000, first=40, last=49)
    assert series.step.tolist() == list(range(40, 50))
    assert found.series(["a"], first=500).step.tolist() == []
    assert found.peak("a") == (100.0, 100)
    assert found.peak("b") is None
