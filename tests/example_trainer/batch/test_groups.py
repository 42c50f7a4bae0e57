"""Groups become sequences: advantages, overrides, weights, ages, the penalty of a long answer, and the fields of tokens."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.wire import PER_TOKEN, TrainerSession
from example_trainer.algorithm.advantages import find_advantages
from example_trainer.batch.groups import (
    NOT_TRAINED,
    TOKEN_FIELDS,
    Batch,
    LengthRules,
    Rules,
    TokenField,
    age,
    parse_batch,
)
from example_trainer.batch.packing import PackedBin, empty_bin, pack_batch, part_of
from example_trainer.batch.prefetch import decode, encode
from example_trainer.batch.reader import BatchReader
from example_trainer.config import TrainerConfig

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
        ({"tokens": [["a"]]}, "tokens is not a list of lists of numbers"),
        ({"tokens": [1, 2]}, "tokens is not a list of lists of numbers"),
        (
            {"tokens": [[1, 2, 3, 4.5], [1, 2, 5, 6, 7]]},
            "tokens is not a list of lists of numbers (one of them is not a whole number)",
        ),
        ({"tokens": [[1, 2, 3, "4"], [1, 2, 5, 6, 7]]}, "one of them is not a whole number"),
        ({"tokens": [[1, 2, 3, 2**64 - 4], [1, 2, 5, 6, 7]]}, "one of them is not a whole number"),
        (
            {"masks": [[-100, -100, 3, 4.5], [-100, -100, 5, 6, 7]]},
            "masks is not a list of lists of numbers",
        ),
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
        ({"scores": [1.0, math.nan]}, "scores holds something that is not a finite number"),
        ({"scores": [1.0, None]}, "scores holds something that is not a finite number"),
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
        ({"overrides": [{}, 3]}, "overrides[1] is not an object: 3"),
        (
            {"group_overrides": ["set_advantage_to_zero"]},
            "group_overrides is not an object: ['set_advantage_to_zero']",
        ),
        (
            {"weight_versions": [1, "x"]},
            "weight_versions holds something that is not a number (invalid literal",
        ),
        ({"weight_versions": [1, [2]]}, "weight_versions holds something that is not a number"),
        (
            {"weight_versions": [1, 2**64 - 1]},
            "weight_versions holds something that is not a number",
        ),
        (
            {"weight_versions": [1, 2], "weight_epochs": [1, math.inf]},
            "weight_epochs holds something that is not a number",
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
        == "sequence 1 of group 0: weight_version_spans or weight_epoch_spans is not a list"
    )


# Killed at 17, resumed at 10; killed again, resumed at 12.
LIVES_AGES = [TrainerSession(100, 0), TrainerSession(200, 10), TrainerSession(300, 12)]


@pytest.mark.parametrize(
    ("version", "epoch", "present", "expected"),
    [
        (14, 300, 15, 1),
        (12, 300, 12, 0),
        (11, 200, 15, 4),  # in the line: the third life went on from 12
        (10, 100, 12, 2),  # where the second life took over
        (17, 100, 12, 3),  # thrown away at 10, so older than 10
        (14, 200, 13, 2),  # thrown away at 12
        (0, 0, 12, 12),  # the model as it was at first
        (5, None, 12, 7),  # without an owner: taken for this line's,
        (17, None, 12, 1),  # unless it cannot be
        (17, 0, 12, 1),
        (20, 400, 13, 2),  # of a trainer that has replaced this one
    ],
)
def test_ages_in_a_run_that_went_back_twice(
    version: int, epoch: int | None, present: int, expected: int
) -> None:
    assert age(version, epoch, present, LIVES_AGES) == expected


def test_without_lives_versions_alone_count() -> None:
    assert age(3, 100, 5, []) == 2
    assert age(9, 100, 5, []) == 0


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[TrainerSession], int, int, int]:
    """Lives, each resumed from a step that the one before had reached; weights of one; the
    trainer's version.
    """
    lives, reached = [TrainerSession(1, 0)], [draw(st.integers(0, 20))]
    for number in range(draw(st.integers(0, 4))):
        start = draw(st.integers(lives[-1].start, reached[-1]))
        lives.append(TrainerSession(number + 2, start))
        reached.append(start + draw(st.integers(0, 20)))
    which = draw(st.integers(0, len(lives) - 1))
    return (
        lives,
        lives[which].epoch,
        draw(st.integers(lives[which].start, reached[which])),
        reached[-1],
    )


@given(histories())
def test_the_age_is_that_on_the_line_which_is_trained_on(
    history: tuple[list[TrainerSession], int, int, int],
) -> None:
    lives, epoch, version, present = history
    later = [life.start for life in lives if life.epoch > epoch]
    left = [start for start in later if version > start]
    expected = present - (min(left) - 1 if left else version)
    assert age(version, epoch, present, lives) == expected >= 0
    assert all(one.epoch < other.epoch for one, other in pairwise(lives))


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 250), st.floats(0.1, 4.0))
def test_the_penalty_is_the_papers(tokens: int, limit: int, buffer: int, most: float) -> None:
    found = LengthRules("penalise", buffer, most).penalty(tokens, limit)
    buffer = min(buffer, limit)
    if tokens <= limit - buffer:
        assert found == 0
    elif tokens <= limit:
        assert abs(found - most * ((limit - buffer) - tokens) / buffer) < 1e-12
    else:
        assert found == -most
    assert LengthRules("train", buffer, most).penalty(tokens, limit) == 0


def test_an_empty_answer_is_never_penalised() -> None:
    rules = LengthRules("penalise", buffer=128, most=1.0)
    assert [rules.penalty(tokens, 64) for tokens in (0, 32, 64, 65)] == [0.0, -0.5, -1.0, -1.0]
    assert rules.penalty(1, 0) == -1.0


def group_of(limit: int, **more: object) -> dict[str, object]:
    return make_group(sampling_params=[{"temperature": 1, "max_tokens": limit}] * 2, **more)


def test_a_limit_below_the_buffer_and_advantages_without_penalty_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = TrainerConfig(model_name="m", truncated_answers="penalise", overlong_buffer=16)
    reader = BatchReader(config, VOCAB, tokens_per_bin=64)
    reader.read([group_of(16)], 0)
    assert not caplog.records
    for _ in range(2):
        reader.read([group_of(12), group_of(9), group_of(16, advantages=[1.0, 2.0])], 0)
    assert [record.getMessage() for record in caplog.records] == [
        "Answers may be 9 tokens long, and --overlong-buffer is 16: they are penalised from their first token on; give a "
        "smaller buffer",
        "1 of a batch's groups bring advantages of their own, which --truncated-answers penalise leaves as they are",
    ]
    caplog.clear()
    BatchReader(TrainerConfig(model_name="m"), VOCAB, tokens_per_bin=64).read(
        [group_of(9, advantages=[1.0, 2.0])], 0
    )
    assert not caplog.records


INVENTED = TokenField(np.float32, -7.0, "surprises", largest=5.0)


def group(**changes: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 2, 3, 4], [1, 2, 5]],
        "masks": [[-100, -100, 3, 4], [-100, -100, 5]],
        "scores": [1.0, 0.0],
        "surprises": [[9.0, 9.0, 0.5, 9.0], [9.0, 9.0, 0.25]],
    } | changes


def packed(batch: Batch) -> PackedBin:
    (((one,),),) = pack_batch(
        batch,
        tokens_per_bin=100,
        ranks=1,
        normalisation="token",
        max_tokens=64,
        share_prefixes=True,
    )
    return one


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOKEN_FIELDS, "invented", INVENTED)


@pytest.mark.usefixtures("invented")
def test_a_new_field_of_a_group_arrives_in_the_bin_and_on_other_ranks() -> None:
    batch = parse_batch([group()], 64, 10)
    one, other = batch.sequences
    assert (one["invented"].tolist(), other["invented"].tolist()) == ([0.5, -7.0], [0.25])
    assert len(one.masked()["invented"]) == 0
    bin = packed(batch)
    by_sequence = dict(
        zip(
            map(tuple, bin.orders.tolist()), bin["invented"].split(bin.counts.tolist()), strict=True
        )
    )
    assert by_sequence[0, 0].tolist() == [0.5, -7.0]
    assert by_sequence[0, 1].tolist() == [0.25]
    number = bin.orders.tolist().index([0, 1])
    part, _ = part_of(bin, [number])
    assert part["invented"].tolist() == [0.25]
    ((received,),) = decode(encode([[bin]]))
    assert torch.equal(received["invented"], bin["invented"])
    assert received["invented"].dtype == bin.to(torch.device("cpu"))["invented"].dtype
    assert empty_bin()["invented"].dtype == torch.float32


@pytest.mark.usefixtures("invented")
def test_a_sequence_without_the_field_has_its_fill_value() -> None:
    bin = packed(parse_batch([group(surprises=None)], 64, 10))
    assert bin["invented"].tolist() == [-7.0] * 3


@pytest.mark.usefixtures("invented")
@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([[1.0]], "surprises has 1 sequences, tokens has 2"),
        ([[1.0] * 4, [1.0]], "surprises[1] has 1 entries, tokens[1] has 3"),
        ([[1.0, 1.0, math.nan, 1.0], [1.0] * 3], "surprises[0] holds NaN or infinity"),
        ("x", "surprises is missing or empty"),
    ],
)
def test_a_field_that_does_not_fit_the_tokens_is_refused(rows: Any, problem: str) -> None:
    batch = parse_batch([group(surprises=rows)], 64, 10)
    assert problem in batch.invalid[0]


def test_fields_of_the_wire_are_the_wires_per_token_fields() -> None:
    assert {field.wire for field in TOKEN_FIELDS.values() if field.wire} <= PER_TOKEN.keys()


def test_a_field_orders_rollouts_by_its_own_numbers_alone() -> None:
    ones, half = np.ones(2, np.float32), np.full(2, 0.5, np.float32)
    temperatures = TOKEN_FIELDS["temperatures"]
    assert (temperatures.orders(ones), temperatures.orders(half)) == (False, True)
    assert not TOKEN_FIELDS["teacher_logprobs"].orders(np.full(2, np.nan, np.float32))
    assert TOKEN_FIELDS["versions"].orders(np.full(2, -1))
    assert not TOKEN_FIELDS["reference_logprobs"].orders(half)
