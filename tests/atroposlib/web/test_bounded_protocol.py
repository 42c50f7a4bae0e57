"""Bounds of a server's connections, with real sockets, also for answers that come byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from atroposlib.web import bounded_protocol as protocol
from atroposlib.web.bounded_protocol import bounded_protocol
from atroposlib.web.connections import end_slow_answer, end_slow_answer_async
from atroposlib.web.middleware import prove_connection

LONG = 16 << 20


"""Bytes: more than the system holds of a connection."""


Run = Callable[[Awaitable[None]], None]


App = Callable[[Scope, Receive, Send], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test on one of the event loops."""
    runner: Any = asyncio.run if request.param == "asyncio" else uvloop.run
    return runner  # type: ignore[no-any-return]


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: they are pytest's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def served(
    app: App, seconds: float = 60.0, most: int = 100, most_body: int | None = None
) -> AsyncIterator[tuple[int, Server]]:
    """The port of a server of this application, and the server."""
    config = uvicorn.Config(
        app,
        http=bounded_protocol(seconds, most, most_body=most_body),
        lifespan="off",
        log_config=None,
        backlog=4,
    )
    server = Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        async with asyncio.timeout(60):
            yield listening.getsockname()[1], server
            server.should_exit = True
            await serving


async def answer(send: Send, body: bytes = b"ok") -> None:
    """Answer 200."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


async def known(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that lets in requests with a key."""
    if (b"authorization", b"key") in scope["headers"]:
        prove_connection(scope)
    await answer(send)


ASKED = b"GET / HTTP/1.1\r\nhost: localhost\r\nauthorization: key\r\n\r\n"


async def ask(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose first request, with the key, was answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await ask_again(reader, writer)
    return reader, writer


async def ask_again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One more request on the same connection."""
    writer.write(ASKED)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert await reader.readexactly(2) == b"ok"


def test_silent_connections_give_way_and_callers_with_the_key_stay(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LOG_EVERY_SECONDS", 1000.0)

    async def test() -> None:
        async with served(known, most=12) as (port, server):
            kept = [await ask(port) for _ in range(5)]
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            for _ in range(3):
                _, writer = await ask(port)  # a new caller, while the silent ones are too many
                writer.close()
                for connection in kept:
                    await ask_again(*connection)
            assert len(server.server_state.connections) <= 12 + 1
            first = await silent[0][0].read()
            assert first.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n"), (
                "the oldest is closed first"
            )
            for _, writer in (*silent, *kept):
                writer.close()

    run(test())
    lines = [
        record.getMessage()
        for record in caplog.records
        if "too many connections" in record.getMessage()
    ]
    assert len(lines) == 1, "one line, however many are closed"
    assert "127.0.0.1" in lines[0]


def test_a_flood_that_never_ends_keeps_nobody_out(run: Run) -> None:
    async def test() -> None:
        async with served(known, most=12) as (port, _):
            over = asyncio.Event()
            opened = 0

            async def flood() -> None:
                nonlocal opened
                while not over.is_set():
                    with contextlib.suppress(OSError):
                        reader, writer = await asyncio.open_connection("127.0.0.1", port)
                        opened += 1
                        await reader.read()
                        writer.close()

            floods = [asyncio.create_task(flood()) for _ in range(30)]
            kept = await ask(port)
            while opened < 300:
                await asyncio.sleep(0)
                await ask_again(*kept)
                _, writer = await ask(port)
                writer.close()
            over.set()
            kept[1].close()
            for task in floods:
                task.cancel()
            await asyncio.wait(floods)

    run(test())


def test_a_body_that_does_not_come_ends_its_connection(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "BODY_GRACE_SECONDS", 0.0)
    seen: list[str] = []

    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/refused":
            return await answer(send)
        while (message := await receive())["type"] != "http.disconnect":
            seen.append("part")
            assert message["more_body"]
        seen.append("gone")

    async def test() -> None:
        async with served(reading, seconds=0.3) as (port, _):
            for path, status in (("/read", b"408"), ("/refused", b"200")):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(
                    f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n".encode()
                    + b"x" * 10
                )
                said = await reader.read()  # until the server has closed
                assert said[9:12] == status
                writer.close()
            assert seen[-1] == "gone"

    run(test())


def test_a_body_that_is_too_long_ends_its_connection(run: Run) -> None:
    read = 0

    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal read
        while (message := await receive())["type"] != "http.disconnect":
            read += len(message["body"])

    async def test() -> None:
        async with served(reading, most_body=1000) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
                + b"64\r\n"
                + b"x" * 100
            )
            writer.write((b"\r\n64\r\n" + b"x" * 100) * 10)
            assert (await reader.read())[9:12] == b"413"
            writer.close()

    run(test())
    assert read <= 1000


def test_an_answer_that_is_not_taken_ends_its_connection(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"x" * LONG)

    async def test() -> None:
        async with served(large, seconds=0.5) as (port, server):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
            with client:
                await asyncio.get_running_loop().sock_sendall(client, ASKED)
                while server.server_state.connections or not server.server_state.total_requests:
                    await asyncio.sleep(0.01)

    run(test())
    assert any("of an answer for 0.5 s" in record.getMessage() for record in caplog.records)


def test_heads_with_too_many_lines_are_refused(run: Run) -> None:
    async def test() -> None:
        async with served(known) as (port, _):
            for count, status in ((200, b"200"), (300, b"431")):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                lines = b"a: b\r\n" * count
                writer.write(
                    b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + lines + b"\r\n"
                )
                assert (await reader.read())[9:12] == status
                writer.close()

    run(test())


def test_requests_sent_ahead_of_their_answers_are_bounded(run: Run) -> None:
    called = 0

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal called
        called += 1
        while (await receive())["type"] != "http.disconnect":
            pass

    async def test() -> None:
        async with served(slow) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()

    run(test())
    assert called <= 1


@pytest.mark.parametrize(
    ("method", "lines", "status"),
    [
        (b"GET", b"content-length: 3\r\n\r\nabc", b"400"),
        (b"POST", b"content-length: 3\r\n\r\nabc", b"400"),
        (b"GET", b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"400"),
        (b"GET", b"content-length: 0\r\n\r\n", b"403"),
        (b"GET", b"\r\n", b"403"),
    ],
)
def test_a_websocket_whose_head_announces_a_body_is_refused(
    run: Run, method: bytes, lines: bytes, status: bytes
) -> None:
    """The library of WebSockets would wait for the body, with neither a deadline nor a place among
    the counted connections.
    """
    head = b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
    head += b"sec-websocket-key: c2l4dGVlbiBieXRlcyEhIQ==\r\n"

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "websocket"
        await receive()
        await send({"type": "websocket.close", "code": 1000})

    async def test() -> None:
        async with served(refuse) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(method + b" / HTTP/1.1\r\nhost: localhost\r\n" + head + lines)
            assert (await reader.read()).split(maxsplit=2)[1] == status
            writer.close()

    run(test())


READ_SECONDS = 0.4
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture
def slow_url() -> Iterator[str]:
    """A server that sends a byte of an endless answer well within each read's timeout, until its
    client has gone.
    """
    ended = threading.Event()

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(HEAD % 10**9)
                while not ended.wait(READ_SECONDS / 40):
                    connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
    thread.join()


def allow_little(response: httpx.Response) -> None:
    """Shorten the limit of the whole answer. A single read keeps its own, as a server may stop."""
    request = response.request
    request.extensions = {**request.extensions, "timeout": {"read": READ_SECONDS}}


def test_a_slow_answer_ends_a_request(slow_url: str) -> None:
    hooks = {"response": [allow_little, end_slow_answer]}
    with (
        httpx.Client(timeout=60, event_hooks=hooks) as client,
        pytest.raises(httpx.ReadTimeout, match="too slow"),
    ):
        client.get(slow_url)


def test_a_slow_answer_ends_an_asynchronous_request(slow_url: str) -> None:
    async def allow(response: httpx.Response) -> None:
        allow_little(response)

    async def ask() -> None:
        hooks = {"response": [allow, end_slow_answer_async]}
        async with httpx.AsyncClient(timeout=60, event_hooks=hooks) as client:
            await client.get(slow_url)

    with pytest.raises(httpx.ReadTimeout, match="too slow"):
        asyncio.run(ask())


def test_large_answers_and_clients_that_were_stopped_are_no_slow_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each piece comes after a gap of a hundred timeouts, as if this process had been stopped.

    There are few of them.
    """
    now = iter(range(0, 10**9, 1000))
    monkeypatch.setattr("atroposlib.web.connections.time.monotonic", lambda: float(next(now)))

    class Pieces(httpx.SyncByteStream):
        def __init__(self, size: int, count: int) -> None:
            self.size, self.count = size, count

        def __iter__(self) -> Iterator[bytes]:
            for _ in range(self.count):
                yield bytes(self.size)

    for size, count in ((1, 10), (64 << 10, 1000)):
        request = httpx.Request("GET", "http://h", extensions={"timeout": {"read": 10.0}})
        response = httpx.Response(200, stream=Pieces(size, count), request=request)
        end_slow_answer(response)
        assert len(response.read()) == size * count
