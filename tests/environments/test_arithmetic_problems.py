"""The generated problems: right answers, honest levels, and a held-out side that training never
touches.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.arithmetic_server import (
    DEFAULT_DIFFICULTY,
    HELD_OUT_ONE_IN,
    MAX_HELD_OUT,
    OPERAND_DIGITS,
    Problem,
    held_out_problems,
    is_held_out,
    training_problems,
)

LEVELS = sorted(OPERAND_DIGITS)
operands = st.integers(min_value=10, max_value=999)


def _check_problem(problem: Problem) -> None:
    expected = (
        problem.left + problem.right if problem.operator == "+" else problem.left - problem.right
    )
    assert problem.answer == expected >= 0
    digits = sorted((len(str(problem.left)), len(str(problem.right))), reverse=True)
    assert tuple(digits) == OPERAND_DIGITS[problem.difficulty]
    # The story states both operands and nothing else that looks like a number, and no placeholder
    # is left unfilled.
    assert sorted(map(int, re.findall(r"\d+", problem.question))) == sorted(
        (problem.left, problem.right)
    )
    assert "{" not in problem.question


@given(seed=st.integers(0, 2**32), level=st.sampled_from(LEVELS))
@settings(max_examples=100)
def test_training_problems_are_right_and_never_held_out(seed: int, level: int) -> None:
    for problem in itertools.islice(training_problems(seed, level), 20):
        assert problem.difficulty == level
        assert not is_held_out(problem.left, problem.right)
        _check_problem(problem)


@pytest.mark.parametrize("level", [*LEVELS, DEFAULT_DIFFICULTY])
def test_held_out_problems_are_right_distinct_and_held_out(level: int | tuple[int, ...]) -> None:
    problems = held_out_problems(MAX_HELD_OUT, level)
    assert len({(p.left, p.operator, p.right) for p in problems}) == MAX_HELD_OUT
    for problem in problems:
        assert is_held_out(problem.left, problem.right)
        _check_problem(problem)


def test_no_held_out_pair_is_seen_in_a_long_training_stream() -> None:
    held_out = {
        frozenset((p.left, p.right))
        for level in LEVELS
        for p in held_out_problems(MAX_HELD_OUT, level)
    }
    trained = {frozenset((p.left, p.right)) for p in itertools.islice(training_problems(0), 50_000)}
    assert not held_out & trained


@given(left=operands, right=operands)
def test_the_side_of_a_pair_does_not_depend_on_its_order(left: int, right: int) -> None:
    assert is_held_out(left, right) == is_held_out(right, left)


def test_about_one_pair_in_ten_is_held_out() -> None:
    pairs = list(itertools.combinations(range(10, 400), 2))
    share = sum(itertools.starmap(is_held_out, pairs)) / len(pairs)
    assert share == pytest.approx(1 / HELD_OUT_ONE_IN, abs=0.01)


@given(
    n=st.integers(1, 60),
    more=st.integers(0, 60),
    level=st.sampled_from([*LEVELS, DEFAULT_DIFFICULTY]),
)
@settings(max_examples=30)
def test_a_shorter_held_out_list_is_a_prefix_of_a_longer_one(
    n: int, more: int, level: int | tuple[int, ...]
) -> None:
    assert held_out_problems(n, level) == held_out_problems(n + more, level)[:n]


def test_levels_share_the_held_out_list_equally() -> None:
    counts = [
        sum(p.difficulty == level for p in held_out_problems(240)) for level in DEFAULT_DIFFICULTY
    ]
    assert counts == [240 // len(DEFAULT_DIFFICULTY)] * len(DEFAULT_DIFFICULTY)


def test_same_seed_same_stream_other_seed_other_stream() -> None:
    def first(seed: int) -> list[Problem]:
        return list(itertools.islice(training_problems(seed), 50))

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_the_held_out_list_is_pinned() -> None:
    """Results are only comparable over time if the benchmark never moves, not even with Python's
    hash randomisation.
    """
    code = "from environments.arithmetic_server import held_out_problems as h; print([p.question for p in h(50)])"
    other_process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[2],
        env={"PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    assert other_process.stdout.strip() == str([p.question for p in held_out_problems(50)])


@pytest.mark.parametrize("bad", [0, 4, (), (1, 9)])
def test_an_unknown_level_is_refused_by_name(bad: int | tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"levels .*choose one or more of \[1, 2, 3\]"):
        training_problems(0, bad)
    with pytest.raises(ValueError, match="levels "):
        held_out_problems(5, bad)


@pytest.mark.parametrize("bad", [0, -1, MAX_HELD_OUT + 1])
def test_a_held_out_list_that_cannot_be_made_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=f"n={bad}"):
        held_out_problems(bad)
