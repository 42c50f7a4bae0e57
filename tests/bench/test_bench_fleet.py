"""The benchmark of a fleet without servers: what is put first, and what eight servers cost against
one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bench import fleet


def row(median: float) -> dict[str, Any]:
    spread = {"median": median, "p90": median, "max": median, "n": 3}
    return {
        "idle": {
            "updates": 3,
            "whole_update_ms": spread,
            "halted_ms": spread,
            "largest_gap_per_update_ms": spread,
        }
    }


@given(st.dictionaries(st.sampled_from(["2", "4", "8"]), st.floats(1.0, 1e4)), st.floats(1.0, 1e4))
def test_every_number_of_servers_is_set_against_one(others: dict[str, float], one: float) -> None:
    found = {number: row(median) for number, median in others.items()}
    assert fleet.times_one(found) == {}
    ratios = fleet.times_one({"1": row(one), **found})
    assert ratios["1"] == 1.0
    assert ratios.keys() == {"1", *others}


def test_a_measurement_that_failed_leaves_the_others_in_the_table() -> None:
    servers = {
        "tiny": {
            "trainer": {},
            "direct": {"1": row(10.0), "2": {"idle": {"failed": "x"}}, "8": row(14.0)},
        }
    }
    text = fleet.report(
        {"servers": servers, "clients": {"keep": {"trainer": {}, "direct": row(5.0)}}}
    )
    assert "8 servers" in text
    assert "1.4" in text
    assert "2 servers" not in text
    assert text.splitlines()[0].split("  ")[1:] != []
    assert "longest gap between two tokens" in text.splitlines()[0]


def test_the_command_line_shrinks(tmp_path: Path) -> None:
    args = fleet.parse(["--output", str(tmp_path), "--device", "cpu", "--tiny"])
    assert (args.shape, args.servers, args.concurrency) == ("tiny", [1, 2], [4])
    assert fleet.parse(["--output", str(tmp_path)]).concurrency == [256, 512]
