"""Figures of a step: closed forms, and that neither bins nor ranks change them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from example_trainer.algorithm.objective import BinOutcome, StepFigures

CPU = torch.device("cpu")
UNKNOWN = float("nan")


def outcome(logprobs: list[float], rollout: list[float], **changes: Any) -> BinOutcome:
    """Figures of a bin without any fault, by default of one sequence."""
    count = len(logprobs)
    none, zero = torch.zeros(count, dtype=torch.bool), torch.zeros(())
    made = BinOutcome(
        logprobs=torch.tensor(logprobs),
        rollout_logprobs=torch.tensor(rollout),
        versions=torch.full((count,), 7),
        entropy=torch.ones(count),
        weights=torch.ones(count),
        masked=none,
        bounded=none,
        clipped_low=none,
        clipped_high=none,
        sequence=torch.zeros(count, dtype=torch.int64),
        sequences=min(count, 1),
        loss=zero,
        reference_kl=zero,
        teacher_kl=zero,
        proximal_logprobs=torch.tensor(logprobs),
    )
    return replace(made, **changes)


def row(*outcomes: BinOutcome, version: int = 7) -> dict[str, float | None]:
    figures = StepFigures(CPU, version)
    figures.expect(sum(len(one.logprobs) for one in outcomes))
    for one in outcomes:
        figures.add(one)
    return figures.row(lambda vector: vector)


def k3(log_ratio: float) -> float:
    return math.expm1(log_ratio) - log_ratio


def test_closed_forms() -> None:
    logs = [math.log(2), math.log(0.5), 0.0]
    found = row(
        outcome(
            [-1 + logs[0], -2 + logs[1], -3.0, -4.0],
            [-1.0, -2.0, -3.0, UNKNOWN],
            versions=torch.tensor([7, 6, 7, -1]),
            entropy=torch.tensor([1.0, 2.0, 3.0, 6.0]),
            weights=torch.tensor([1.5, 0.5, 1.0, 1.0]),
            masked=torch.tensor([False, True, False, False]),
            bounded=torch.tensor([True, False, False, False]),
            clipped_low=torch.tensor([False, True, False, False]),
            clipped_high=torch.tensor([True, False, True, False]),
            sequence=torch.tensor([0, 1, 2, 2]),
            sequences=3,
            loss=torch.tensor(0.25),
            reference_kl=torch.tensor(2.0),
            teacher_kl=torch.tensor(1.5),
            teacher_tokens=torch.tensor(3),
        ),
        outcome([], []),
    )
    expected = {
        "loss": 0.25, "kl": (k3(logs[0]) + k3(logs[1])) / 3, "reference_kl": 0.5, "teacher_kl": 0.5, "entropy": 3.0,
        "clip_fraction": 0.75, "clip_fraction_low": 0.25, "clip_fraction_high": 0.5, "missing_rollout_logprobs": 0.25,
        "drift_share": 0.75, "ratio_mean": 3.5 / 3, "ess": 3.5**2 / (3 * 5.25),
        "correction_weight": 3.5 / 4, "correction_ess": 3.5**2 / (4 * (1.5**2 + 2)), "correction_masked": 0.25,
        "correction_masked_sequences": 1 / 3, "correction_bounded": 0.25,
        "kl_age_0": k3(logs[0]) / 2, "mismatch_kl": k3(logs[0]) / 2, "kl_age_1": k3(logs[1]),
        "perplexity_rollout": math.exp(2), "perplexity_trainer": math.exp(2),
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    # The nearest ranks of 0.5, 1 and 2, to half a percent of their logarithm.
    nearest = {
        "ratio_p01": 0.5,
        "ratio_p50": 1.0,
        "ratio_p95": 2.0,
        "ratio_p99": 2.0,
        "ratio_max": 2.0,
    }
    assert {name: found[name] for name in nearest} == pytest.approx(nearest, rel=0.005)
    rest = {name: value for name, value in found.items() if name not in {*expected, *nearest}}
    assert set(rest.values()) == {None}
    assert len(rest) == 9, "the other classes of age"


def test_ages_have_classes_with_an_open_end_and_one_for_what_is_unknown() -> None:
    ages = [0, 1, 2, 7, 8, 15, 16, 400]
    logs = [0.1 * (i + 1) for i in range(9)]
    versions = torch.tensor([*(500 - age for age in ages), -1])
    found = row(outcome([x - 1 for x in logs], [-1.0] * 9, versions=versions), version=500)
    expected = {f"kl_age_{age}": k3(x) for age, x in zip(ages[:4], logs[:4], strict=True)}
    expected["kl_age_8_to_15"] = (k3(logs[4]) + k3(logs[5])) / 2
    expected["kl_age_16_up"] = (k3(logs[6]) + k3(logs[7])) / 2
    expected["kl_age_unknown"] = k3(logs[8])
    by_age = {
        name: value
        for name, value in found.items()
        if name.startswith("kl_age_") and value is not None
    }
    assert by_age == pytest.approx(expected, rel=1e-5)


@given(
    st.lists(st.lists(st.floats(-9, 0, width=32), max_size=9), min_size=1, max_size=5),
    st.integers(0, 2**31),
)
def test_what_the_sampler_computed_to_the_bit_has_its_perplexity_and_no_mismatch(
    bins: list[list[float]], seed: int
) -> None:
    """In any number of bins, and however they are spread over three ranks that add up in different
    orders.
    """
    generator = np.random.default_rng(seed)
    shares = [StepFigures(CPU, 7) for _ in range(3)]
    for one in bins:
        unknown = generator.random(len(one)) < 0.2
        rollout = [UNKNOWN if out else logprob for logprob, out in zip(one, unknown, strict=True)]
        shares[generator.integers(3)].add(outcome(one, rollout))
    vectors: list[Tensor] = []
    for share in shares[:2]:
        share.row(lambda vector: vectors.append(vector.clone()) or vector)  # type: ignore[func-returns-value]
    found = shares[2].row(lambda vector: vectors[0] + (vectors[1] + vector))
    assert found["perplexity_trainer"] == found["perplexity_rollout"]
    if found["missing_rollout_logprobs"] not in (None, 1.0):
        assert {
            found[name] for name in ("ratio_p01", "ratio_p50", "ratio_max", "ratio_mean", "ess")
        } == {1.0}
        assert (found["kl"], found["mismatch_kl"]) == (0.0, 0.0)


def cut(whole: BinOutcome, begin: int, end: int) -> BinOutcome:
    """The part of a bin whose sequences are one token each; sums go with the first part."""
    fields = {
        name: value[begin:end]
        for name, value in vars(whole).items()
        if isinstance(value, Tensor) and value.ndim
    }
    count = len(fields["logprobs"])
    first = (
        {}
        if begin == 0
        else {name: torch.zeros(()) for name in ("loss", "reference_kl", "teacher_kl")}
    )
    return replace(whole, **fields | first | {"sequence": torch.arange(count), "sequences": count})


@given(st.integers(1, 60), st.integers(0, 2**31), st.lists(st.integers(0, 60), max_size=4))
def test_bins_and_ranks_change_nothing(count: int, seed: int, cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(count, generator=generator) * 5
    drift = (
        torch.randn(count, generator=generator)
        * torch.tensor([1e-6, 1e-3, 0.1, 3.0])[torch.arange(count) % 4]
    )
    flags = torch.rand(4, count, generator=generator) < 0.3
    whole = outcome(
        logprobs.tolist(),
        torch.where(
            torch.rand(count, generator=generator) < 0.1, UNKNOWN, logprobs - drift
        ).tolist(),
        versions=torch.randint(-1, 8, (count,), generator=generator),
        weights=torch.rand(count, generator=generator) * 2,
        masked=flags[0],
        bounded=flags[1],
        clipped_low=flags[2],
        clipped_high=flags[3] & ~flags[2],
        sequence=torch.arange(count),
        sequences=count,
        loss=torch.tensor(0.5),
        reference_kl=torch.tensor(0.25),
    )
    expected = row(whole)
    edges = sorted({0, count, *(edge for edge in cuts if edge < count)})
    parts = [cut(whole, begin, end) for begin, end in pairwise(edges)]
    other, mine = StepFigures(CPU, 7), StepFigures(CPU, 7)
    for number, part in enumerate(parts):
        side = other if number % 2 else mine
        side.expect(len(part.logprobs))
        side.add(part)
    theirs: list[Tensor] = []
    other.row(lambda vector: theirs.append(vector.clone()) or vector)  # type: ignore[func-returns-value]
    found = mine.row(lambda vector: vector + theirs[0])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (
            None if value is None else pytest.approx(value, rel=1e-9, abs=1e-15)
        ), name


@given(st.lists(st.floats(-25, 25, width=32), min_size=1, max_size=200))
def test_percentiles_are_off_by_less_than_half_a_percent_of_their_logarithm(
    log_ratios: list[float],
) -> None:
    found = row(outcome(log_ratios, [0.0] * len(log_ratios)))
    ordered = sorted(min(max(x, -20.0), 20.0) for x in log_ratios)
    for name, percent in (
        ("ratio_p01", 1),
        ("ratio_p50", 50),
        ("ratio_p95", 95),
        ("ratio_p99", 99),
        ("ratio_max", 100),
    ):
        true = ordered[-(-percent * len(ordered) // 100) - 1]
        value = found[name]
        assert value is not None
        assert abs(math.log(value) - true) <= 0.005 * abs(true) + 5.1e-7


def test_drift_is_measured_from_the_weights_that_the_batch_began_with() -> None:
    """In later updates of a batch, `kl` shows how far the policy has gone. Every other figure shows
    the disagreement of sampler and trainer before that.
    """
    first = outcome([-1.0, -2.0], [-1.1, -2.0])
    later = replace(first, logprobs=torch.tensor([-0.5, -2.5]))
    blind = replace(first, logprobs=torch.tensor([-0.5, -2.5]), proximal_logprobs=None)
    alone, both, unmeasured = row(first), row(first, later), row(first, blind)
    moved = [name for name in alone if alone[name] != both[name]]
    assert moved == ["kl"]
    assert both | {"drift_share": 0.5} == unmeasured
    assert both["kl"] == pytest.approx((k3(0.1) + k3(0.6) + k3(-0.5)) / 4, rel=1e-5)


def test_nothing_known_is_none_and_nothing_finite_is_no_crash() -> None:
    found = row(outcome([-1.0, -2.0], [UNKNOWN, UNKNOWN]))
    unknown = (
        "kl",
        "ratio_mean",
        "ratio_max",
        "ratio_p99",
        "ess",
        "mismatch_kl",
        "perplexity_rollout",
        "teacher_kl",
    )
    assert [found[name] for name in unknown] == [None] * len(unknown)
    assert (found["missing_rollout_logprobs"], found["entropy"], found["correction_weight"]) == (
        1.0,
        1.0,
        1.0,
    )
    assert row()["entropy"] is None
    broken = row(outcome([UNKNOWN, math.inf, -math.inf], [-1.0, -1.0, -1.0]))
    assert math.isnan(broken["kl"] or 0)
    assert row(outcome([-800.0], [-900.0]))["perplexity_trainer"] is None, "larger than any float"
