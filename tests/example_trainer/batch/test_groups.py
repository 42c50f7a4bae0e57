"""Groups become sequences: advantages, overrides and the weights behind each token, and what is
wrong is named.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.wire import TrainerSession
from example_trainer.algorithm.advantages import find_advantages
from example_trainer.batch.groups import NOT_TRAINED, Batch, LengthRules, Rules, parse_batch

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
        group: dict[str, Any] = {
            "tokens": [],
            "masks": [],
            "scores": [],
            "inference_logprobs": [],
            "weight_versions": [],
        }
        for _ in range(draw(st.integers(1, 5))):
            prompt, response = draw(st.integers(1, 4)), draw(st.integers(0, 12))
            tokens = draw(
                st.lists(
                    st.integers(0, VOCAB - 1),
                    min_size=prompt + response,
                    max_size=prompt + response,
                )
            )
            group["tokens"].append(tokens)
            group["masks"].append([NOT_TRAINED] * prompt + tokens[prompt:])
            group["scores"].append(draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0])))
            group["inference_logprobs"].append(
                [1.0] * prompt + [-0.1 * (i + 1) for i in range(response)]
            )
            group["weight_versions"].append(draw(st.integers(0, 9)))
        made.append(group)
    return made


@given(groups(), st.integers(2, 10), st.booleans(), st.sets(st.integers(0, 4)))
def test_what_is_masked_is_in_the_baseline_and_what_is_dropped_is_not(
    group_list: list[dict[str, Any]], limit: int, drop: bool, cut_short: set[int]
) -> None:
    """Every other rollout keeps its advantage if untrained ones are masked; if they are dropped, it
    has the advantage of a group without them.
    """
    for group in group_list:
        group["finish_reasons"] = [
            "length" if i in cut_short else "stop" for i in range(len(group["tokens"]))
        ]
    lengths = LengthRules(truncated_answers="mask", too_long="drop" if drop else "mask")
    found = parse_batch(group_list, limit, VOCAB, Rules(lengths=lengths))
    kept = [
        {
            name: [
                value
                for value, row in zip(group[name], group["tokens"], strict=True)
                if not drop or len(row) <= limit
            ]
            for name in group
        }
        for group in group_list
    ]
    whole = parse_batch([group for group in kept if group["tokens"]], 100, VOCAB)
    assert found.too_long == sum(
        len(tokens) > limit for group in group_list for tokens in group["tokens"]
    )
    for ours, theirs in zip(found.sequences, whole.sequences, strict=True):
        masked = len(ours.tokens) > limit or ours.finish_reason == "length"
        assert np.array_equal(ours.positions, [] if masked else theirs.positions)
        assert np.array_equal(ours["advantages"], [] if masked else theirs["advantages"])
        assert len(ours["rollout_logprobs"]) == len(ours["versions"]) == len(ours.positions)
        assert (ours.response_length, ours.score) == (len(theirs.positions), theirs.score)


def only(batch: Batch, index: int = 0) -> list[float]:
    return batch.sequences[index]["advantages"].tolist()


def test_advantages_are_those_of_the_group() -> None:
    batch = parse_batch([make_group(), make_group(scores=[3.0, 3.0])], 100, VOCAB)
    assert [only(batch, i) for i in range(4)] == [
        [1.0, 1.0],
        [-1.0, -1.0, -1.0],
        [0.0, 0.0],
        [0.0, 0.0, 0.0],
    ]
    undivided = Rules(advantages=find_advantages("group", divide_by_std=False))
    assert only(parse_batch([make_group(scores=[0.5, 0.0])], 100, VOCAB, undivided)) == [0.25, 0.25]


def test_advantages_may_be_those_of_the_whole_batch() -> None:
    """Advantages of groups that are valid and bring none along."""
    batched = Rules(advantages=find_advantages("batch"))
    groups = [
        make_group(scores=[3.0, 3.0]),
        make_group(scores=[math.nan, 9.0]),
        make_group(advantages=[8.0, 9.0]),
        make_group(scores=[1.0, 1.0]),
    ]
    batch = parse_batch(groups, 100, VOCAB, batched)
    assert [only(batch, i)[0] for i in range(6)] == [1.0, 1.0, 8.0, 9.0, -1.0, -1.0]


def test_penalties_are_in_the_advantages_and_not_in_the_rewards() -> None:
    """The second answer is one token short of its limit; without a limit of its own, that is the
    trainer's, less the prompt.
    """
    rules = Rules(
        advantages=find_advantages("scores"), lengths=LengthRules("penalise", buffer=2, most=0.5)
    )
    said = make_group(sampling_params=[{"temperature": 1, "max_tokens": limit} for limit in (9, 4)])
    batch = parse_batch([said, make_group()], 6, VOCAB, rules)
    assert [only(batch, i)[0] for i in range(4)] == [1.0, -1.25, 1.0, -1.25]
    assert [sequence.score for sequence in batch.sequences] == [1.0, -1.0, 1.0, -1.0]


def test_of_several_turns_the_last_answer_is_penalised() -> None:
    rules = Rules(advantages=find_advantages("scores"), lengths=LengthRules("penalise", buffer=2))
    group = make_group(
        masks=[[-100, 2, 3, 4], [-100, 2, 5, -100, 7]],
        sampling_params=[{"temperature": 1, "max_tokens": 3}] * 2,
    )
    assert [only(parse_batch([group], 100, VOCAB, rules), i)[0] for i in range(2)] == [0.0, -1.0]


def test_given_advantages_replace_them() -> None:
    batch = parse_batch([make_group(advantages=[0.5, [9, 9, 1, 2, 3]])], 100, VOCAB)
    assert only(batch, 0) == [0.5, 0.5]
    assert only(batch, 1) == [1.0, 2.0, 3.0]
    listed = parse_batch([make_group(advantages=[[0.5], [-2.0]])], 100, VOCAB)
    assert [only(listed, i) for i in range(2)] == [[0.5, 0.5], [-2.0, -2.0, -2.0]]


def test_overrides_set_advantages_to_zero() -> None:
    one = parse_batch([make_group(overrides=[{}, {"set_advantage_to_zero": True}])], 100, VOCAB)
    assert [only(one, i) for i in range(2)] == [[1.0, 1.0], [0.0, 0.0, 0.0]]
    whole = parse_batch(
        [make_group(group_overrides={"set_advantage_to_zero": True, "colour": 1})], 100, VOCAB
    )
    assert [only(whole, i) for i in range(2)] == [[0.0, 0.0], [0.0, 0.0, 0.0]]
    assert whole.ignored_overrides == {"colour"}


def test_the_first_token_is_never_trained() -> None:
    batch = parse_batch([make_group(masks=[[1, 2, 3, 4], [-100, 2, -100, 6, -100]])], 100, VOCAB)
    assert [sequence.positions.tolist() for sequence in batch.sequences] == [[1, 2, 3], [1, 3]]


def test_missing_rollout_logprobs_are_marked() -> None:
    batch = parse_batch([make_group(inference_logprobs=None)], 100, VOCAB)
    assert all(np.isnan(sequence["rollout_logprobs"]).all() for sequence in batch.sequences)


def test_a_number_above_0_is_no_logprob() -> None:
    """1.0 is the wire's own placeholder; what rounding leaves above 0 is a logprob."""
    sent = [[1.0, 1.0, 1.0, -0.25], [1.0, 1.0, 5e-4, 0.5, -2.0]]
    batch = parse_batch(
        [make_group(inference_logprobs=sent), make_group(inference_logprobs=sent, scores=[1.0])],
        100,
        VOCAB,
    )
    found = [sequence["rollout_logprobs"] for sequence in batch.sequences]
    assert all(row.dtype == np.float32 for row in found)
    assert [row.tolist() for row in found] == [
        [pytest.approx(math.nan, nan_ok=True), -0.25], [pytest.approx(5e-4), pytest.approx(math.nan, nan_ok=True), -2.0],
    ]  # fmt: skip
    assert (batch.no_logprobs, len(batch.invalid)) == (2, 1), (
        "of a group that is left out nothing is counted"
    )


def test_ages_count_versions_since_sampling() -> None:
    batch = parse_batch([make_group(weight_versions=[3, 5]), make_group()], 100, VOCAB)
    assert batch.ages(6) == [3, 1]


def test_ages_count_on_the_line_of_weights_that_is_trained_on() -> None:
    """Sampled at 17 by a trainer that was killed; the present one went on from 10."""
    group = make_group(weight_versions=[17, 11], weight_epochs=[100, 200])
    assert parse_batch([group], 100, VOCAB).ages(
        12, [TrainerSession(100, 0), TrainerSession(200, 10)]
    ) == [3, 1]
    masked = parse_batch([group], 4, VOCAB)
    assert [sequence.weight_epoch for sequence in masked.sequences] == [100, 200]
    no_epochs = make_group(weight_versions=[17, 11], weight_epochs=None)
    assert parse_batch([no_epochs], 100, VOCAB).ages(
        12, [TrainerSession(100, 0), TrainerSession(200, 10)]
    ) == [3, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "tokens is missing or empty"),
        ({"tokens": [["a"]]}, "tokens is no list of lists of numbers"),
        ({"tokens": [1, 2]}, "tokens is no list of lists of numbers"),
        (
            {"tokens": [[1, 2, 3, 50], [1, 2, 5, 6, 7]]},
            "tokens[0] holds 50, and the model's ids go from 0 to 49",
        ),
        ({"tokens": [[1, 2, 3, -1], [1, 2, 5, 6, 7]]}, "tokens[0] holds -1"),
        ({"masks": [[-100, -100, 3, 4]]}, "masks has 1 sequences, tokens has 2"),
        (
            {"masks": [[-100, 3, 4], [-100, -100, 5, 6, 7]]},
            "masks[0] has 3 entries, tokens[0] has 4",
        ),
        ({"scores": [1.0]}, "scores has 1 entries"),
        ({"scores": [1.0, math.nan]}, "scores holds something that is no finite number"),
        ({"scores": [1.0, None]}, "scores holds something that is no finite number"),
        ({"scores": None}, "scores has no entries"),
        ({"inference_logprobs": [[1.0, 1.0, -0.5, -0.25]]}, "inference_logprobs has 1 sequences"),
        (
            {"inference_logprobs": [[-0.5], [1.0, 1.0, -1.5, -0.1, -2.0]]},
            "inference_logprobs[0] has 1 entries",
        ),
        (
            {"inference_logprobs": [[1, 1, math.nan, -1], [1, 1, -1, -1, -1]]},
            "inference_logprobs[0] holds NaN",
        ),
        ({"weight_versions": [1]}, "weight_versions has 1 entries"),
        ({"weight_versions": [1, 1], "weight_epochs": [5]}, "weight_epochs has 1 entries"),
        ({"advantages": [1.0]}, "advantages does not have one entry for each of 2"),
        (
            {"advantages": [1.0, [1.0, 2.0]]},
            "advantages[1] is neither a finite number nor 5 of them",
        ),
        ({"advantages": [1.0, math.inf]}, "advantages[1] is neither a finite number"),
        ({"advantages": [1.0, "x"]}, "advantages[1] is neither a number nor a list"),
        ({"overrides": [{}]}, "overrides has 1 entries"),
        ({"overrides": 3}, "overrides has no entries"),
        ({"overrides": [{}, 3]}, "overrides[1] is no object: 3"),
        (
            {"group_overrides": ["set_advantage_to_zero"]},
            "group_overrides is no object: ['set_advantage_to_zero']",
        ),
        (
            {"weight_versions": [1, "x"]},
            "weight_versions holds something that is no number (invalid literal",
        ),
        ({"weight_versions": [1, [2]]}, "weight_versions holds something that is no number"),
        ({"weight_versions": [1, 2**64 - 1]}, "weight_versions holds something that is no number"),
        (
            {"weight_versions": [1, 2], "weight_epochs": [1, math.inf]},
            "weight_epochs holds something that is no number",
        ),
        ({"finish_reasons": ["stop"]}, "finish_reasons has 1 entries"),
        ({"sampling_params": [{"temperature": 1}]}, "sampling_params has 1 entries"),
        ({"successes": [True]}, "successes has 1 entries"),
    ],
)
def test_an_invalid_group_is_left_out_and_named(changes: dict[str, Any], message: str) -> None:
    batch = parse_batch([make_group(), make_group(**changes), make_group()], 100, VOCAB)
    assert len(batch.sequences) == 4
    assert len(batch.invalid) == 1
    assert batch.invalid[0].startswith("group 1: ")
    assert message in batch.invalid[0]


def test_what_has_these_names_and_is_no_list_is_the_environments_own() -> None:
    batch = parse_batch(
        [make_group(sampling_params={"stop": "x"}, finish_reasons="stop")], 100, VOCAB
    )
    assert not batch.invalid
    assert [one.finish_reason for one in batch.sequences] == [None, None]
    assert not any("temperatures" in one.fields for one in batch.sequences)


def test_successes_are_read_where_they_are_known() -> None:
    batch = parse_batch(
        [
            make_group(successes=[True, None]),
            make_group(successes=[False, 1]),
            make_group(successes=1),
        ],
        100,
        VOCAB,
    )
    assert not batch.invalid
    assert [one.success for one in batch.sequences] == [True, None, False, None, None, None]


def test_nan_at_a_prompt_position_does_not_matter() -> None:
    batch = parse_batch(
        [make_group(inference_logprobs=[[math.nan, 1, -1, -1], [1, 1, -1, -1, -1]])], 100, VOCAB
    )
    assert not batch.invalid


LIVES = [TrainerSession(100, 0), TrainerSession(200, 10)]


def versions(batch: Batch) -> list[list[int] | None]:
    return [
        sequence["versions"].tolist() if "versions" in sequence.fields else None
        for sequence in batch.sequences
    ]


def test_each_token_knows_the_weights_that_it_was_sampled_under() -> None:
    """A rollout that a weight update came in the middle of.

    Samples that an earlier life made and lost belong to no present weights.
    """
    group = make_group(
        weight_versions=[11, 12],
        weight_epochs=[200, 200],
        weight_version_spans=[[[11, 1], [12, 1]], [[17, 2], [12, 1]]],
        weight_epoch_spans=[[200, 200], [100, 200]],
    )
    batch = parse_batch([group], 100, VOCAB, version=12, lives=LIVES)
    assert versions(batch) == [[11, 12], [9, 9, 12]]
    assert not batch.unusable_spans


def test_without_spans_every_token_counts_as_sampled_by_the_oldest_weights() -> None:
    said = make_group(weight_versions=[3, 4])
    assert versions(parse_batch([said, make_group()], 100, VOCAB, version=4)) == [
        [3, 3],
        [4, 4, 4],
        None,
        None,
    ]


def test_a_version_that_the_trainer_has_not_reached_is_an_earlier_trainers() -> None:
    group = make_group(
        weight_versions=[13, 11], weight_version_spans=[[[13, 1], [11, 1]], [[11, 3]]]
    )
    assert versions(parse_batch([group], 100, VOCAB, version=12, lives=LIVES)) == [
        [9, 11],
        [11, 11, 11],
    ]


def test_a_first_token_has_a_span_and_is_not_trained() -> None:
    group = make_group(
        masks=[[1, 2, 3, 4], [-100, -100, 5, 6, 7]],
        weight_versions=[1, 1],
        weight_version_spans=[[[1, 2], [2, 2]], [[1, 3]]],
    )
    assert versions(parse_batch([group], 100, VOCAB, version=2)) == [[1, 2, 2], [1, 1, 1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight_version_spans": [[[5, 3]], None]},
            "weight_version_spans [3] do not add up to its 2 trained tokens",
        ),
        ({"weight_version_spans": [[[5, 3], [6, -1]], None]}, "do not add up"),
        (
            {"weight_version_spans": [[], None]},
            "weight_version_spans [] do not add up to its 2 trained tokens",
        ),
        ({"weight_version_spans": [[5, 2], None]}, "sequence 0 of group 0: "),
        ({"weight_version_spans": [[[5, "x"]], None]}, "sequence 0 of group 0: "),
        (
            {"weight_version_spans": [[[5, 2]], None], "weight_epoch_spans": [[1, 2], None]},
            "weight_epoch_spans has 2 entries",
        ),
    ],
)
def test_spans_that_do_not_fit_are_named_and_the_oldest_version_stands(
    changes: dict[str, Any], message: str
) -> None:
    batch = parse_batch([make_group(weight_versions=[4, 5], **changes)], 100, VOCAB, version=6)
    assert versions(batch) == [[4, 4], [5, 5, 5]]
    assert not batch.invalid, "the group is trained on all the same"
    assert len(batch.unusable_spans) == 1
    assert message in batch.unusable_spans[0]


def test_spans_that_are_no_list_are_passed_over() -> None:
    group = make_group(weight_versions=[4, 5], weight_version_spans={"0": [[5, 2]], "1": [[5, 3]]})
    batch = parse_batch([group], 100, VOCAB, version=6)
    assert versions(batch) == [[4, 4], [5, 5, 5]]
    assert (
        batch.unusable_spans[1]
        == "sequence 1 of group 0: weight_version_spans or weight_epoch_spans is no list"
    )
