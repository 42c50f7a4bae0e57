"""EngineProgress: silence counts, and nothing but silence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_patching.server.engine_watch import FIRST_STEP_FACTOR, EngineProgress

LIMIT = 30.0


def test_an_engine_that_does_not_answer_is_in_trouble_after_the_limit_and_not_before() -> None:
    progress = EngineProgress(LIMIT)
    progress.passed(LIMIT, [False])
    assert progress.trouble == ""
    progress.passed(0.5, [False])
    assert "vLLM's engine has not answered for 30 s (--engine-timeout)" in progress.trouble
    told = progress.trouble
    progress.passed(100.0, [False])
    assert progress.trouble == told, "a reason that changes would be logged again and again"


def test_an_engine_that_answers_and_makes_no_step_for_its_requests_is_in_trouble() -> None:
    progress = EngineProgress(LIMIT)
    for _ in range(4):
        progress.answered(0, executed=7, due=3)
        progress.passed(10.0, [False])
    assert progress.trouble == "" or "has made no step" in progress.trouble
    progress.answered(0, executed=7, due=3)
    progress.passed(1.0, [False])
    assert "answers, but has made no step for 30 s" in progress.trouble
    progress.answered(0, executed=8, due=3)
    assert progress.trouble == ""


def test_an_engine_that_answered_once_without_a_step_and_then_was_stopped_does_not_answer() -> None:
    progress = EngineProgress(LIMIT)
    progress.answered(0, executed=7, due=3)
    progress.passed(3.0, [False])
    progress.answered(0, executed=7, due=3)
    for _ in range(28):
        progress.passed(1.0, [False])
    assert "vLLM's engine has not answered for 30 s (--engine-timeout)" in progress.trouble


def test_an_engine_without_requests_that_are_due_is_well() -> None:
    progress = EngineProgress(LIMIT)
    for _ in range(100):
        progress.answered(0, executed=7, due=0)
        progress.passed(LIMIT, [False])
        assert progress.trouble == ""


def test_a_step_of_a_new_shape_has_ten_times_the_limit() -> None:
    progress = EngineProgress(LIMIT)
    progress.passed(FIRST_STEP_FACTOR * LIMIT, [True])
    assert progress.trouble == ""
    progress.passed(0.5, [True])
    assert "first step of a new shape for 300 s" in progress.trouble
    progress.answered(0, executed=1, due=1)
    assert progress.trouble == ""


def test_the_time_of_a_first_step_does_not_count_once_it_has_ended() -> None:
    progress = EngineProgress(LIMIT)
    progress.passed(200.0, [True])
    progress.passed(LIMIT, [False])  # it has ended, and the answer is still under way
    assert progress.trouble == ""


def test_a_pause_does_not_count() -> None:
    progress = EngineProgress(LIMIT)
    for _ in range(100):
        progress.passed(LIMIT, [False])
        progress.excused()
    assert progress.trouble == ""


@given(st.integers(2, 4), st.data())
def test_one_replica_that_is_silent_is_named_whatever_the_others_do(
    replicas: int, data: st.DataObject
) -> None:
    silent = data.draw(st.integers(0, replicas - 1))
    progress = EngineProgress(LIMIT, replicas)
    for step in range(40):
        progress.passed(1.0, [False] * replicas)
        for number in range(replicas):
            if number != silent:
                progress.answered(number, executed=step, due=data.draw(st.integers(0, 2)))
    assert f"engine core {silent} has not answered" in progress.trouble


@given(st.lists(st.tuples(st.floats(0.0, 29.0), st.booleans(), st.integers(0, 3)), max_size=50))
def test_an_engine_that_steps_within_the_limit_is_never_in_trouble(
    steps: list[tuple[float, bool, int]],
) -> None:
    progress = EngineProgress(LIMIT)
    for executed, (seconds, first, due) in enumerate(steps):
        progress.passed(seconds, [first])
        assert progress.trouble == ""
        progress.answered(0, executed=executed, due=due)
