"""The arithmetic behind the benchmarks' tables."""

from __future__ import annotations

import pytest

from bench.gpu.shapes import SHAPES, model_bytes, shard_shapes
from bench.gpu.summary import (
    find_halts,
    gaps_of,
    gigabytes_per_second,
    percentile,
    spread_by_phase,
    spread_ms,
    table,
)


def test_percentile_is_a_value_that_was_seen() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.0, 0.2, 0.5, 0.9, 1.0)] == [
        1.0,
        1.0,
        3.0,
        5.0,
        5.0,
    ]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_spread_is_in_milliseconds() -> None:
    assert spread_ms([0.001, 0.003, 0.002]) == {"median": 2.0, "p90": 3.0, "max": 3.0, "n": 3}
    assert spread_ms([]) == {"n": 0}
    assert list(spread_by_phase([{"pause": 0.1, "commit": 0.2}, {"pause": 0.3}])) == [
        "pause",
        "commit",
    ]


def test_speed_counts_in_powers_of_ten() -> None:
    assert gigabytes_per_second(3.44e9, 0.010) == 344.0
    assert gigabytes_per_second(1, 0) == 0.0


def test_no_gap_between_two_requests() -> None:
    assert gaps_of([[1.0, 1.1], [5.0, 5.2]]) == [(1.0, 1.1), (5.0, 5.2)]


def test_an_update_is_found_in_the_stream_of_tokens() -> None:
    steady = [i * 0.01 for i in range(100)]
    halted = [t if t < 0.5 else t + 0.2 for t in steady]  # nothing arrives between 0.49 and 0.70
    halts = find_halts([steady, halted], [(0.5, 0.65)], after=0.0)
    assert halts.around_updates["max"] == pytest.approx(210, abs=0.1)
    assert halts.usual["max"] == pytest.approx(10, abs=0.1)
    assert halts.unseen == 0


def test_a_gap_after_an_update_belongs_to_it_but_not_to_two_updates() -> None:
    arrivals = [
        0.0,
        0.1,
        0.2,
        0.3,
        0.9,
        1.0,
        1.1,
    ]  # what was cached is computed again between 0.3 and 0.9
    assert find_halts([arrivals], [(0.1, 0.25)], after=0.2).around_updates["max"] == pytest.approx(
        600
    )
    far = find_halts([arrivals], [(0.1, 0.25), (1.05, 1.1)], after=0.0)
    assert (far.around_updates["n"], far.around_updates["max"]) == (2, pytest.approx(100))


def test_updates_that_nobody_saw_are_counted() -> None:
    halts = find_halts([[0.0, 0.1]], [(5.0, 5.1), (0.05, 0.06)], after=0.0)
    assert (halts.unseen, halts.around_updates["n"]) == (1, 1)


def test_table_lines_up_and_refuses_short_rows() -> None:
    text = table(["what", "ms"], [["direct", 1.25], ["overlapped", None], ["equal", True]])
    assert text.splitlines()[2:] == ["direct      1.25", "overlapped     -", "equal        yes"]
    with pytest.raises(ValueError, match="1 cells for 2 headers"):
        table(["a", "b"], [["x"]])


def test_shapes_are_the_published_ones() -> None:
    assert len(shard_shapes("qwen2.5-14b", 0, 2)) == 339
    assert model_bytes("qwen3-1.7b") == pytest.approx(3.44e9, rel=0.002)
    assert model_bytes("qwen2.5-14b") == pytest.approx(29.54e9, rel=0.001)
    halves = [
        sum(a * b[0] if b else a for a, *b in shard_shapes("qwen2.5-14b", rank, 2))
        for rank in (0, 1)
    ]
    assert halves[0] == halves[1]
    assert SHAPES["tiny"]["torch_dtype"] == "float32"
