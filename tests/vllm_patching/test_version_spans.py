"""Token counts at each update become spans that cover every token exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_patching.version_spans import VersionSpans


def test_a_request_without_an_update_has_one_span() -> None:
    spans = VersionSpans()
    spans.start("a")
    assert spans.finish("a", 5) == [(0, 5)]


def test_a_request_across_two_updates() -> None:
    spans = VersionSpans()
    spans.start("a")
    spans.switch(0, 1, {"a": 3})
    spans.start("b")
    spans.switch(1, 4, {"a": 3, "b": 0})
    assert spans.finish("a", 10) == [(0, 3), (4, 7)]
    assert spans.finish("b", 2) == [(4, 2)]


def test_a_request_that_ended_with_the_old_weights_keeps_their_version() -> None:
    spans = VersionSpans()
    spans.start("a")
    spans.switch(2, 3, {"a": 6})
    assert spans.finish("a", 6) == [(2, 6)]


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(0, 20))
def test_spans_cover_all_tokens_in_order(increments: list[int], last: int) -> None:
    spans = VersionSpans()
    spans.start("a")
    count = 0
    for version, more in enumerate(increments):
        count += more
        spans.switch(version, version + 1, {"a": count})
    result = spans.finish("a", count + last)
    assert sum(tokens for _, tokens in result) == count + last
    versions = [version for version, _ in result]
    assert versions == sorted(set(versions))
    assert result
