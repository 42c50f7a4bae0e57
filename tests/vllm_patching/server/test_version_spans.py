"""Token counts at each update become spans that cover every token exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_patching.server.state import Span, VersionSpans, Weights


def spans_of(*pairs: tuple[int, int]) -> list[Span]:
    """Expected spans from (version, tokens), all of the checkpoint's epoch."""
    return [Span(Weights(0, version), tokens) for version, tokens in pairs]


def test_a_request_without_an_update_has_one_span() -> None:
    spans = VersionSpans()
    spans.start("a")
    assert spans.finish("a", 5) == spans_of((0, 5))


def test_a_request_across_two_updates() -> None:
    spans = VersionSpans()
    spans.start("a")
    spans.switch(Weights(0, 1), {"a": 3})
    spans.start("b")
    spans.switch(Weights(0, 4), {"a": 3, "b": 0})
    assert spans.finish("a", 10) == spans_of((0, 3), (4, 7))
    assert spans.finish("b", 2) == spans_of((4, 2))


def test_a_request_that_ended_with_the_old_weights_keeps_their_version() -> None:
    spans = VersionSpans(2)
    spans.start("a")
    spans.switch(Weights(0, 3), {"a": 6})
    assert spans.finish("a", 6) == spans_of((2, 6))


def test_a_switch_waits_for_the_first_output_that_left_the_engine_after_it() -> None:
    spans = VersionSpans()
    for name in ("running", "ended", "unknown"):
        spans.start(name)
    spans.known("running")
    spans.known("ended")
    spans.switch_at(10.0, Weights(0, 1))
    spans.outputs_of(9.9, lambda: {"running": 2, "ended": 4})
    assert spans.version == 0
    # By now `ended` has got its last token, and its caller has not fetched it; `unknown` has not
    # reached the engine.
    spans.outputs_of(10.1, lambda: {"running": 3})
    spans.outputs_of(10.2, dict)
    assert spans.version == 1
    assert spans.finish("running", 8) == spans_of((0, 3), (1, 5))
    assert spans.finish("ended", 6) == spans_of((0, 6))
    assert spans.finish("unknown", 2) == spans_of((1, 2))


def test_a_request_fetched_before_any_new_output_is_of_the_old_version() -> None:
    spans = VersionSpans(3)
    spans.start("a")
    spans.known("a")
    spans.switch_at(1.0, Weights(0, 4))
    spans.switch_at(2.0, Weights(0, 5))
    assert spans.finish("a", 7) == spans_of((3, 7))
    spans.start("b")
    spans.outputs_of(5.0, lambda: {"b": 0})
    assert spans.finish("b", 1) == spans_of((5, 1))


def test_without_requests_a_switch_is_at_once() -> None:
    spans = VersionSpans()
    spans.switch_at(1.0, Weights(0, 1))
    assert spans.version == 1


def test_a_trainer_that_resumes_goes_back_in_versions_and_on_in_epochs() -> None:
    spans = VersionSpans(17, 100)
    spans.start("a")
    spans.switch(Weights(200, 10), {"a": 5})
    result = spans.finish("a", 9)
    assert result == [Span(Weights(100, 17), 5), Span(Weights(200, 10), 4)]
    assert (spans.version, spans.weights.epoch) == (10, 200)


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(0, 20))
def test_spans_cover_all_tokens_in_order(increments: list[int], last: int) -> None:
    spans = VersionSpans()
    spans.start("a")
    count = 0
    for version, more in enumerate(increments):
        count += more
        spans.switch(Weights(0, version + 1), {"a": count})
    result = spans.finish("a", count + last)
    assert sum(span.tokens for span in result) == count + last
    versions = [span.weights.version for span in result]
    assert versions == sorted(set(versions))
    assert result
