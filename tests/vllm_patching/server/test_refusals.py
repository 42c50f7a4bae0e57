"""Wrong bodies get 400 with the field's name, whatever they hold, and what is accepted fits into a
message to the engine.
"""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from vllm import SamplingParams

from vllm_patching.compat.requests import caller_errors
from vllm_patching.server.generate import GenerateRequest, Generator, TokenPrompt
from vllm_patching.server.routes import LockstepService, make_router
from vllm_patching.server.state import VersionSpans

INTEGERS = [0, -1, 2**31 - 1, 2**31, 2**53, 2**63, 2**64 - 1, 2**64, 2**100, -(2**63) - 1, 10**400]
FLOATS = [0.0, 1e-300, 1e-320, 1e300, -1e300, math.nan, math.inf, -math.inf, 1.0]
TEXTS = ["x", "\ud800", "a\udfff", ""]
NAMES = [name for name in GenerateRequest.model_fields if name != "prompt"]


@pytest.fixture(scope="module")
def client() -> TestClient:
    """The routes, with an engine that takes a request as far as its message and then is gone."""

    async def generate(request: GenerateRequest) -> Any:
        for sample in range(min(request.n, 2)):
            msgspec.msgpack.encode(
                SamplingParams(**request.sampling_parameters(request.n - 1 - sample))
            )
        raise ValueError("taken")

    service = LockstepService()
    service.generator = SimpleNamespace(generate=generate)  # type: ignore[assignment]
    app = FastAPI()
    app.include_router(make_router(service))
    return TestClient(app)


def post(client: TestClient, text: str, path: str = "/generate") -> Any:
    return client.post(path, content=text.encode(), headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            '"seed":18446744073709551616',
            "seed is 18446744073709551616: Input should be less than or equal to 18446744073709550592",
        ),
        (
            f'"max_tokens":{2**100}',
            f"max_tokens is {2**100}: Input should be less than or equal to 2147483647",
        ),
        (f'"max_tokens":{10**400}', "max_tokens is an integer of 1329 bits: "),
        ('"stop":"\\ud800"', "stop: '\\ud800' holds half a surrogate pair"),
        ('"stop":["a","\\udfff"]', "stop: '\\udfff' holds half a surrogate pair"),
        (
            '"repetition_penalty":1e-300',
            "repetition_penalty is 1e-300: Input should be greater than or equal to 0.000001",
        ),
        ('"temperature":NaN', "temperature is nan: Input should be a finite number"),
        ('"top_k":4294967296', "top_k is 4294967296: Input should be less than"),
        (
            '"stop_token_ids":[1,-5]',
            "stop_token_ids.1 is -5: Input should be greater than or equal to 0",
        ),
        ('"presence_penalty":-Infinity', "presence_penalty is -inf: "),
        ('"\\ud800":1', "is '\\ud800': Input should be a valid string"),
        ('"temperature":3', "temperature must be in [0, 2], got 3.0"),
        ('"n":true', "n is True: send a whole JSON number such as 5, without quotation marks"),
        ('"temperature":"1"', "temperature is '1': send a JSON number such as 0.5"),
        (
            '"prompt":{"prompt_token_ids":["5"]}',
            "prompt_token_ids.0 is '5': send a whole JSON number",
        ),
        ('"stop_token_ids":[true]', "stop_token_ids.0 is True: send a whole JSON number"),
        ('"return_text":"no"', "return_text is 'no': send true or false"),
        ('"min_tokens":1e300', "min_tokens is 1e+300: "),
    ],
)
def test_a_refusal_names_the_field_the_value_and_the_bound(
    client: TestClient, fields: str, said: str
) -> None:
    answer = post(client, '{"prompt":"x",' + fields + "}")
    assert answer.status_code == 400
    assert said in answer.json()["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/bridge/init",
        "/bridge/begin",
        "/bridge/commit",
        "/bridge/abort",
        "/lora/load",
        "/turns/rest",
    ],
)
@pytest.mark.parametrize(
    "value", [str(2**100), "NaN", '"\\ud800"', "9" * 4000, "[" * 3000 + "]" * 3000]
)
def test_every_route_answers_a_value_that_json_cannot_repeat(
    client: TestClient, path: str, value: str
) -> None:
    answer = post(
        client,
        f'{{"epoch":{value},"version":{value},"weight_epoch":{value},"\\udc00":{value}}}',
        path,
    )
    assert 400 <= answer.status_code < 500, answer.text


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_value_of_a_field_is_the_servers_fault(client: TestClient, data: st.DataObject) -> None:
    anything = st.one_of(st.sampled_from(INTEGERS + FLOATS + TEXTS), st.none(), st.booleans())
    values = st.one_of(anything, st.lists(anything, max_size=3))
    fields = data.draw(st.dictionaries(st.sampled_from(NAMES), values, min_size=1, max_size=3))
    try:
        request = GenerateRequest(prompt="x", **fields)
    except ValidationError:
        return
    for sample in (0, request.n - 1):
        try:
            parameters = SamplingParams(**request.sampling_parameters(sample))
        except caller_errors():  # vLLM's own rules; the route answers 400
            return
        msgspec.msgpack.encode(parameters)


def test_a_stop_token_beyond_the_vocabulary_is_refused() -> None:
    engine = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 100))
    request = GenerateRequest(prompt=TokenPrompt(prompt_token_ids=[1]), stop_token_ids=[99, 100])
    with pytest.raises(
        ValueError, match="stop_token_ids holds 100, and the model's ids go from 0 to 99"
    ):
        asyncio.run(Generator(engine, VersionSpans()).generate(request))
