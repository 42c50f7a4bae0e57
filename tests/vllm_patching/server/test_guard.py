"""While nothing can be sampled rightly, whatever the guard does not know is refused."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocket

from vllm_patching.server.guard import ENDING, TRY_AGAIN_LATER, RefuseWhileUnavailable, is_open

SAMPLING = (
    "/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/inference/v1/generate",
    "/invocations",
    "/pause",
    "/v1/realtime",
)


class Service:
    def __init__(self, reason: str) -> None:
        self.reason = reason

    def unavailable(self) -> str:
        return self.reason


def guarded(reason: str, **settings: Any) -> RefuseWhileUnavailable:
    app = FastAPI(openapi_url=None, **settings)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def anything(path: str) -> dict[str, str]:
        return {"answered": path}

    @app.websocket("/{path:path}")
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    return RefuseWhileUnavailable(app, Service(reason))


def ask(app: Any, method: str, path: str) -> httpx.Response:
    return TestClient(app).request(method, path)


@pytest.mark.parametrize(
    "path",
    [*SAMPLING, "/health", "/ping", "/", "/anything/new", "/metrics/../generate", "//generate"],
)
def test_refused_with_the_reason(path: str) -> None:
    answer = ask(guarded("the weights are a mixture"), "POST", path)
    assert (answer.status_code, answer.json()) == (503, {"error": "the weights are a mixture"})
    assert ask(guarded(""), "POST", path).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/metrics/", "/version", "/v1/models", "/docs", "/openapi.json", "/bridge/state"],
)
def test_answered_at_any_time(path: str) -> None:
    assert ask(guarded("the weights are a mixture"), "GET", path).status_code == 200
    assert ask(guarded("x"), "POST", "/bridge/init").status_code == 200


def test_a_server_behind_a_prefix_is_guarded_alike() -> None:
    app = guarded("a mixture", root_path="/llm")
    client = TestClient(app, root_path="/llm")
    assert client.post("/llm/generate").status_code == 503
    assert client.get("/llm/bridge/state").status_code == 200


def test_a_websocket_is_refused() -> None:
    with TestClient(guarded("")).websocket_connect("/v1/realtime") as socket:
        assert socket.receive_text() == "hello"
    client = TestClient(guarded("a mixture"))
    with (
        pytest.raises(WebSocketDenialResponse) as refused,
        client.websocket_connect("/v1/realtime"),
    ):
        pass
    assert (refused.value.status_code, refused.value.json()) == (503, {"error": "a mixture"})


async def test_a_websocket_of_a_server_that_cannot_answer_it_is_closed() -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await guarded("a mixture")({"type": "websocket", "path": "/v1/realtime"}, receive, send)
    assert sent == [{"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": "a mixture"}]


@pytest.mark.parametrize("begun", [False, True])
def test_what_is_under_way_when_the_server_ends_may_be_asked_of_another(begun: bool) -> None:
    app, under_way = FastAPI(), threading.Event()

    @app.post("/generate")
    async def generate() -> StreamingResponse:
        async def nothing_more() -> AsyncIterator[bytes]:
            yield b"some tokens"
            under_way.set()
            await asyncio.Event().wait()

        if not begun:
            under_way.set()
            await asyncio.Event().wait()
        return StreamingResponse(nothing_more())

    config = uvicorn.Config(
        RefuseWhileUnavailable(app, Service("")), timeout_graceful_shutdown=0, lifespan="off"
    )
    server = uvicorn.Server(config)
    with socket.socket() as listening, ThreadPoolExecutor(2) as pool:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        ended = pool.submit(server.run, [listening])
        try:
            url = "http://{}:{}/generate".format(*listening.getsockname())
            owed = pool.submit(httpx.post, url, timeout=60, trust_env=False)
            assert under_way.wait(60)
        finally:
            server.should_exit = True
        if begun:
            with pytest.raises(
                httpx.RemoteProtocolError
            ):  # and no end that one could take for the stream's
                owed.result(60)
        else:
            assert (owed.result(60).status_code, owed.result().json()) == (503, {"error": ENDING})
        ended.result(60)


@given(
    st.sampled_from(["POST", "PUT", "PATCH", "DELETE", ""]),
    st.text(alphabet="/abcv1metricsdoch.", max_size=20),
)
def test_nothing_is_changed_by_a_path_that_is_not_ours(method: str, path: str) -> None:
    assert is_open(method, f"/{path}") is f"/{path}".startswith(("/bridge/", "/lora/"))
