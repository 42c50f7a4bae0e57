"""Groups are put together, and refused if they do not line up."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.wire import (
    encode,
    group_from_items,
    response_lengths,
    scores_equal,
    teaches_nothing,
    with_plain_numbers,
    wrong_shape,
)


def item(length: int = 4, **more: Any) -> dict[str, Any]:
    tokens = list(range(1, length + 1))
    return {
        "tokens": tokens,
        "masks": [-100, *tokens[1:]],
        "scores": 1.0,
        "inference_logprobs": [1.0, *[-0.5] * (length - 1)],
        "weight_version": 3,
    } | more


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), scores=st.data())
def test_a_group_lines_up_with_its_items(lengths: list[int], scores: Any) -> None:
    items = [item(length, scores=scores.draw(st.floats(-5, 5))) for length in lengths]
    group = group_from_items(items)
    assert group["tokens"] == [entry["tokens"] for entry in items]
    assert group["scores"] == [entry["scores"] for entry in items]
    assert group["weight_versions"] == [3] * len(items)
    assert "advantages" not in group
    assert wrong_shape(group, len(items)) is None
    assert response_lengths(group) == [length - 1 for length in lengths]


def test_optional_fields_are_given_by_all_or_by_none() -> None:
    with pytest.raises(ValueError, match="only 1 of 2 trajectories have 'advantages'"):
        group_from_items([item(advantages=[0.0] * 4), item()])
    with pytest.raises(ValueError, match="1 of 2 trajectories have no 'masks'"):
        group_from_items([item(), item(masks=None)])


def test_spans_of_weights_are_left_out_unless_every_response_has_them() -> None:
    spans = {"weight_version_spans": [[3, 1], [4, 2]], "weight_epoch_spans": [7, 7]}
    group = group_from_items([item(**spans), item(**spans)])
    assert group["weight_version_spans"] == [[[3, 1], [4, 2]]] * 2
    assert group["weight_epoch_spans"] == [[7, 7]] * 2
    versions_only = {"weight_version_spans": spans["weight_version_spans"]}
    assert "weight_version_spans" in group_from_items(
        [item(**versions_only), item(**versions_only)]
    )
    for items in (
        [item(**spans), item()],
        [item(**spans), item(weight_epoch_spans=[7, 7])],
        [item(**spans, weight_epoch=7), item(**versions_only)],
    ):
        assert not {"weight_version_spans", "weight_epoch_spans"} & group_from_items(items).keys()


def test_how_responses_were_sampled_is_told_of_each_of_which_it_is_known() -> None:
    told = {"sampling_params": {"temperature": 0.7}, "finish_reason": "length"}
    group = group_from_items([item(**told), item(**told)])
    assert group["sampling_params"] == [{"temperature": 0.7}] * 2
    assert group["finish_reasons"] == ["length"] * 2
    some = group_from_items([item(), item(**told)])
    assert some["sampling_params"] == [None, {"temperature": 0.7}]
    assert some["finish_reasons"] == [None, "length"], (
        "a truncated answer is known as one, whatever is known of its siblings"
    )
    assert not {"sampling_params", "finish_reasons"} & group_from_items([item(), item()]).keys()
    assert (
        wrong_shape(
            group | {"sampling_params": {"stop": "x"}, "finish_reasons": "an environment's own"}, 2
        )
        is None
    )


def test_successes_are_told_of_the_responses_that_have_one() -> None:
    assert group_from_items([item(success=True), item(success=False)])["successes"] == [True, False]
    assert group_from_items([item(success=True), item()])["successes"] == [True, None]
    assert group_from_items([item(success=np.True_), item(success=np.False_)])["successes"] == [
        True,
        False,
    ]
    assert with_plain_numbers({"successes": np.array([True, False])})["successes"] == [True, False]
    assert "successes" not in group_from_items([item(success="yes"), item(success=1.0)]), (
        "an environment's own field"
    )
    group = group_from_items([item(), item()])
    assert "'successes' has 1 entries" in (wrong_shape(group | {"successes": [True]}, 2) or "")
    assert wrong_shape(group | {"successes": 0.5}, 2) is None


def test_group_overrides_are_merged() -> None:
    group = group_from_items(
        [item(group_overrides={"a": 1}), item(group_overrides={"b": 2}), item()]
    )
    assert group["group_overrides"] == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "'tokens' is missing"),
        ({"scores": [1.0]}, "'scores' has 1 entries, the group size is 2"),
        ({"scores": [1.0, math.nan]}, "scores[1] is nan"),
        ({"scores": [1.0, math.inf]}, "scores[1] is inf"),
        ({"scores": [1.0, "x"]}, "scores[1] is 'x'"),
        ({"masks": [[-100, 2, 3, 4], [-100, 2]]}, "masks[1] has 2 entries for 4 tokens"),
        (
            {"inference_logprobs": [[1.0] * 4, [1.0, -0.5, math.nan, 0.0]]},
            "inference_logprobs[1] holds a number",
        ),
        ({"advantages": [[0.0] * 4]}, "'advantages' has 1 entries"),
        (
            {
                "tokens": [[1, 2, 3, 4], []],
                "masks": [[-100, 2, 3, 4], []],
                "inference_logprobs": None,
            },
            "tokens[1] is empty",
        ),
        ({"weight_versions": [1]}, "'weight_versions' has 1 entries"),
        ({"finish_reasons": ["stop"]}, "'finish_reasons' has 1 entries"),
        ({"weight_version_spans": [[[1, 3]]]}, "'weight_version_spans' has 1 entries"),
    ],
)
def test_what_does_not_line_up_is_named(change: dict[str, Any], message: str) -> None:
    group: Any = group_from_items([item(), item()]) | change
    assert message in (wrong_shape(group, 2) or "nothing is wrong")


@given(score=st.floats(-2, 2), others=st.lists(st.floats(-2, 2), max_size=5))
def test_equal_scores_are_those_with_no_spread(score: float, others: list[float]) -> None:
    scores = [score, *others]
    assert teaches_nothing({"scores": scores}) == scores_equal(scores)
    assert not teaches_nothing({"scores": scores, "advantages": [[0.0, 1.0]] * len(scores)})


@pytest.mark.parametrize(
    "scores",
    [
        np.array([1, 0], dtype=np.float32),
        [np.float32(1), np.float64(0)],
        [np.int64(1), np.bool_(False)],
        [True, False],
        torch.tensor([1.0, 0.0], dtype=torch.bfloat16),
        [torch.tensor(1.0, requires_grad=True), torch.tensor([0])],
        [Decimal(1), Fraction(0)],
        (1, 0),
    ],
    ids=lambda scores: f"{type(scores).__name__} of {type(scores[0]).__name__}",
)
def test_scores_of_every_number_type_are_taken(scores: Any) -> None:
    group = with_plain_numbers(group_from_items([item(), item()]) | {"scores": scores})
    assert group["scores"] == [1.0, 0.0]
    assert {type(score) for score in group["scores"]} == {float}
    assert wrong_shape(group, 2) is None
    assert not teaches_nothing({"scores": scores})


def test_arrays_and_tensors_for_each_token_are_taken() -> None:
    plain: Any = group_from_items([item(), item()])
    arrays = plain | {name: [np.array(row) for row in plain[name]] for name in ("tokens", "masks")}
    arrays["inference_logprobs"] = torch.tensor(plain["inference_logprobs"], dtype=torch.float64)
    assert with_plain_numbers(arrays) == plain
    assert encode(with_plain_numbers(arrays))


@pytest.mark.parametrize("score", ["1", None, [1.0, 2.0], 10**400, object()])
def test_a_score_that_is_not_a_number_is_named(score: Any) -> None:
    group = with_plain_numbers(group_from_items([item(), item()]) | {"scores": [0.0, score]})
    assert "scores[1] is" in (wrong_shape(group, 2) or "nothing is wrong")


def test_a_finish_reason_that_is_no_word_says_nothing() -> None:
    """A public environment keeps its score under this name; the service would refuse the group."""
    items = [
        {"tokens": [1], "masks": [1], "scores": 1.0, "finish_reason": reason} for reason in (-1, 1)
    ]
    assert "finish_reasons" not in group_from_items(items)
