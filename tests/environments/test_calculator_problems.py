"""The calculator, which computes little and refuses the rest, and its problems, whose held-out side
training never touches.
"""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.arithmetic_server import MAX_HELD_OUT, is_held_out
from environments.calculator_server import (
    DEFAULT_LEVELS,
    LEVELS,
    MAX_EXPRESSION,
    Calculation,
    call,
    held_out_calculations,
    training_calculations,
    value_of,
)

PINNED = ["18*530", "209*64-105", "22*709", "41*60+874", "97*26"]

numbers = st.integers(0, 999_999).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", " * ", "*"]), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=6,
).filter(lambda text: len(text) <= MAX_EXPRESSION)


def check(problem: Calculation) -> None:
    first, second, *third = problem.numbers
    value = {"+": first + second, "-": first - second}.get(problem.signs[0], first * second)
    if third:
        value += third[0] if problem.signs[1] == "+" else -third[0]
    assert problem.answer == value >= 0
    assert "{" not in problem.question
    assert list(map(int, re.findall(r"\d+", problem.question))) == list(problem.numbers)


# The calculator


@given(expressions)
@settings(max_examples=100)
def test_it_computes_what_python_computes(text: str) -> None:
    # A number with leading zeros is none in Python.
    assert value_of(text) == eval(re.sub(r"\b0+(?=\d)", "", text))


@given(st.text(alphabet="0123456789+-*() ./^e", max_size=80))
@settings(max_examples=200)
def test_anything_else_is_refused_in_words(text: str) -> None:
    try:
        said = str(value_of(text))
    except ValueError as error:
        said = str(error)
    assert 0 < len(said) <= MAX_EXPRESSION + 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a number is expected, not the end"),
        ("12*", "a number is expected, not the end"),
        ("2**64", r"a number is expected, not \*"),
        ("(1+2", "a bracket is not closed"),
        ("1)", r"'\)' is not expected there"),
        ("12 34", "'34' is not expected there"),
        ("1/2", "'/' is not expected there"),
        ("__import__('os')", "a number is expected, not _"),
        ("٣+١", "a number is expected, not ٣"),
        ("1+" * 32 + "1", "expression of 65 characters: write at most 64"),
        ("(" * 64, "a number is expected, not the end"),
    ],
)
def test_what_is_wrong_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        value_of(text)


def test_a_call_stands_between_marks() -> None:
    assert call("374*52-906") == "<calc>374*52-906</calc>"


# The problems


@given(seed=st.integers(0, 2**32), level=st.sampled_from(LEVELS))
@settings(max_examples=60)
def test_training_problems_are_right_and_never_held_out(seed: int, level: int) -> None:
    for problem in itertools.islice(training_calculations(seed, (level,)), 20):
        assert problem.level == level
        assert not is_held_out(*problem.numbers[:2])
        check(problem)


@pytest.mark.parametrize("levels", [*((level,) for level in LEVELS), DEFAULT_LEVELS])
def test_held_out_problems_are_right_distinct_and_held_out(levels: tuple[int, ...]) -> None:
    problems = held_out_calculations(300, levels)
    assert len({problem.expression for problem in problems}) == 300
    for problem in problems:
        assert is_held_out(*problem.numbers[:2])
        check(problem)
    assert held_out_calculations(40, levels) == problems[:40]
    counts = [sum(problem.level == level for problem in problems) for level in levels]
    assert max(counts) - min(counts) <= 1


def test_the_held_out_list_is_pinned() -> None:
    """Results are only comparable over time if the benchmark never moves."""
    assert [problem.expression for problem in held_out_calculations(5)] == PINNED


def test_the_seed_decides_the_stream() -> None:
    def first(seed: int) -> list[Calculation]:
        return list(itertools.islice(training_calculations(seed), 30))

    assert first(3) == first(3)
    assert first(3) != first(4)


@pytest.mark.parametrize("levels", [(), (0,), (1, 5)])
def test_an_unknown_level_is_refused_by_name(levels: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"levels .*choose one or more of \[1, 2, 3, 4\]"):
        training_calculations(0, levels)
    with pytest.raises(ValueError, match="levels "):
        held_out_calculations(5, levels)


@pytest.mark.parametrize("count", [0, MAX_HELD_OUT + 1])
def test_a_held_out_list_that_cannot_be_made_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"n={count}"):
        held_out_calculations(count)
