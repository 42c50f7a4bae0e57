"""Throughput with and without updates: spells in turn, and what a drift does to their ratio."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.summary import Pair, alternate, summary_of_pairs


class Machine:
    """Generates at a rate that changes from spell to spell, and loses a share of it to updates."""

    def __init__(self, rate: float, drift: float, lost: float) -> None:
        self.rate, self.drift, self.lost = rate, drift, lost
        self.spells: list[bool] = []

    def spell(self, updates: bool) -> float:
        self.spells.append(updates)
        rate = self.rate + self.drift * (len(self.spells) - 1)
        return rate * (1 - self.lost) if updates else rate


def test_which_of_a_pair_comes_first_changes() -> None:
    machine = Machine(100.0, 0.0, 0.0)
    alternate(machine.spell, 3)
    assert machine.spells == [False, True, True, False, False, True]


@given(
    rate=st.floats(1e3, 1e5),
    drift=st.floats(-0.02, 0.02),
    lost=st.floats(0.0, 0.9),
    half=st.integers(1, 5),
)
def test_a_steady_drift_does_not_change_the_ratio(
    rate: float, drift: float, lost: float, half: int
) -> None:
    found = summary_of_pairs(alternate(Machine(rate, drift * rate, lost).spell, 2 * half))
    assert found["ratio"] == pytest.approx(1 - lost, abs=2e-4)
    assert found["pairs"] == 2 * half == len(found["ratios"])


def test_means_and_ratios() -> None:
    found = summary_of_pairs([Pair(200.0, 100.0), Pair(100.0, 110.0)])
    assert found == {
        "pairs": 2, "tokens_per_s_without_updates": 150.0, "tokens_per_s": 105.0, "ratio": 0.7, "ratios": [0.5, 1.1]
    }  # fmt: skip


def test_a_machine_that_generates_nothing_has_no_ratio() -> None:
    assert summary_of_pairs([Pair(0.0, 0.0)])["ratio"] is None
