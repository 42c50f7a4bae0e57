"""Numbers of small requests have bounds too, and each refusal names field, value and bound in JSON
that can be sent.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from atroposlib.service.schemas import (
    AckBatch,
    BatchReport,
    EndRun,
    EnvIdentifier,
    EnvStatus,
    InvalidRequestError,
    LeaseReferences,
    PostedEvaluation,
    PublishedFleet,
    ReferencesDone,
    RegisterEnv,
    RegisterTrainer,
    ServerAddress,
    read,
)

MODELS: list[type[BaseModel]] = [
    *(
        RegisterTrainer,
        RegisterEnv,
        EnvIdentifier,
        EnvStatus,
        AckBatch,
        BatchReport,
        EndRun,
        PostedEvaluation,
    ),
    *(ServerAddress, PublishedFleet, LeaseReferences, ReferencesDone),
]
ODD = [
    b"9" * 400,
    b"-" + b"9" * 5000,
    b"1e39",
    b"1e400",
    b"NaN",
    b"-Infinity",
    b"18446744073709551616",
    b'"\\ud800"',
    b'"\xff"',
]
ODD += [
    b"[" * 300 + b"]" * 300,
    b'{"a":1e39}',
    b"[[1e39]]",
    b"null",
    b"true",
    b'"x"',
    b"{}",
    b"-1",
    b"0.5",
]


@pytest.mark.parametrize(
    ("model", "body", "says"),
    [
        (PostedEvaluation, b'{"name":"x","metrics":{"a":1e39}}', "metrics.a is "),
        (PostedEvaluation, b'{"name":"x","metrics":{"a":' + b"9" * 400 + b"}}", "metrics.a is "),
        (
            ReferencesDone,
            b'{"worker":"w","groups":[{"id":1,"ref_logprobs":[[0,-1e39]]}]}',
            "groups[0].ref_logprobs[0][1] is ",
        ),
        (
            PublishedFleet,
            b'{"servers":[{"url":"http://a:1","standing":"good","since":1e300}]}',
            "servers[0].since is ",
        ),
        (EndRun, b'{"uuid":' + b"9" * 400 + b"}", "uuid is 'an integer of 1329 bits'"),
    ],
)
def test_a_number_beyond_its_bound_is_named(model: type[BaseModel], body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(model, body)
    assert says in str(caught.value)
    assert "less than or equal to" in str(caught.value) or "greater than or equal to" in str(
        caught.value
    )


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(MODELS), st.data())
def test_what_is_refused_can_be_answered_and_what_is_taken_can_be_stored(
    model: type[BaseModel], data: st.DataObject
) -> None:
    names = data.draw(st.lists(st.sampled_from(list(model.model_fields)), unique=True))
    fields = [orjson.dumps(name) + b":" + data.draw(st.sampled_from(ODD)) for name in names]
    try:
        taken: Any = read(model, b"{" + b",".join(fields) + b"}")
    except InvalidRequestError as refusal:
        orjson.dumps(refusal.errors)
        return
    orjson.dumps(taken.model_dump(exclude={"report"}))
