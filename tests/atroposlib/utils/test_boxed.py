r"""Finding `\boxed{}` with balanced braces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.utils.math_scoring import boxed_contents, is_well_formed, last_boxed

PIECES = (
    r"\boxed{",
    r"\boxed ",
    r"\fbox{",
    "{",
    "}",
    "5",
    r"\{",
    r"\}",
    ", ",
    " and ",
    "$",
    r"\text{or}",
)
balanced = st.recursive(
    st.text(alphabet="ab1+ ", max_size=4),
    lambda inner: st.builds(lambda a, b, c: f"{a}{{{b}}}{c}", inner, inner, inner),
    max_leaves=6,
)


@given(contents=st.lists(balanced, max_size=4), between=st.text(alphabet="xyz \n", max_size=5))
def test_every_content_is_found_in_order(contents: list[str], between: str) -> None:
    text = between + between.join(rf"\boxed{{{content}}}" for content in contents)
    assert boxed_contents(text) == contents
    filled = [content.strip() for content in contents if content.strip()]
    assert last_boxed(text) == ((filled or [""])[-1] if contents else None)
    assert is_well_formed(text) == (len(contents) == 1 and bool(contents[0].strip()))


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"\boxed{5", [None]),
        (r"\boxed{1} and \boxed{2", ["1", None]),
        (r"\boxed{\{1\}}", [r"\{1\}"]),
        (r"\boxed {7}", ["7"]),
        (r"\boxed{a\\}", ["a\\\\"]),
        ("boxed{5} or \\box{6}", []),
        (r"\boxed{\boxed{3}}", [r"\boxed{3}"]),
        (r"\fbox{5}", ["5"]),
        (r"$\boxed 52$.", ["52"]),
        (r"so \boxed 5, then", ["5"]),
        (r"\boxed\frac{1}{2}", [r"\frac{1}{2}"]),
        (r"\\boxed{5}", ["5"]),
        (r"\boxedtimes{5} \boxed", []),
        (r"\boxed{{5}", [None]),
    ],
)
def test_odd_ones(text: str, contents: list[str | None]) -> None:
    assert boxed_contents(text) == contents


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, then \boxed{7}", "7"),
        (r"$\boxed{1}$ and $\boxed{7}$", "1, 7"),
        (r"\boxed{1}, \boxed{2}, or \boxed{7}.", "1, 2, 7"),
        (r"\boxed{1} \text{ or } \boxed{2}", "1, 2"),
        (r"\boxed{7}, \boxed{7}", "7"),
        ("\\boxed{1}\n\\boxed{7}", "7"),
        (r"\boxed{ \boxed{3} }", "3"),
        (r"\boxed{x = \boxed{3}}", r"x = \boxed{3}"),
        (r"\boxed{4} (put in \boxed{})", "4"),
        (r"\boxed{1}, \boxed{7} in \boxed{\boxed{ }} or \fbox{}", "1, 7"),
        (r"\boxed{}", ""),
        (r"no box", None),
    ],
)
def test_the_last_box_or_list_of_boxes_is_the_answer(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


def test_a_response_that_was_cut_off_in_its_last_box_has_no_answer() -> None:
    assert last_boxed(r"\boxed{12} … \boxed{") is None
    assert last_boxed(r"\boxed{12} … \boxed{1") is None
    assert not is_well_formed(r"\boxed{12} … \boxed{")
    assert not is_well_formed(r"\boxed{ }")


@given(
    text=st.text(alphabet="\\{}$ ,5", max_size=60)
    | st.lists(st.sampled_from([*PIECES]), max_size=12).map("".join)
)
def test_no_text_raises_and_a_closed_box_behind_it_is_found(text: str) -> None:
    boxed_contents(text)
    last_boxed(text)
    assert last_boxed(text.replace("\\", "").replace("{", "") + r" so \boxed{42}") == "42"


@pytest.mark.parametrize(
    "piece", [r"\boxed{", r"\boxed{}", "{", r"\boxed{1}, ", r"\boxed ", "}", r"\text{and}"]
)
def test_megabytes_are_read_once(piece: str) -> None:
    """Reading that starts again at each box would take hours here, and the test's time limit ends
    it.
    """
    last_boxed(piece * (1_000_000 // len(piece)))
    last_boxed(r"\boxed{" * 50_000 + "}" * 50_000)
