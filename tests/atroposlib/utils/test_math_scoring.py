"""Comparing answers: numbers as people write them, and LaTeX through math_verify in a child process."""

import asyncio
import os
import time
from collections.abc import Iterator
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.utils import math_scoring
from atroposlib.utils.math_scoring import MathScorer, as_number


@given(value=st.integers(-(10**12), 10**12))
def test_numbers_are_read_as_people_write_them(value: int) -> None:
    for text in (f"{value}", f"{value:,}", f" ${value:,} ", rf"\${value}", f"{value}.", f"{value}.00", f"{value}%"):
        assert as_number(text) == value, text


@pytest.mark.parametrize("text", ["", "x", "1 + 1", "nan", "inf", "1e", "12 apples", r"\frac{1}{2}"])
def test_other_text_is_no_plain_number(text: str) -> None:
    assert as_number(text) is None


def test_decimals_keep_their_value() -> None:
    assert as_number("0.5") == Decimal("0.50")


@pytest.fixture(scope="module")
def scorer() -> Iterator[MathScorer]:
    made = MathScorer()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("72", "72", True),
        ("72", "72.0", True),
        ("1200", "1,200", True),
        ("72", "73", False),
        ("0.5", r"\frac{1}{2}", True),
        ("18", r"18\text{ dollars}", True),
        ("2", r"\sqrt{4}", True),
        ("2", r"\frac{", False),
        ("2", "two hundred }{ nonsense", False),
        ("5", "", False),
    ],
)
async def test_answers_are_compared_by_value(scorer: MathScorer, gold: str, answer: str, equal: bool) -> None:
    assert await scorer.equal(gold, answer) is equal


async def test_many_at_once_and_off_the_main_thread(scorer: MathScorer) -> None:
    answers = await asyncio.gather(*(scorer.equal("3", rf"\frac{{{n}}}{{2}}") for n in range(4, 9)))
    assert answers == [False, False, True, False, False]
    # math_verify's alarm only works in a main thread; from this thread it would raise.
    assert await asyncio.to_thread(lambda: asyncio.run(MathScorer().equal("4", r"2^2")))


async def test_a_comparison_that_hangs_is_cut_off_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scorer = MathScorer()
    monkeypatch.setattr(math_scoring, "KILL_AFTER_SECONDS", 2.0)
    monkeypatch.setattr(math_scoring, "equal_in_this_process", sleeps)
    # Right answers that wait behind it are not cut off with it.
    answers = await asyncio.gather(scorer.equal("2", "x"), *(scorer.equal("2", f"quick {n}") for n in range(3)))
    assert answers == [False, True, True, True]
    assert caplog.text.count("counted as not equal") == 1
    monkeypatch.undo()
    assert await scorer.equal("2", r"\frac{4}{2}") is True
    scorer.close()


async def test_a_child_that_dies_is_replaced_and_dying_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = MathScorer()
    monkeypatch.setattr(math_scoring, "equal_in_this_process", dies)
    with pytest.raises(RuntimeError, match="died twice"):
        await scorer.equal("2", "x")
    monkeypatch.undo()
    assert await scorer.equal("2", r"\frac{4}{2}") is True
    scorer.close()


def sleeps(gold: str, answer: str) -> bool:
    if not answer.startswith("quick"):
        time.sleep(60)
    return True


def dies(gold: str, answer: str) -> bool:
    os._exit(3)
