"""A field of trained tokens is one line of TOKEN_FIELDS: it comes from the group into the bin, over
any division of it, and to the other ranks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from atroposlib.wire import PER_TOKEN
from example_trainer.batch.groups import TOKEN_FIELDS, Batch, TokenField, parse_batch
from example_trainer.batch.packing import PackedBin, empty_bin, pack_batch, part_of
from example_trainer.batch.prefetch import decode, encode

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
