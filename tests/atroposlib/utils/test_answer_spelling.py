"""Answers that mean the same in other spellings, and answers that only look alike."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.utils.math_scoring import choice, compare_plainly, number_in, spelled

numbers = st.integers(-(10**9), 10**9) | st.decimals(-1000, 1000, places=2)
unit_words = [
    "cm",
    "dollars",
    "km/h",
    "square feet",
    "miles per hour",
    "red marbles",
    "min",
    "degrees Celsius",
    "PM",
]
units = st.sampled_from(["", *(f" {unit}" for unit in unit_words)]) | st.builds(
    "{}\\{}{{{}{}}}{}".format,
    st.sampled_from(["", " ", "~", r"\ ", r"\,"]),
    st.sampled_from(["text", "mathrm", "textrm", "mbox"]),
    st.sampled_from(["", " ", "~"]),
    st.sampled_from(unit_words),
    st.sampled_from(["", "^2", "^{3}"]),
)
around = st.sampled_from(
    [
        "{}",
        "**{}**",
        "${}$",
        r"\({}\)",
        r"\[{}\]",
        r"\displaystyle {}",
        r"\approx {}",
        "{}.",
        r"\,{}\,",
        "`{}`",
    ]
)


@given(value=numbers, unit=units, frame=around, currency=st.sampled_from(["", "", "€", r"\$"]))
def test_a_number_keeps_its_value_with_a_unit_and_in_any_frame(
    value: int | Decimal, unit: str, frame: str, currency: str
) -> None:
    text = frame.replace("{}", f"{currency}{value:,}{unit}")
    assert number_in(text) == value, text


@given(
    value=st.integers(1, 10**6),
    name=st.sampled_from("xmtscdghl"),
    more=st.sampled_from(["", "^2", "+1", "ab"]),
)
def test_a_variable_is_no_unit(value: int, name: str, more: str) -> None:
    assert number_in(f"{value}{name}{more}") is None
    assert name in spelled(f"{value}{name}{more}")


@given(
    one=st.integers(1, 999),
    other=st.integers(1, 999),
    joined=st.sampled_from([" or ", r"\text{ or }", " apples or ", " and ", ", "]),
)
def test_two_numbers_are_not_one(one: int, other: int, joined: str) -> None:
    assert number_in(f"{one}{joined}{other} apples") is None
    assert number_in(rf"{one}{joined}{other}\text{{ apples}}") is None


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("5000000", r"\$5\text{ million}", True),
        ("5", "5 million", False),
        ("90", "90°", True),
        ("20", r"20^{\circ}\text{C}", True),
        ("12345", r"12,345\%", True),
        ("7", "7;", True),
        ("-5", "–5", True),
        ("15", r"15^{\text{th}}", True),
        ("12st", "12", None),
        ("2516_8", "2516_{8}", True),
        ("2516_8", "2516_{10}", False),
        (r"\text{Evelyn}", "Evenly", False),
        ("Anna", "Nana", False),
        ("No solution", r"\text{no solution}", True),
        ("No", "No.", True),
        ("5 pm", r"5\text{ P.M.}", True),
        ("5 pm", "5 am", False),
        ("10:30 AM", "10:30 PM", False),
        ("B", r"\textbf{(B)}\ 12", True),
        ("B", "B: it rains", True),
        (r"\textbf{(B)}\ 12", "C", False),
        (r"\textbf{(B)}\ 12", "(C) 12", False),
        ("A", "A, C", None),
        ("5", "5!", None),
        ("5", r"5 \text{ thousand}", False),
        (r"\emptyset", r"\varnothing", True),
        ("3", r"\text{3 apples}", True),
    ],
)
def test_what_needs_no_algebra_is_decided_here(gold: str, answer: str, equal: bool | None) -> None:
    assert compare_plainly(gold, answer) is equal
    assert compare_plainly(answer, gold) is equal


def test_a_label_is_told_from_a_formula() -> None:
    assert choice(r"\textbf{(D) 3}") == ("D", "3")
    assert choice("A + B") is None
    assert choice("(x)") is None


@pytest.mark.parametrize(
    "piece",
    ["1 per cent", "1 hrs ", r"\text{cm}", "~=", "**", ", ", r"\[", "1 million ", "`", "= "],
)
def test_long_answers_are_read_in_time(piece: str) -> None:
    """The time limit of a test ends a search that takes exponential time."""
    spelled("1" + piece * (2000 // len(piece)) + "!")
    spelled("1" + " " * 10 + piece.strip() + " per" * 400 + " 1")
