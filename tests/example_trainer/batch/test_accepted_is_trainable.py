"""Every group that the rollout service accepts, the trainer reads and trains on: groups by the
grammar of JSON, odd numbers among them.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atroposlib.service.group_reader import read_groups
from atroposlib.service.schemas import InvalidRequestError
from atroposlib.wire import LARGEST_SCORE, wrong_shape
from example_trainer.batch.groups import Rules, parse_batch

VOCABULARY = 2**31
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.integers(20, 5000).map(lambda digits: "9" * digits),
    st.floats().map(lambda value: json.dumps(value)),
    st.sampled_from(
        [
            "1e9",
            "1000000001",
            "-1e9",
            "1e30",
            "1e39",
            "-1e39",
            "1e160",
            "1e308",
            "1e400",
            "-1e400",
            "1e-400",
            "-0",
            "0.0",
            "NaN",
            "-Infinity",
        ]
    ),
    st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1]).map(str),
)
TEXTS = st.one_of(
    st.text(max_size=5).map(json.dumps),
    st.text(max_size=5).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from(['"\\ud800"', '"\\udc00x"', '"\\ud83d\\ude00"', '"\\u0000"', '"\x01"']),
)
LEAVES = st.one_of(NUMBERS, TEXTS, st.sampled_from(["true", "false", "null"]))
VALUES = st.one_of(
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
            st.lists(st.tuples(TEXTS, inner), max_size=3).map(
                lambda pairs: "{" + ",".join(f"{key}:{value}" for key, value in pairs) + "}"
            ),
        ),
        max_leaves=6,
    ),
    st.integers(1, 1500).map(lambda depth: "[" * depth + "]" * depth),
)
FREE = st.sampled_from(
    ["answer", "images", "generation_params", "group_overrides", "messages", "scores", "\\ud800"]
)


def rows(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(values, min_size=3, max_size=3).map(lambda row: f"[[{','.join(row)}],[0,0,0]]")


FIELDS = st.one_of(
    st.tuples(FREE, VALUES),
    st.tuples(
        st.just("scores"), st.tuples(NUMBERS, NUMBERS).map(lambda pair: f"[{pair[0]},{pair[1]}]")
    ),
    st.tuples(st.sampled_from(["advantages", "inference_logprobs", "ref_logprobs"]), rows(NUMBERS)),
    st.tuples(st.just("env_id"), NUMBERS),
    st.tuples(st.just("weight_versions"), NUMBERS.map(lambda number: f"[{number},0]")),
)
GROUP = '"tokens":[[1,2,3],[4,5,6]],"masks":[[-100,2,3],[-100,5,6]],"scores":[0,1]'


def posted(fields: list[tuple[str, str]]) -> bytes:
    return (
        "{" + ",".join([GROUP, *(f'"{name}":{value}' for name, value in fields)]) + "}"
    ).encode()


@settings(max_examples=600, deadline=None)
@example([("answer", "9" * 400)])
@example([("answer", "9" * 400), ("answer", "1")])
@example([("answer", "NaN"), ("answer", "1")])
@example([("scores", "[1e160,0]")])
@example([("scores", "[1e9,-1e9]")])
@example([("advantages", "[[1e9,-1e9,0],[0,0,0]]")])
@given(st.lists(FIELDS, max_size=4))
def test_what_the_service_accepts_the_trainer_trains_on(fields: list[tuple[str, str]]) -> None:
    try:
        (draft,) = read_groups(posted(fields), False)
    except InvalidRequestError as refusal:
        orjson.dumps(refusal.errors)  # the answer can be sent
        return
    group = orjson.loads(draft.body)
    batch = parse_batch([group], 100, VOCABULARY, Rules(reference="optional"), 0)
    assert not batch.invalid
    for sequence in batch.sequences:
        assert np.isfinite(sequence["advantages"]).all()
        assert np.isfinite(np.square(sequence["advantages"])).all()


@pytest.mark.parametrize(
    ("fields", "where", "says"),
    [
        (
            '"scores":[0,1e39]',
            ["scores", 1],
            "scores[1] is 1e+39: its magnitude must be at most 1e+09",
        ),
        (
            '"scores":[-1e160,1]',
            ["scores", 0],
            "scores[0] is -1e+160: its magnitude must be at most 1e+09",
        ),
        (
            '"advantages":[[0],[1e30]]',
            ["advantages", 1, 0],
            "advantages[1][0] is 1e+30: its magnitude must be at most 1e+09",
        ),
        (
            '"inference_logprobs":[[1,0,-1e39],[1,0,0]]',
            ["inference_logprobs", 0, 2],
            "at most 3.40282e+38",
        ),
        (
            '"distill_token_ids":[[[1],[1],[9999999999]],[[],[],[]]]',
            ["distill_token_ids", 0, 2, 0],
            "at most 2.14748e+09",
        ),
        (
            '"answer":{"x":[18446744073709551616]}',
            ["answer", "x", 0],
            "between -9223372036854775808 and 18446744073709551615",
        ),
        (
            f'"answer":{"9" * 400}',
            ["answer"],
            "answer is an integer of 1329 bits: an integer must lie between",
        ),
        (f'"answer":{"[" * 101}{"]" * 101}', ["answer"], "more than 100 levels"),
        (f'"answer":{"[" * 1000}{"]" * 1000}', ["answer"], "more than 100 levels"),
        ('"answer":"\\ud800"', [], "Invalid JSON"),
    ],
)
def test_a_refusal_names_the_field_the_value_and_the_bound(
    fields: str, where: list[Any], says: str
) -> None:
    for many in (False, True):
        body = "{" + f"{GROUP},{fields}" + "}"
        with pytest.raises(InvalidRequestError) as caught:
            read_groups((f"[{body}]" if many else body).encode(), many)
        (error,) = caught.value.errors
        assert says in error["msg"]
        if "Invalid JSON" not in says:
            assert error["loc"] == ["body", *([0] if many else []), *where]


def test_a_body_that_trainers_could_not_read_is_written_again() -> None:
    twice = "{" + GROUP + f',"answer":{"9" * 400},"answer":1' + "}"
    (group,) = read_groups(twice.encode(), False)
    assert orjson.loads(group.body)["answer"] == 1


def test_a_float_above_64_bits_is_kept() -> None:
    (group,) = read_groups(("{" + GROUP + ',"answer":[1e300,-2e19]}').encode(), False)
    assert orjson.loads(group.body)["answer"] == [1e300, -2e19]


def test_the_sdk_refuses_with_the_same_bounds() -> None:
    group: dict[str, Any] = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [0.0]}
    assert wrong_shape(group, 1) is None
    assert wrong_shape(group | {"scores": [LARGEST_SCORE]}, 1) is None
    assert (
        wrong_shape(group | {"scores": [1e39]}, 1)
        == "scores[0] is 1e+39: its magnitude must be at most 1e+09"
    )
    assert (
        wrong_shape(group | {"scores": [-1e160]}, 1)
        == "scores[0] is -1e+160: its magnitude must be at most 1e+09"
    )
    assert (
        wrong_shape(group | {"advantages": [[1e30]]}, 1)
        == "advantages[0][0] is 1e+30: its magnitude must be at most 1e+09"
    )
    beyond = wrong_shape(group | {"advantages": [[0, 10**400]]}, 1)
    assert beyond is not None
    assert beyond.startswith("advantages[0][1] is 1000")
    assert (
        wrong_shape(group | {"ref_logprobs": [[0.0, float("nan")]]}, 1)
        == "ref_logprobs[0] holds a number that is not finite"
    )


def test_the_trainer_names_what_an_older_store_holds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    good = orjson.loads(posted([]))
    batch = parse_batch(
        [good | {"scores": [1e39, 0]}, good | {"advantages": [[1e30], [0]]}, good], 100, VOCABULARY
    )
    assert batch.invalid == [
        "group 0: scores[0] is 1e+39: its magnitude must be at most 1e+09",
        "group 1: advantages[0] holds 1e+30: its magnitude must be at most 1e+09",
    ]
    assert len(batch.sequences) == 2
