"""Groups become tensors: nothing is lost, nothing depends on how the batch is split, and what is wrong is named."""

from __future__ import annotations

import copy
import math
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.utils.lives import Life
from example_trainer.algorithm.advantages import group_advantages
from example_trainer.batch.groups import NOT_TRAINED, Batch, microbatches, parse_batch

VOCAB = 50


def make_group(**changes: Any) -> dict[str, Any]:
    group: dict[str, Any] = {
        "tokens": [[1, 2, 3, 4], [1, 2, 5, 6, 7]],
        "masks": [[-100, -100, 3, 4], [-100, -100, 5, 6, 7]],
        "scores": [1.0, -1.0],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25], [1.0, 1.0, -1.5, -0.125, -2.0]],
    }
    return group | changes


@st.composite
def groups(draw: st.DrawFn) -> list[dict[str, Any]]:
    made = []
    for _ in range(draw(st.integers(1, 5))):
        group: dict[str, Any] = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": [], "weight_versions": []}
        for _ in range(draw(st.integers(1, 5))):
            prompt, response = draw(st.integers(1, 4)), draw(st.integers(0, 12))
            tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=prompt + response, max_size=prompt + response))
            group["tokens"].append(tokens)
            group["masks"].append([NOT_TRAINED] * prompt + tokens[prompt:])
            group["scores"].append(draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0])))
            group["inference_logprobs"].append([1.0] * prompt + [-0.1 * (i + 1) for i in range(response)])
            group["weight_versions"].append(draw(st.integers(0, 9)))
        made.append(group)
    return made


def trained_values(group_list: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """(token, rollout logprob, advantage) of every trained token, straight from the wire."""
    values = []
    for group in group_list:
        advantages = group_advantages(group["scores"])
        for tokens, masks, logprobs, advantage in zip(
            group["tokens"], group["masks"], group["inference_logprobs"], advantages, strict=True
        ):
            values += [
                (token, float(np.float32(logprob)), float(np.float32(advantage)))
                for token, mask, logprob in zip(tokens, masks, logprobs, strict=True)
                if mask != NOT_TRAINED
            ]
    return sorted(values)


@settings(deadline=None)
@given(groups(), st.integers(1, 8), st.sampled_from(["token", "sequence", "constant"]))
def test_microbatches_hold_every_trained_token_once_whatever_their_size(
    group_list: list[dict[str, Any]], size: int, normalisation: Any
) -> None:
    batch = parse_batch(group_list, max_tokens=100, vocab_size=VOCAB)
    found: list[tuple[int, float, float]] = []
    weight = 0.0
    lengths = []
    for micro in microbatches(batch, size, normalisation, max_tokens=100):
        assert 1 <= len(micro.tokens) <= size
        lengths.append(micro.tokens.shape[1])
        flat = micro.tokens.flatten()
        rows = micro.sources // micro.tokens.shape[1]
        assert torch.equal(rows, (micro.sources + 1) // micro.tokens.shape[1]), "a target lies in the row of its source"
        assert torch.equal(flat[micro.sources + 1], micro.targets)
        weight += float(micro.weights.double().sum())
        found += [
            (int(token), float(logprob), float(advantage))
            for token, logprob, advantage in zip(micro.targets, micro.rollout_logprobs, micro.advantages, strict=True)
        ]
    assert sorted(found) == trained_values(group_list)
    assert lengths == sorted(lengths, reverse=True)
    if found and normalisation != "constant":
        assert weight == pytest.approx(1)


@given(groups(), st.integers(1, 4))
def test_the_same_batch_gives_the_same_microbatches(group_list: list[dict[str, Any]], size: int) -> None:
    one, two = (list(microbatches(parse_batch(copy.deepcopy(group_list), 100, VOCAB), size, "token", 100)) for _ in range(2))
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert all(torch.equal(value, vars(b)[name]) for name, value in vars(a).items())


@given(groups(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_order_in_which_groups_came_does_not_matter(group_list: list[dict[str, Any]], size: int, random: Random) -> None:
    shuffled = random.sample(group_list, len(group_list))
    one, two = (
        list(microbatches(parse_batch(copy.deepcopy(made), 100, VOCAB), size, "token", 100)) for made in (group_list, shuffled)
    )
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert all(torch.equal(value, vars(b)[name]) for name, value in vars(a).items() if name != "orders")


@given(groups(), st.integers(2, 10))
def test_long_sequences_are_cut_and_counted(group_list: list[dict[str, Any]], limit: int) -> None:
    whole, cut = parse_batch(group_list, 100, VOCAB), parse_batch(group_list, limit, VOCAB)
    assert cut.truncated == sum(len(tokens) > limit for group in group_list for tokens in group["tokens"])
    for long, short in zip(whole.sequences, cut.sequences, strict=True):
        assert np.array_equal(short.tokens, long.tokens[:limit])
        assert np.array_equal(short.positions, long.positions[long.positions < limit])
        assert len(short.rollout_logprobs) == len(short.advantages) == len(short.positions)


def only(batch: Batch, index: int = 0) -> list[float]:
    return batch.sequences[index].advantages.tolist()


def test_advantages_are_those_of_the_group() -> None:
    batch = parse_batch([make_group(), make_group(scores=[3.0, 3.0])], 100, VOCAB)
    assert [only(batch, i) for i in range(4)] == [[1.0, 1.0], [-1.0, -1.0, -1.0], [0.0, 0.0], [0.0, 0.0, 0.0]]
    halved = parse_batch([make_group(scores=[0.5, 0.0])], 100, VOCAB, divide_by_std=False)
    assert only(halved) == [0.25, 0.25]


def test_given_advantages_replace_them() -> None:
    batch = parse_batch([make_group(advantages=[0.5, [9, 9, 1, 2, 3]])], 100, VOCAB)
    assert only(batch, 0) == [0.5, 0.5]
    assert only(batch, 1) == [1.0, 2.0, 3.0]
    listed = parse_batch([make_group(advantages=[[0.5], [-2.0]])], 100, VOCAB)
    assert [only(listed, i) for i in range(2)] == [[0.5, 0.5], [-2.0, -2.0, -2.0]]


def test_overrides_set_advantages_to_zero() -> None:
    one = parse_batch([make_group(overrides=[{}, {"set_advantage_to_zero": True}])], 100, VOCAB)
    assert [only(one, i) for i in range(2)] == [[1.0, 1.0], [0.0, 0.0, 0.0]]
    whole = parse_batch([make_group(group_overrides={"set_advantage_to_zero": True, "colour": 1})], 100, VOCAB)
    assert [only(whole, i) for i in range(2)] == [[0.0, 0.0], [0.0, 0.0, 0.0]]
    assert whole.ignored_overrides == {"colour"}


def test_the_first_token_is_never_trained() -> None:
    batch = parse_batch([make_group(masks=[[1, 2, 3, 4], [-100, 2, -100, 6, -100]])], 100, VOCAB)
    assert [sequence.positions.tolist() for sequence in batch.sequences] == [[1, 2, 3], [1, 3]]


def test_missing_rollout_logprobs_are_marked() -> None:
    batch = parse_batch([make_group(inference_logprobs=None)], 100, VOCAB)
    assert all(np.isnan(sequence.rollout_logprobs).all() for sequence in batch.sequences)


def test_ages_count_versions_since_sampling() -> None:
    batch = parse_batch([make_group(weight_versions=[3, 5]), make_group()], 100, VOCAB)
    assert batch.ages(6) == [3, 1]


def test_ages_count_on_the_line_of_weights_that_is_trained_on() -> None:
    """Sampled at 17 by a trainer that was killed; the present one went on from 10."""
    group = make_group(weight_versions=[17, 11], weight_epochs=[100, 200])
    assert parse_batch([group], 100, VOCAB).ages(12, [Life(100, 0), Life(200, 10)]) == [3, 1]
    cut = parse_batch([group], 4, VOCAB)
    assert [sequence.weight_epoch for sequence in cut.sequences] == [100, 200]
    no_epochs = make_group(weight_versions=[17, 11], weight_epochs=None)
    assert parse_batch([no_epochs], 100, VOCAB).ages(12, [Life(100, 0), Life(200, 10)]) == [3, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "tokens is missing or empty"),
        ({"tokens": [["a"]]}, "tokens is no list of lists of numbers"),
        ({"tokens": [1, 2]}, "tokens is no list of lists of numbers"),
        ({"tokens": [[1, 2, 3, 50], [1, 2, 5, 6, 7]]}, "tokens[0] holds 50, and the model's ids go from 0 to 49"),
        ({"tokens": [[1, 2, 3, -1], [1, 2, 5, 6, 7]]}, "tokens[0] holds -1"),
        ({"masks": [[-100, -100, 3, 4]]}, "masks has 1 sequences, tokens has 2"),
        ({"masks": [[-100, 3, 4], [-100, -100, 5, 6, 7]]}, "masks[0] has 3 entries, tokens[0] has 4"),
        ({"scores": [1.0]}, "scores has 1 entries"),
        ({"scores": [1.0, math.nan]}, "scores holds something that is no finite number"),
        ({"scores": [1.0, None]}, "scores holds something that is no finite number"),
        ({"scores": None}, "scores has no entries"),
        ({"inference_logprobs": [[1.0, 1.0, -0.5, -0.25]]}, "inference_logprobs has 1 sequences"),
        ({"inference_logprobs": [[-0.5], [1.0, 1.0, -1.5, -0.1, -2.0]]}, "inference_logprobs[0] has 1 entries"),
        ({"inference_logprobs": [[1, 1, math.nan, -1], [1, 1, -1, -1, -1]]}, "inference_logprobs[0] holds NaN"),
        ({"weight_versions": [1]}, "weight_versions has 1 entries"),
        ({"weight_versions": [1, 1], "weight_epochs": [5]}, "weight_epochs has 1 entries"),
        ({"advantages": [1.0]}, "advantages does not have one entry for each of 2"),
        ({"advantages": [1.0, [1.0, 2.0]]}, "advantages[1] is neither a finite number nor 5 of them"),
        ({"advantages": [1.0, math.inf]}, "advantages[1] is neither a finite number"),
        ({"advantages": [1.0, "x"]}, "advantages[1] is neither a number nor a list"),
        ({"overrides": [{}]}, "overrides has 1 entries"),
    ],
)
def test_an_invalid_group_is_left_out_and_named(changes: dict[str, Any], message: str) -> None:
    batch = parse_batch([make_group(), make_group(**changes), make_group()], 100, VOCAB)
    assert len(batch.sequences) == 4
    assert len(batch.invalid) == 1
    assert batch.invalid[0].startswith("group 1: ")
    assert message in batch.invalid[0]


def test_nan_at_a_prompt_position_does_not_matter() -> None:
    batch = parse_batch([make_group(inference_logprobs=[[math.nan, 1, -1, -1], [1, 1, -1, -1, -1]])], 100, VOCAB)
    assert not batch.invalid
