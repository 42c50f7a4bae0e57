"""vLLM's own request bodies refuse booleans for numbers, and texts for token ids."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from vllm_patching.server.numbers import refuse_mistaken_numbers

CHAT = {"messages": [{"role": "user", "content": "true"}]}


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()

    @app.post("/completions")
    async def completions(body: CompletionRequest) -> dict[str, Any]:
        return {"n": body.n}

    @app.post("/chat")
    async def chat(body: ChatCompletionRequest) -> dict[str, Any]:
        return {"n": body.n}

    @app.exception_handler(RequestValidationError)
    async def refused(_: Any, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"error": error.errors()[0]["msg"]}, 400)

    refuse_mistaken_numbers(app)
    return TestClient(app)


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/completions", {"prompt": "x", "n": True}, "n is True: send JSON numbers"),
        ("/completions", {"prompt": [1, True]}, "prompt is [1, True]: send JSON numbers"),
        ("/completions", {"prompt": "x", "stop_token_ids": ["5"]}, "stop_token_ids is ['5']: "),
        ("/completions", {"prompt": "x", "temperature": False}, "temperature is False: "),
        ("/completions", {"prompt": "x", "logprobs": True}, "logprobs is True: "),
        ("/chat", CHAT | {"n": True}, "n is True: "),
        ("/chat", CHAT | {"max_tokens": True}, "max_tokens is True: "),
        ("/chat", CHAT | {"stop_token_ids": [True]}, "stop_token_ids is [True]: "),
    ],
)
def test_a_mistaken_number_is_refused_with_its_field(
    client: TestClient, path: str, fields: dict[str, Any], said: str
) -> None:
    answer = client.post(path, json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(said)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/completions", {"prompt": "x", "n": 2, "echo": True, "stop": ["5"]}),
        ("/completions", {"prompt": ["5", "6"], "temperature": 1}),
        ("/completions", {"prompt": [[1, 2], [3]], "stop_token_ids": [5]}),
        ("/chat", CHAT | {"n": 1, "logprobs": True, "stream": False, "stop": None}),
    ],
)
def test_numbers_and_texts_in_their_places_are_taken(
    client: TestClient, path: str, fields: dict[str, Any]
) -> None:
    answer = client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
