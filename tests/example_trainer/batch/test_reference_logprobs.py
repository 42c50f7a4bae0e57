"""Logprobs under the reference on the wire: read with all their bits, or refused by name; and which
passes are left to make.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atroposlib.wire import PROMPT_LOGPROB
from example_trainer.batch.groups import Batch, Rules, parse_batch, wire_row
from example_trainer.batch.packing import PackedBin, completed_reference, pack_batch, part_of

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
        ([["a"], [1.0]], "ref_logprobs is no list of lists of numbers"),
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
    packing = bin.packing()
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
