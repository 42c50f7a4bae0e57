r"""Finding `\boxed{}` with balanced braces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.utils.boxed import boxed_contents, is_well_formed, last_boxed

balanced = st.recursive(
    st.text(alphabet="ab1+ ", max_size=4),
    lambda inner: st.builds(lambda a, b, c: f"{a}{{{b}}}{c}", inner, inner, inner),
    max_leaves=6,
)


@given(contents=st.lists(balanced, max_size=4), between=st.text(alphabet="xyz \n", max_size=5))
def test_every_content_is_found_in_order(contents: list[str], between: str) -> None:
    text = between + between.join(rf"\boxed{{{content}}}" for content in contents)
    assert boxed_contents(text) == contents
    assert last_boxed(text) == (contents[-1].strip() if contents else None)
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
    ],
)
def test_odd_ones(text: str, contents: list[str | None]) -> None:
    assert boxed_contents(text) == contents


def test_an_open_box_at_the_end_does_not_hide_the_answer_before() -> None:
    assert last_boxed(r"\boxed{12} … \boxed{") == "12"
    assert not is_well_formed(r"\boxed{12} … \boxed{")
    assert not is_well_formed(r"\boxed{ }")
