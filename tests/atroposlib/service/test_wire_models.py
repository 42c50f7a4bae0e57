"""The form of an accepted group, and refusals that name field, index and value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atroposlib.service.group_reader import RETURNED, _warn_of_another_field, read_groups
from atroposlib.service.schemas import (
    AnsweredReference,
    InvalidRequestError,
    PostedEvaluation,
    RegisterEnv,
    RegisterTrainer,
    read,
)
from atroposlib.wire import PER_SEQUENCE, REQUIRED
from tests.atroposlib.service.conftest import environment, group

NAN, INF = float("nan"), float("inf")


def refusal(body: dict[str, Any] | list[Any], many: bool = False) -> dict[str, Any]:
    with pytest.raises(InvalidRequestError) as caught:
        read_groups(json.dumps(body).encode(), many)
    return caught.value.errors[0]


@pytest.mark.parametrize(
    ("fields", "where", "says"),
    [
        ({"scores": [0.0, NAN, 1.0, 2.0]}, ["scores", 1], "scores[1] is 'nan'"),
        ({"scores": [0.0, 1.0, 2.0, -INF]}, ["scores", 3], "scores[3] is '-inf'"),
        ({"scores": [0.0]}, ["scores"], "scores has 1 entries for 4 sequences"),
        ({"tokens": []}, ["tokens"], "at least one sequence"),
        ({"tokens": [[1, 2, 3], [], [1, 2, 3], [1, 2, 3]]}, ["tokens", 1], "tokens[1] is []"),
        (
            {"tokens": [[1, 2, 3]] * 3 + [[1, 2, 2**40]]},
            ["tokens", 3, 2],
            f"is {2**40}: a token id is from 0 to 2147483647",
        ),
        (
            {"tokens": [[1, True, 3]] * 4},
            ["tokens", 0, 1],
            "tokens[0][1] is True: a boolean is not a number",
        ),
        ({"masks": [[-100, 2, False]] * 4}, ["masks", 0, 2], "masks[0][2] is False: "),
        ({"scores": [0, 1, 0, True]}, ["scores", 3], "scores[3] is True: "),
        ({"env_id": True}, ["env_id"], "env_id is True: "),
        (
            {"weight_version_spans": [[[True, 2]]] * 4},
            ["weight_version_spans", 0, 0, 0],
            "is True: a boolean is not a number",
        ),
        ({"tokens": [[1, 2, 3.5]] * 4}, ["tokens", 0, 2], "tokens[0][2] is 3.5"),
        ({"masks": [[1, 2, 3]] * 3}, ["masks"], "masks has 3 entries for 4 sequences"),
        (
            {"masks": [[1, 2, 3]] * 3 + [[1]]},
            ["masks", 3],
            "masks[3] has 1 entries for the 3 tokens",
        ),
        (
            {"inference_logprobs": [[1.0, -1.0]] * 4},
            ["inference_logprobs", 0],
            "has 2 entries for the 3 tokens",
        ),
        ({"inference_logprobs": [[1.0, NAN, 0.0]] * 4}, ["inference_logprobs", 0, 1], "'nan'"),
        ({"ref_logprobs": [[0.0] * 3] * 5}, ["ref_logprobs"], "has 5 entries"),
        ({"advantages": [[0.0, 0.0]] * 4}, ["advantages", 0], "has 2 entries"),
        ({"distill_logprobs": [[[0.0]]] * 4}, ["distill_logprobs", 0], "has 1 entries"),
        ({"weight_versions": [1, 2]}, ["weight_versions"], "has 2 entries"),
        ({"weight_versions": [1, 2, -1, 0]}, ["weight_versions", 2], "-1"),
        (
            {"weight_versions": [1] * 4, "weight_epochs": [1] * 3},
            ["weight_epochs"],
            "has 3 entries for 4 sequences",
        ),
        ({"weight_epochs": [1] * 4}, ["weight_epochs"], "has no meaning without weight_versions"),
        (
            {"weight_version_spans": [[[1, 2]]] * 3},
            ["weight_version_spans"],
            "has 3 entries for 4 sequences",
        ),
        (
            {"weight_version_spans": [[[1, 2]]] * 3 + [[[1, 2, 3]]]},
            ["weight_version_spans", 3, 0],
            "at most 2 items",
        ),
        (
            {"weight_version_spans": [[[1, 2]]] * 3 + [[[-1, 2]]]},
            ["weight_version_spans", 3, 0, 0],
            "is -1",
        ),
        (
            {"weight_version_spans": [[[1, 4]]] * 4},
            ["weight_version_spans", 0],
            "1 spans of 4 tokens, the sequence has 3",
        ),
        (
            {"weight_version_spans": [[[1, 0]] * 4] * 4},
            ["weight_version_spans", 0],
            "4 spans of 0 tokens, the sequence has 3",
        ),
        (
            {"weight_epoch_spans": [[7]] * 4},
            ["weight_epoch_spans"],
            "has no meaning without weight_version_spans",
        ),
        (
            {"weight_version_spans": [[[1, 2]]] * 4, "weight_epoch_spans": [[7]] * 3 + [[7, 8]]},
            ["weight_epoch_spans", 3],
            "has 2 entries for 1 spans",
        ),
        (
            {"sampling_params": [{"temperature": 1}] * 3},
            ["sampling_params"],
            "has 3 entries for 4 sequences",
        ),
        (
            {"sampling_params": [{"temperature": 1}] * 3 + ["hot"]},
            ["sampling_params", 3],
            "is 'hot': it must be an obj",
        ),
        (
            {"sampling_params": {"temperature": NAN}},
            ["sampling_params", "temperature"],
            "is nan: every number",
        ),
        (
            {"sampling_params": [{"temperature": -0.5}] * 4},
            ["sampling_params", 0, "temperature"],
            "is -0.5: it must be",
        ),
        (
            {"sampling_params": [{"temperature": 1e-46}] * 4},
            ["sampling_params", 0, "temperature"],
            "1e-46: it must be 0, or a n",
        ),
        (
            {"sampling_params": [{"temperature": 1e39}] * 4},
            ["sampling_params", 0, "temperature"],
            "a number that float32 holds",
        ),
        (
            {"sampling_params": [{"temperature": NAN}] * 4},
            ["sampling_params", 0, "temperature"],
            "'nan': it must be a finite",
        ),
        (
            {"sampling_params": [{"temperature": 1, "top_p": INF}] * 4},
            ["sampling_params", 0, "top_p"],
            "must be a finite number",
        ),
        (
            {"sampling_params": [{"temperature": "1"}] * 4},
            ["sampling_params", 0, "temperature"],
            "'1': it must be a finite",
        ),
        (
            {"sampling_params": [{"temperature": True}] * 4},
            ["sampling_params", 0, "temperature"],
            "True: it must be a finite",
        ),
        (
            {"sampling_params": [{"temperature": 10**400}] * 4},
            ["sampling_params", 0, "temperature"],
            "it must be a finite",
        ),
        ({"sampling_params": [[]] * 4}, ["sampling_params", 0], "is []: leave sampling_params out"),
        (
            {"sampling_params": [[{"temperature": 1}]] * 4},
            ["sampling_params", 0, 0, "tokens"],
            "each part has its number",
        ),
        (
            {"sampling_params": [[{"temperature": 1, "tokens": 4}]] * 4},
            ["sampling_params", 0],
            "1 parts of 4 tokens, the",
        ),
        ({"finish_reasons": ["stop"] * 3}, ["finish_reasons"], "has 3 entries for 4 sequences"),
        (
            {"finish_reasons": ["stop"] * 3 + [7]},
            ["finish_reasons", 3],
            "is 7: it must be a string of at most 64",
        ),
        (
            {"finish_reasons": ["x" * 65] * 4},
            ["finish_reasons", 0],
            "of at most 64 characters, or null",
        ),
        ({"overrides": [{}] * 3}, ["overrides"], "has 3 entries for 4 sequences"),
        ({"successes": [True] * 3}, ["successes"], "has 3 entries for 4 sequences"),
        ({"successes": [True] * 3 + [2]}, ["successes", 3], "is 2: it must be true, false or null"),
        (
            {"tokens": [[1, 2, 3]] * 3 + [[1, -2, 3]]},
            ["tokens", 3, 1],
            "is -2: a token id is from 0",
        ),
        ({"tokens": [[-100, 2, 3]] * 4}, ["tokens", 0, 0], "is -100: a token id is from 0"),
        (
            {"masks": [[-100, 2, 3]] * 3 + [[-100, 2, -1]]},
            ["masks", 3, 2],
            "is -1: a mask holds -100 where nothing",
        ),
        (
            {"masks": [[-100, 2, 3]] * 3 + [[-100, 2, 2**31]]},
            ["masks", 3, 2],
            "is 2147483648: a mask holds -100 where",
        ),
        ({"masks": [[-100] * 3] * 4}, ["masks"], "leaves no token to train on"),
        ({"masks": [[7, -100, -100]] * 4}, ["masks"], "which nothing predicts"),
        (
            {"messages": [[{"role": "user", "content": "a", "reward": INF}]]},
            ["messages", 0, 0, "reward"],
            "inf",
        ),
        (
            {"messages": [[{"role": "user"}]]},
            ["messages", 0, 0],
            "a list of objects with `role` and `content`",
        ),
        ({"something_else": {"a": [NAN]}}, ["something_else", "a", 0], "nan"),
        ({"idempotency_key": ""}, ["idempotency_key"], "at least 1 character"),
        ({"env_id": "x"}, ["env_id"], "integer"),
    ],
)
def test_a_refusal_names_field_index_and_value(
    fields: dict[str, Any], where: list[Any], says: str
) -> None:
    error = refusal(group(**fields))
    assert error["loc"] == ["body", *where]
    assert says in error["msg"]
    json.dumps(error, allow_nan=False)


def test_in_a_list_the_group_is_named_too() -> None:
    assert refusal([group(), group(scores=[NAN] * 4)], many=True)["loc"] == ["body", 1, "scores", 0]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"tokens": "x"}', b"\xff\xfe", b"[" * 100_000]
)
def test_what_is_no_group_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        read_groups(body, many=False)


def test_a_million_wrong_numbers_make_one_error() -> None:
    body = json.dumps(group(1, scores=[1.0], tokens=[["x"] * 1_000_000])).encode()
    with pytest.raises(InvalidRequestError) as caught:
        read_groups(body, many=False)
    assert len(caught.value.errors) == 1


def test_the_bytes_that_came_in_go_out_with_every_key_present() -> None:
    sent = group(
        env_id=3,
        scores=[0.1, 1e-7, 1, 2],
        messages=[[{"role": "user", "content": "Grüße NaN"}]],
        extra={"a": 1},
    )
    (draft,) = read_groups(json.dumps(sent, ensure_ascii=False).encode(), many=False)
    assert json.loads(draft.body) == {name: None for name in RETURNED} | sent
    assert (draft.size, draft.longest, draft.env_id, draft.weights) == (4, 3, 3, ())


@pytest.mark.parametrize("many", [False, True])
def test_numbers_written_otherwise_are_taken_for_what_they_are(many: bool) -> None:
    sent = group(1, tokens=[[1.0, "2", 3]], scores=["0.5"], weight_versions=[4], env_id="7")
    (draft,) = read_groups(json.dumps([sent] if many else sent).encode(), many)
    kept = json.loads(draft.body)
    assert (kept["tokens"], kept["scores"], draft.env_id) == ([[1, 2, 3]], [0.5], 7)


@pytest.mark.parametrize(
    ("model", "body", "field"),
    [
        (PostedEvaluation, {"name": "x", "metrics": {"a": True}}, "metrics"),
        (RegisterTrainer, {"lives": [[True, 1]]}, "lives"),
        (AnsweredReference, {"id": 1, "ref_logprobs": [[-1.0, True]]}, "ref_logprobs"),
    ],
)
def test_a_boolean_within_a_field_is_no_number(
    model: Any, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field}.*a boolean is not a number"):
        read(model, json.dumps(body).encode())


def test_the_weights_of_a_group_are_those_of_all_its_sequences() -> None:
    (draft,) = read_groups(json.dumps(group(3, weight_versions=[9, 4, 9])).encode(), many=False)
    assert draft.weights == ((None, 4), (None, 9))
    sent = group(3, weight_versions=[9, 4, 9], weight_epochs=[7, 8, 7])
    (draft,) = read_groups(json.dumps(sent).encode(), many=False)
    assert draft.weights == ((7, 9), (8, 4))
    assert json.loads(draft.body)["weight_epochs"] == [7, 8, 7]


@pytest.mark.parametrize("many", [False, True])
def test_the_weights_of_every_token_are_handed_on(many: bool) -> None:
    spans = {
        "weight_version_spans": [[[4, 1], [5, 1]]] * 3 + [[]],
        "weight_epoch_spans": [[7, 7]] * 3 + [[]],
    }
    sent = group(weight_versions=[4] * 4, weight_epochs=[7] * 4, **spans)
    (draft,) = read_groups(json.dumps([sent] if many else sent).encode(), many)
    assert json.loads(draft.body) == {name: None for name in RETURNED} | sent
    assert draft.weights == ((7, 4),), "the age of a group is that of its oldest tokens"


@pytest.mark.parametrize("many", [False, True])
def test_how_each_sequence_was_sampled_is_handed_on(many: bool) -> None:
    """Whole numbers stay whole, also where a list of groups is written again."""
    told = {"temperature": 0.7, "top_k": 20, "max_tokens": 512}
    turns = [{"temperature": 1, "tokens": 1}, {"temperature": 0.5, "tokens": 1}]
    sent = group(
        sampling_params=[told, told, turns, turns],
        finish_reasons=["stop", "length", "stop", "abort"],
    )
    (draft,) = read_groups(json.dumps([sent] if many else sent).encode(), many)
    assert json.loads(draft.body) == {name: None for name in RETURNED} | sent
    assert b'"top_k":20,' in draft.body.replace(b" ", b"")


@pytest.mark.parametrize(
    "fields",
    [
        {
            "finish_reasons": ["stop", None, "length", None],
            "sampling_params": [{"temperature": 0.5}, None, None, None],
        },
        {
            "sampling_params": [
                {
                    "temperature": 0.5,
                    "top_p": None,
                    "stop": "x",
                    "seed": 2**64 - 1,
                    "own": {"a": [1]},
                }
            ]
            * 4
        },
        {
            "sampling_params": [
                {"temperature": None, "top_p": 0.9},
                {"top_p": 0.9},
                {},
                {"temperature": 0},
            ]
        },
        {
            "sampling_params": {"temperature": 0.7, "stop": "x"},
            "finish_reasons": "stop",
            "successes": 3,
        },
    ],
    ids=["not known of every one", "names that nobody reads", "no temperature", "a client's own"],
)
def test_what_clients_of_the_original_wire_may_have_sent_goes_through(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_another_field.cache_clear()
    sent = group(**fields)
    for _ in range(2):
        (draft,) = read_groups(json.dumps(sent).encode(), False)
        assert json.loads(draft.body) == {name: None for name in RETURNED} | sent
    own = [name for name, value in fields.items() if not isinstance(value, list)]
    assert [f"a group's {name} is not a list" in caplog.text for name in own] == [True] * len(own)
    assert len(caplog.records) == len(own), "once each"


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", [name for name in PER_SEQUENCE if name not in REQUIRED])
def test_an_empty_list_of_an_optional_field_is_none_at_all(name: str, many: bool) -> None:
    sent = group(**{name: []})
    (draft,) = read_groups(json.dumps([sent] if many else sent).encode(), many)
    assert json.loads(draft.body) == {field: None for field in RETURNED} | sent | {name: None}


@pytest.mark.parametrize(("said", "meant"), [(-1, 1.0), (0, 0.0), (2.5, 2.5)])
def test_a_weight_of_minus_one_is_the_default(said: float, meant: float) -> None:
    assert read(RegisterEnv, json.dumps(environment(weight=said)).encode()).weight == meant


@pytest.mark.parametrize("weight", [-0.5, -2, 1e10])
def test_other_weights_below_zero_are_refused(weight: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"weight is .*: .*(at least 0|less than)"):
        read(RegisterEnv, json.dumps(environment(weight=weight)).encode())


@pytest.mark.parametrize("size", [0, -1, 2**40])
def test_a_batch_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(InvalidRequestError, match="batch_size is"):
        read(RegisterTrainer, json.dumps({"batch_size": size}).encode())
