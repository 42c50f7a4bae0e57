"""Logprobs of a teacher and of the reference on the wire: read with their groups, found by token."""

from __future__ import annotations

import gc
import json
import math
import re
import sys
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atroposlib.wire import PROMPT_LOGPROB
from example_trainer.batch.groups import (
    Batch,
    GroupError,
    Rules,
    parse_batch,
    teacher_logprobs,
    wire_row,
)
from example_trainer.batch.packing import PackedBin, completed_reference, pack_batch, part_of
from example_trainer.batch.reader import BatchReader
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError

OPTIONAL = Rules(reference="optional")
LOGPROBS = st.floats(max_value=0.0, min_value=float(np.finfo(np.float32).min), width=32)


def group(**fields: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 2, 3, 4], [1, 2, 5]],
        "masks": [[-100, -100, 3, 4], [-100, -100, 5]],
        "scores": [1.0, 0.0],
        "ref_logprobs": [[1.0, 1.0, -0.5, -0.25], [1.0, 1.0, -2.0]],
    } | fields


def read(one: dict[str, Any], rules: Rules = OPTIONAL, longest: int = 64) -> Batch:
    return parse_batch([one], longest, 64, rules)


def rows_of(batch: Batch) -> list[Any]:
    return [
        s["reference_logprobs"].tolist() if "reference_logprobs" in s.fields else None
        for s in batch.sequences
    ]


def test_what_came_along_is_read_at_the_trained_positions() -> None:
    assert rows_of(read(group())) == [[-0.5, -0.25], [-2.0]]


@pytest.mark.parametrize("nothing", [None, []])
def test_a_group_without_them_is_trained_on_all_the_same(nothing: Any) -> None:
    assert rows_of(read(group(ref_logprobs=nothing))) == [None, None]


def test_without_a_reference_nobody_looks_at_them() -> None:
    assert rows_of(read(group(ref_logprobs=[[0.0]]), Rules())) == [None, None]


def test_a_placeholder_is_a_token_that_nobody_scored() -> None:
    batch = read(group(ref_logprobs=[[1.0, 1.0, 1.0, -0.25], [9.0, 9.0, 1e-4]]))
    assert np.isnan(batch.sequences[0]["reference_logprobs"]).tolist() == [True, False]
    assert rows_of(batch)[1] == [pytest.approx(1e-4)], "rounding, and no placeholder"


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([[1.0, 1.0, -0.5, -0.25]], "ref_logprobs has 1 sequences, tokens has 2"),
        (
            [[1.0, 1.0, -0.5, -0.25], [1.0, -2.0]],
            r"ref_logprobs\[1\] has 2 entries, tokens\[1\] has 3",
        ),
        (
            [[1.0, 1.0, float("nan"), -0.25], [1.0, 1.0, -2.0]],
            r"ref_logprobs\[0\] holds NaN or infinity at a trained",
        ),
        ([[1.0, 1.0, -0.5, -1e300], [1.0, 1.0, -2.0]], r"ref_logprobs\[0\] holds NaN or infinity"),
        ([["a"], [1.0]], "ref_logprobs is not a list of lists of numbers"),
        (7, "ref_logprobs is missing or empty"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_what_does_not_line_up_leaves_the_group_out_with_the_reason(rows: Any, told: str) -> None:
    batch = read(group(ref_logprobs=rows))
    assert not batch.sequences
    (problem,) = batch.invalid
    assert re.search(told, problem)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (
            None,
            "ref_logprobs is missing, and with --ref-logprobs-from-workers no reference is loaded here",
        ),
        (
            [[1.0, 1.0, -0.5, -0.25], [1.0, 1.0, 1.0]],
            "ref_logprobs[1] has placeholders at 1 of 1 trained positions",
        ),
    ],
)
def test_where_no_reference_is_loaded_a_group_without_them_is_left_out(
    rows: Any, told: str
) -> None:
    required = Rules(reference="required")
    (problem,) = read(group(ref_logprobs=rows), required).invalid
    assert told in problem
    assert rows_of(read(group(), required)) == [[-0.5, -0.25], [-2.0]]


def test_of_what_is_too_long_nothing_is_required() -> None:
    rows = [[1.0] * 4, [1.0, 1.0, -2.0]]
    batch = read(group(ref_logprobs=rows), Rules(reference="required"), longest=3)
    assert (batch.invalid, [len(s.positions) for s in batch.sequences]) == ([], [0, 1])


@given(st.lists(LOGPROBS, min_size=1, max_size=20), st.integers(1, 5))
def test_every_bit_survives_the_wire(values: list[float], before: int) -> None:
    logprobs = np.array(values, dtype=np.float32)
    length = before + len(values)
    row = wire_row(length, np.arange(before, length), logprobs)
    assert row[:before] == [PROMPT_LOGPROB] * before
    for arrived in (orjson.loads(orjson.dumps(row)), json.loads(json.dumps(row))):
        tokens = [1] * length
        one = group(
            tokens=[tokens],
            masks=[[-100] * before + tokens[before:]],
            scores=[1.0],
            ref_logprobs=[arrived],
        )
        (sequence,) = read(one).sequences
        assert sequence["reference_logprobs"].tobytes() == logprobs.tobytes()


# ---- the passes that are left to make ----
def logprobs_by_tokens(bin: PackedBin) -> Tensor:
    """In a model's place: a number that each token's whole past decides, read through the spans as
    attention does.
    """
    packing = bin.packing
    ends: list[list[int]] = []
    past: dict[int, list[int]] = {}
    for number, (begin, end) in enumerate(packing.spans()):
        parent = packing.parents[number]
        seen = list(ends[parent]) if parent >= 0 else []
        for place in range(begin, end):
            seen = [*seen, int(bin.tokens[place])]
            past[place] = seen
        ends.append(seen)
    pairs = zip(
        bin.sources.tolist(), bin.targets.tolist(), bin["temperatures"].tolist(), strict=True
    )
    told = [
        -(hash((tuple(past[source]), target, heat)) % 10007) / 7 for source, target, heat in pairs
    ]
    return torch.tensor(told, dtype=torch.float32)


@st.composite
def batches(draw: st.DrawFn) -> list[dict[str, Any]]:
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=40))
        answers = draw(
            st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=4)
        )
        scored = draw(st.lists(st.booleans(), min_size=len(answers), max_size=len(answers)))
        groups.append(
            {
                "tokens": [prompt + answer for answer in answers],
                "masks": [[-100] * len(prompt) + answer for answer in answers],
                "scores": [float(number) for number in range(len(answers))],
                "ref_logprobs": [
                    [1.0] * len(prompt) + [-0.5 if known else 1.0] * len(answer)
                    for answer, known in zip(answers, scored, strict=True)
                ],
            }
        )
    return groups


def packed(
    groups: list[dict[str, Any]], budget: int, ranks: int, share: bool
) -> list[list[PackedBin]]:
    (shares,) = pack_batch(
        parse_batch(groups, 64, 10, OPTIONAL), tokens_per_bin=budget, ranks=ranks, normalisation="token", max_tokens=64,
        share_prefixes=share,
    )  # fmt: skip
    return shares


@settings(max_examples=60)
@given(batches(), st.integers(20, 200), st.integers(1, 3), st.booleans())
def test_only_what_is_missing_is_computed_and_it_is_what_a_pass_over_all_would_have_given(
    groups: list[dict[str, Any]], budget: int, ranks: int, share: bool
) -> None:
    shares = packed(groups, budget, ranks, share)
    for at_once in zip(*shares, strict=True):
        passes: list[PackedBin] = []

        def compute(part: PackedBin, passes: list[PackedBin] = passes) -> Tensor:
            passes.append(part)
            return logprobs_by_tokens(part)

        for one in at_once:
            found = completed_reference(one, compute)
            expected = torch.where(
                one["reference_logprobs"].isnan(),
                logprobs_by_tokens(one),
                one["reference_logprobs"],
            )
            assert torch.equal(found, expected)
        missing = sum(int(one.unreferenced.sum()) for one in at_once)
        assert len(passes) == (len(at_once) if missing else 0), "every rank makes the same passes"
        assert sum(len(part.targets) for part in passes) == missing, (
            "and no more than those tokens are in them"
        )


def test_a_part_has_the_spans_that_it_needs_and_no_others() -> None:
    prompt = [number % 10 for number in range(30)]
    tokens = [[*prompt, answer, answer] for answer in (3, 4, 5)]
    masks = [[-100] * 30 + row[30:] for row in tokens]
    ((whole,),) = packed(
        [{"tokens": tokens, "masks": masks, "scores": [0.0, 1.0, 2.0]}], 200, 1, share=True
    )
    part, rows = part_of(whole, [1])
    assert (part.lengths.tolist(), part.parents.tolist(), part.counts.tolist()) == (
        [30, 2],
        [-1, 0],
        [2],
    )
    assert (part.tokens.tolist(), part.sources.tolist(), rows.tolist()) == (
        [*prompt, 4, 4],
        [29, 30],
        [2, 3],
    )


TOKENS = np.array([5, 7, 9, 7], dtype=np.int64)
POSITIONS = np.array([1, 2, 3], dtype=np.int64)


def group_teacher_logprobs(ids: object, logprobs: object) -> dict[str, object]:
    """Two sequences; the test needs the second one."""
    return {
        "tokens": [[1], TOKENS.tolist()],
        "distill_token_ids": [[[1]], ids],
        "distill_logprobs": [[[0.0]], logprobs],
    }


def read_teacher_logprobs(ids: object, logprobs: object) -> np.ndarray | None:
    return teacher_logprobs(group_teacher_logprobs(ids, logprobs), 1, TOKENS, POSITIONS)


def test_the_sampled_token_is_found_wherever_it_stands_among_the_ids() -> None:
    found = read_teacher_logprobs(
        [[], [7], [3, 9, 4], [8, 2]], [[], [-0.5], [-4.0, -1.25, -3.0], [-0.1, -0.2]]
    )
    assert found is not None
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([-0.5, -1.25, np.nan], dtype=np.float32))


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), min_size=4, max_size=4),
    st.randoms(),
)
def test_what_is_read_is_the_entry_of_the_token(ids: list[list[int]], random: object) -> None:
    logprobs = [[-random.random() for _ in row] for row in ids]  # type: ignore[attr-defined]
    found = read_teacher_logprobs(*json.loads(json.dumps([ids, logprobs])))
    assert found is not None
    for value, position in zip(found, POSITIONS, strict=True):
        table = dict(zip(ids[position], logprobs[position], strict=True))
        assert value == np.float32(table.get(int(TOKENS[position]), math.nan)) or (
            math.isnan(value) and int(TOKENS[position]) not in table
        )


def statements(tokens: int) -> int:
    """Lines of Python that reading so many trained tokens takes."""
    row = np.arange(tokens, dtype=np.int64)
    whole = {
        "tokens": [row.tolist()],
        "distill_token_ids": [[[t] for t in row.tolist()]],
        "distill_logprobs": [[[-1]] * tokens],
    }
    seen = 0

    def count(frame: object, event: str, argument: object) -> object:
        nonlocal seen
        seen += event == "line"
        return count

    before = sys.gettrace()
    gc.disable()  # hypothesis has statements of its own run whenever something is collected
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        found = teacher_logprobs(whole, 0, row, row[1:])
    finally:
        sys.settrace(before)
        gc.enable()
    assert found is not None
    assert found.tolist() == [-1.0] * (tokens - 1)
    assert found.dtype == np.float32
    return seen


def test_what_the_sdk_sends_is_read_without_a_statement_for_each_token() -> None:
    assert 0 < statements(20) == statements(400)


def test_without_a_teacher_there_is_nothing() -> None:
    bare = {"tokens": [TOKENS.tolist()]}
    assert teacher_logprobs(bare, 0, TOKENS, POSITIONS) is None
    empty = {**bare, "distill_token_ids": None, "distill_logprobs": None}
    assert teacher_logprobs(empty, 0, TOKENS, POSITIONS) is None


ONE = [[], [7], [9], [7]]
GOOD = [[], [-1.0], [-1.0], [-1.0]]


@pytest.mark.parametrize(
    ("ids", "logprobs", "named"),
    [
        (ONE[:3], GOOD, "distill_token_ids[1] has 3 entries, tokens[1] has 4"),
        (ONE, GOOD[1:], "distill_logprobs[1] has 3 entries, tokens[1] has 4"),
        (ONE, None, "distill_logprobs[1] has no entries, tokens[1] has 4"),
        (
            ONE,
            [[], [-1.0], [], [-1.0]],
            "distill_logprobs[1][2] has 0 entries, distill_token_ids[1][2] has 1",
        ),
        (ONE, [[], [-1.0], -1.0, [-1.0]], "distill_logprobs[1][2] is not a list"),
        (
            ONE,
            [[], [-1.0], [-1.0], [1.0]],
            "distill_logprobs[1][3] holds 1.0 for token 7, which is not a logprob",
        ),
        (ONE, [[], [-1.0], [math.nan], [-1.0]], "distill_logprobs[1][2] holds nan for token 9"),
        (ONE, [[], [-math.inf], [-1.0], [-1.0]], "distill_logprobs[1][1] holds -inf for token 7"),
        (ONE, [[], [None], [-1.0], [-1.0]], "distill_logprobs[1][1] holds None for token 7"),
        (ONE, [[], [True], [-1.0], [-1.0]], "distill_logprobs[1][1] holds True for token 7"),
        (ONE, [[], ["-1"], [-1.0], [-1.0]], "distill_logprobs[1][1] holds '-1' for token 7"),
        (ONE, [[], [-1e39], [-1.0], [-1.0]], "distill_logprobs[1][1] holds -1e+39 for token 7"),
        (ONE, [[], [-(10**400)], [-1.0], [-1.0]], "distill_logprobs[1][1] holds -1000000"),
    ],
)
def test_what_does_not_line_up_is_refused_by_its_index(
    ids: object, logprobs: object, named: str
) -> None:
    with pytest.raises(GroupError) as error:
        read_teacher_logprobs(ids, logprobs)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["distill_token_ids", "distill_logprobs"])
def test_one_field_without_the_other_is_refused(field: str) -> None:
    with pytest.raises(GroupError, match=rf"{field} has no entries, tokens has 2 sequences"):
        teacher_logprobs({**group_teacher_logprobs(ONE, GOOD), field: None}, 1, TOKENS, POSITIONS)


def posted(ids: object, logprobs: object) -> dict[str, object]:
    """A group of two sequences of equal scores, with these scores of the teacher."""
    return {
        "tokens": [TOKENS.tolist()] * 2,
        "masks": [[-100, *TOKENS.tolist()[1:]]] * 2,
        "scores": [1.0, 1.0],
        "distill_token_ids": ids,
        "distill_logprobs": logprobs,
    }


def test_a_batch_carries_them_to_its_bins(caplog: pytest.LogCaptureFixture) -> None:
    reader = BatchReader(
        TrainerConfig(model_name="m", distill_coef=0.5), vocab_size=16, tokens_per_bin=64
    )
    for _ in range(2):
        packed = reader.read(
            [posted([ONE, [[], [7], [3], [7]]], [GOOD, GOOD]), posted(None, None)], 0
        )
        (minibatch,) = packed.minibatches
        found = np.concatenate([bin["teacher_logprobs"].numpy() for bin in minibatch[0]])
        assert np.isfinite(found).sum() == 5, (
            "equal scores are forwarded, too: a teacher has to say something of them"
        )
        assert len(found) == 12
    assert (
        caplog.text.count("58.3% of the trained tokens of a batch have no teacher's logprob") == 1
    )


def test_a_student_of_another_temperature_than_the_teachers_is_noted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group_teacher_logprobs, note = (
        posted([ONE, ONE], [GOOD, GOOD]),
        "sequences were sampled at another temperature than 1, such as",
    )
    reader = BatchReader(
        TrainerConfig(model_name="m", distill_coef=0.5), vocab_size=16, tokens_per_bin=64
    )
    reader.read(
        [
            group_teacher_logprobs,
            posted(None, None) | {"sampling_params": [{"temperature": 0.5}] * 2},
        ],
        0,
    )
    assert note not in caplog.text, "no teacher scored what was sampled at 0.5"
    for _ in range(2):
        reader.read(
            [
                group_teacher_logprobs
                | {"sampling_params": [{"temperature": 1}, {"temperature": 0.7}]}
            ],
            0,
        )
    assert caplog.text.count(f"1 of 2 {note} 0.7: ") == 1
    hot = TrainerConfig(model_name="m", distill_coef=0.5, temperature=1.5)
    BatchReader(hot, vocab_size=16, tokens_per_bin=64).read([group_teacher_logprobs], 0)
    assert f"2 of 2 {note} 1.5: " in caplog.text


def test_a_batch_that_no_teacher_scored_is_refused_where_one_is_to_be_learned_from() -> None:
    bare = [posted(None, None)]
    with pytest.raises(
        BatchError, match=r"none of the 6 trained tokens of this batch has a teacher's logprob"
    ):
        BatchReader(
            TrainerConfig(model_name="m", distill_coef=0.5), vocab_size=16, tokens_per_bin=64
        ).read(bare, 0)
    assert (
        BatchReader(TrainerConfig(model_name="m"), vocab_size=16, tokens_per_bin=64)
        .read(bare, 0)
        .minibatches
    )
