"""Comparing answers: numbers as people write them, and LaTeX through math_verify in a child
process.
"""

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.errors import EnvironmentFailure
from atroposlib.utils import math_scoring
from atroposlib.utils.math_scoring import MathScorer, as_number, compare_plainly


@given(value=st.integers(-(10**12), 10**12))
def test_numbers_are_read_as_people_write_them(value: int) -> None:
    latex = f"{value:,}".replace(",", r",\!")
    for text in (
        f"{value}",
        f"{value:,}",
        f" ${value:,} ",
        rf"\${value}",
        f"${value}$",
        f"{value}.",
        f"{value}.00",
        latex,
    ):
        assert as_number(text) == value, text


@given(
    parts=st.lists(st.integers(0, 10**6).map(str), min_size=2, max_size=4),
    sign=st.sampled_from(["", "-"]),
)
def test_commas_outside_the_places_of_thousands_make_no_number(parts: list[str], sign: str) -> None:
    in_place = (
        1 <= len(parts[0]) <= 3 and parts[0][0] != "0" and all(len(part) == 3 for part in parts[1:])
    )
    number = as_number(sign + ",".join(parts))
    assert (number is not None) == in_place
    if number is not None:
        assert number == int(sign + "".join(parts))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1 + 1",
        "nan",
        "inf",
        "1e",
        "12 apples",
        "1 2",
        r"\frac{1}{2}",
        "5%",
        "1_000",
        "1,2",
        "0,123",
        "1,0000",
        ",5",
        "+-5",
        "1e9999999",
        "9" * 2000,
        "\ud800",
        "١٢",
        "1$2",
    ],
)
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
        ("", "", False),
        ("50", r"50\%", True),
        ("1000", "1{,}000", True),
        ("100000", "1e5", True),
        ("12", "１２", True),
        ("-5", "−5", True),
        ("1,2", "12", False),
        ("1,2", "2,1", True),
        ("1, 2", "1,2", True),
        ("(1,2)", "(2,1)", False),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("100,200", "100, 200", True),  # the same text, whichever reading is meant
        ("5", r"1e9999999", False),
        ("5", r"\ud800", False),
        ("5", "\ud800", False),
        ("5", "{" * 5000, False),
        ("x", "x" * 1_000_000, False),
        ("x" * 5000, "x" * 5000, True),
        ("5", r"\text{" * 300, False),
        ("3m", "3", False),  # math_verify takes these letters for units
        ("x^2+3t", "x^2+3", False),
        ("2", "3 1/2", False),
        ("3.5", "3 1/2", True),
        ("5", r"5\text{ or }6\text{ apples}", False),
        ("12", r"12\text{ hours and }30\text{ minutes}", False),
        ("3,4", r"3\text{ cm}, 4\text{ cm}", True),
        (r"1.6\times 10^{-19}", r"1.7\times10^{-19}", False),
        ("100000", r"\frac{1e6}{10}", True),
        ("1/3", r"0.\overline{3}", True),
        (r"2\sqrt{3}", "2√3 cm", True),
        (r"\frac{1}{2}", r"\textbf{(B)}\ \frac{1}{2}", True),
    ],
)
async def test_answers_are_compared_by_value(
    scorer: MathScorer, gold: str, answer: str, equal: bool
) -> None:
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
    # Right answers that wait behind it are not cut off with it, and do not wait for its end.
    answers = await asyncio.gather(
        scorer.equal("2", "x"), *(scorer.equal("2", f"quick {n}") for n in range(3))
    )
    assert answers == [False, True, True, True]
    assert caplog.text.count("counts as not equal") == 1
    monkeypatch.undo()
    assert await scorer.equal("2", r"\frac{4}{2}") is True
    scorer.close()


@pytest.mark.parametrize("package", ["math_verify", "latex2sympy2_extended"])
def test_a_package_that_is_missing_is_named_and_no_answer_counts_as_wrong(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvironmentFailure, match=f"{package}.*pip install math-verify"):
        math_scoring.equal_in_this_process("2", r"\sqrt{4}")


@pytest.mark.parametrize("answer", [r"9^{9^{9^9}}\approx 5", "5=9^{9^{9^9}}", "x=5=9^{9^{9^9}}"])
def test_a_tower_of_powers_has_no_value_in_time(
    monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """The time limit of a test ends an evaluation without a limit of its own."""
    monkeypatch.setattr(math_scoring, "PARSE_SECONDS", 1)
    assert not math_scoring.equal_in_this_process("5", answer)


async def test_an_answer_that_kills_its_child_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scorer = MathScorer(1)
    monkeypatch.setattr(math_scoring, "equal_in_this_process", dies)
    assert await scorer.equal("2", "x") is False
    assert "ended its process twice" in caplog.text
    monkeypatch.undo()
    assert await scorer.equal("2", r"\frac{4}{2}") is True
    scorer.close()


def sleeps(gold: str, answer: str) -> bool:
    if not answer.startswith("quick"):
        time.sleep(60)
    return True


def dies(gold: str, answer: str) -> bool:
    os._exit(3)


@given(gold=st.text(max_size=30), answer=st.text(max_size=30))
def test_no_text_makes_the_plain_comparison_raise(gold: str, answer: str) -> None:
    assert compare_plainly(gold, answer) in (True, False, None)
    assert compare_plainly(answer, gold) == compare_plainly(gold, answer)
