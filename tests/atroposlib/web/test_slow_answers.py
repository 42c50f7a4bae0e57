"""A server that sends its answer byte by byte does not keep a request for ever."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from atroposlib.web.connections import end_slow_answer, end_slow_answer_async

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


def test_a_slow_answer_ends_a_request(slow_url: str) -> None:
    hooks = {"response": [end_slow_answer]}
    with (
        httpx.Client(timeout=READ_SECONDS, event_hooks=hooks) as client,
        pytest.raises(httpx.ReadTimeout, match="too slow"),
    ):
        client.get(slow_url)


def test_a_slow_answer_ends_an_asynchronous_request(slow_url: str) -> None:
    async def ask() -> None:
        async with httpx.AsyncClient(
            timeout=READ_SECONDS, event_hooks={"response": [end_slow_answer_async]}
        ) as client:
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
