"""guard.py, when the engine hangs: requests in flight end with 503, over real connections, and the
app ends their work.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from vllm_patching.server import guard
from vllm_patching.server.guard import TRY_AGAIN_LATER, RefuseWhileUnavailable

REASON = "vLLM's engine has not answered for 30 s"


class Server:
    """Handlers that wait for an engine which never answers."""

    def __init__(self) -> None:
        self.reason = ""
        self.guard = RefuseWhileUnavailable(self._app(), self)
        self.begun, self.left = threading.Semaphore(0), threading.Semaphore(0)
        self.loop: asyncio.AbstractEventLoop | None = None

    def unavailable(self) -> str:
        return self.reason

    def hang(self, requests: int) -> None:
        """Declare the engine hung once so many requests are in flight."""
        for _ in range(requests):
            assert self.begun.acquire(timeout=60)
        assert self.loop is not None
        self.reason = REASON
        asyncio.run_coroutine_threadsafe(self.guard.end_requests(REASON), self.loop).result(60)

    async def engine(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.release()

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/generate")
        async def generate(request: Request) -> None:
            """As vLLM's routes: the work is cancelled when the client goes."""
            await (
                request.body()
            )  # which raises if the client goes before, as the guard makes it seem
            work = asyncio.create_task(self.engine())
            while (await request.receive())["type"] != "http.disconnect":
                pass
            work.cancel()

        @app.post("/deaf")
        async def deaf() -> None:
            await self.engine()

        @app.post("/events")
        async def events() -> StreamingResponse:
            return StreamingResponse(self._stream("data: 1\n\n"), media_type="text/event-stream")

        @app.post("/bytes")
        async def some_bytes() -> StreamingResponse:
            return StreamingResponse(self._stream("some"))

        @app.websocket("/v1/realtime")
        async def talk(websocket: WebSocket) -> None:
            await websocket.accept()
            await self.engine()

        return app

    async def _stream(self, first: str) -> AsyncIterator[str]:
        yield first
        await self.engine()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    running = uvicorn.Server(
        uvicorn.Config(server.guard, lifespan="off", timeout_graceful_shutdown=0)
    )
    with socket.socket() as listening, ThreadPoolExecutor(1) as pool:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        ended = pool.submit(running.run, [listening])
        try:
            yield "127.0.0.1:{}".format(*listening.getsockname()[1:])
        finally:
            running.should_exit = True
        ended.result(60)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def ask(pool: ThreadPoolExecutor, url: str, path: str) -> Future[httpx.Response]:
    return pool.submit(httpx.post, f"http://{url}{path}", json={}, timeout=60, trust_env=False)


def test_requests_in_flight_get_the_reason_and_their_work_ends(
    server: Server, url: str, pool: ThreadPoolExecutor
) -> None:
    asked = [ask(pool, url, "/generate") for _ in range(4)]
    server.hang(4)
    for one in asked:
        assert (one.result(60).status_code, one.result().json()) == (503, {"error": REASON})
    for _ in asked:
        assert server.left.acquire(timeout=60), (
            "the engine's work goes on though its request has ended"
        )
    refused = httpx.post(f"http://{url}/generate", json={}, timeout=60, trust_env=False)
    assert (refused.status_code, refused.json()) == (503, {"error": REASON})


def test_a_route_that_does_not_notice_a_lost_client_is_cancelled(
    server: Server, url: str, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LAST_WORD_SECONDS", 0.2)
    asked = ask(pool, url, "/deaf")
    server.hang(1)
    assert asked.result(60).status_code == 503
    assert server.left.acquire(timeout=60)


def test_a_stream_of_events_ends_with_the_reason(
    server: Server, url: str, pool: ThreadPoolExecutor
) -> None:
    asked = ask(pool, url, "/events")
    server.hang(1)
    assert asked.result(60).status_code == 200, "its head was sent before"
    first, last = [
        json.loads(line.removeprefix("data: "))
        for line in asked.result().text.split("\n\n")
        if line
    ]
    assert first == 1
    assert (last["error"]["code"], last["error"]["message"]) == (503, REASON)
    assert server.left.acquire(timeout=60)


def test_another_answer_that_has_begun_is_cut_off(
    server: Server, url: str, pool: ThreadPoolExecutor
) -> None:
    asked = ask(pool, url, "/bytes")
    server.hang(1)
    # The end is missing in both cases. The second is a reset that came before the end was read.
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        asked.result(60)
    assert server.left.acquire(timeout=60)


def test_a_websocket_is_closed_with_the_reason(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LAST_WORD_SECONDS", 0.2)
    with connect(f"ws://{url}/v1/realtime") as talk:
        server.hang(1)
        with pytest.raises(ConnectionClosed) as closed:
            talk.recv(timeout=60)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (TRY_AGAIN_LATER, REASON)
    assert server.left.acquire(timeout=60)


async def test_a_client_that_takes_no_answer_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "LAST_WORD_SECONDS", 0.1)
    under_way = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        under_way.set()
        await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    server = RefuseWhileUnavailable(app, Server())
    request = asyncio.create_task(
        server({"type": "http", "method": "POST", "path": "/generate"}, receive, send)
    )
    await under_way.wait()
    await server.end_requests(REASON)
    await asyncio.wait_for(request, 60)
