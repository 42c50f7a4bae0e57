"""What is computed for a fleet that we do not have: the formula's bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fleet_on_paper import (
    FORMULA,
    Fleet,
    Measured,
    read_measured,
    report,
    to_json,
    update_seconds,
)

MEASURED = Measured(share_of_nccl=0.9, sums=1e12, copies=8e11, begin=0.04, commit=0.01)


@given(st.integers(1, 64), st.integers(1, 8), st.sampled_from([100.0, 400.0]))
def test_more_servers_cost_only_the_filling_of_the_ring(
    servers: int, times: int, gbit: float
) -> None:
    few = update_seconds(Fleet(servers=servers, gbit=gbit), MEASURED)
    many = update_seconds(Fleet(servers=servers * times, gbit=gbit), MEASURED)
    assert many["receive"] == few["receive"]
    assert many["transfer"] - few["transfer"] == pytest.approx(many["fill"] - few["fill"])
    assert many["direct_whole"] >= few["direct_whole"]


@given(st.integers(1, 32), st.integers(1, 8))
def test_a_transfer_is_never_faster_than_the_interface_and_more_senders_never_slower(
    servers: int, times: int
) -> None:
    one, more = (
        update_seconds(Fleet(servers=servers, trainer_gpus=4 * n), MEASURED) for n in (1, times)
    )
    for found in (one, more):
        assert found["transfer"] > found["rank_bytes"] / (400e9 / 8)
        assert found["overlapped_stands_still"] < found["direct_stands_still"]
    assert more["send"] <= one["send"] * 2


def test_lanes_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="30 trainer GPUs are no multiple of TP 4"):
        update_seconds(Fleet(trainer_gpus=30), MEASURED)


def test_what_was_measured_is_of_this_repository_and_stands_in_the_report() -> None:
    measured = read_measured()
    assert 0.5 < measured.share_of_nccl <= 1
    found = update_seconds(Fleet(), measured)
    assert 35e9 < found["rank_bytes"] < 38e9
    text = report(Fleet(), measured, found)
    assert FORMULA in text
    assert "stands still" in text.splitlines()[-4]
    assert to_json(Fleet(), measured, found)["found"] == found
