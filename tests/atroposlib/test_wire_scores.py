"""Scores that are equal up to rounding."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.wire import SCORE_TOLERANCE, plain_score, scores_equal

parts = st.lists(st.integers(0, 100).map(lambda n: n / 100), min_size=1, max_size=6)


@given(rewards=parts, order=st.randoms(), scale=st.sampled_from([1.0, 10.0, 1e6]))
def test_the_same_rewards_summed_in_another_order_or_precision_are_equal(
    rewards: list[float], order: object, scale: float
) -> None:
    scaled = [scale * reward for reward in rewards]
    single = float(np.sum(np.array(scaled[::-1], dtype=np.float32), dtype=np.float32))
    assert scores_equal([math.fsum(scaled), sum(scaled), single])


@given(
    score=st.floats(-1e6, 1e6),
    share=st.floats(2 * SCORE_TOLERANCE, 1),
    others=st.lists(st.just(0.0), max_size=3),
)
def test_scores_that_differ_by_more_are_different(
    score: float, share: float, others: list[float]
) -> None:
    other = score + share * max(1.0, abs(score))
    assert not scores_equal([score, other])
    assert not scores_equal([other, score, *([score] * len(others))])


@pytest.mark.parametrize("scores", [[], [3.0], [0.0, -0.0], [1e30, 1e30 * (1 + 1e-9)], [True, 1]])
def test_equal_ones(scores: list[float]) -> None:
    assert scores_equal(scores)


def test_scores_that_are_not_finite_equal_only_themselves() -> None:
    assert scores_equal([math.inf, math.inf])
    assert not scores_equal([math.inf, 1.0])
    assert not scores_equal([math.nan, 1.0])


@pytest.mark.parametrize(
    "score",
    [np.longdouble(1), np.float16(1), np.array([[1]]), Fraction(1), Decimal(1), np.bool_(True)],
)
def test_a_score_of_any_number_type_is_read(score: Any) -> None:
    assert plain_score(score) == 1.0
    assert type(plain_score(score)) is float


@pytest.mark.parametrize("score", [Decimal("sNaN"), Fraction(10**400)])
def test_a_score_that_no_float_holds_is_not_a_number(score: Any) -> None:
    assert math.isnan(plain_score(score))
