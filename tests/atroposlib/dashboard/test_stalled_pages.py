"""Pages that stop reading, with real sockets: they are dropped, delay no other page, and get an
answer if they are too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from atroposlib.dashboard.live import hub as hub_module
from atroposlib.dashboard.live.hub import MAX_PAGES, Hub
from atroposlib.web.bounded_protocol import bounded_protocol
from example_trainer.child_processes.processes import wait_until
from tests.atroposlib.dashboard.test_page_of_service import Events
from tests.atroposlib.service.conftest import Service, trainer

pytestmark = pytest.mark.nightly

MUCH = 16 << 20
"""Bytes: more than the system holds of a connection."""
ASKED = b"GET /ui/api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def stalled(port: int) -> tuple[socket.socket, int]:
    """A connection that has asked for events and reads no more than how the answer begins; and the
    answer's status.
    """
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(60)
    client.connect(("127.0.0.1", port))
    client.sendall(ASKED)
    head = b""
    while len(head) < 12:
        head += client.recv(12 - len(head))
    return client, int(head.split()[1])


@asynccontextmanager
async def served(hub: Hub) -> AsyncIterator[int]:
    """The port of a server that sends the events of a hub."""

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are pytest's

    async def told(_: Request) -> hub_module.EventStream:
        return hub_module.EventStream(hub, "a", {}, lambda: float("inf"))

    app = Starlette(routes=[Route("/ui/api/stream", told)])
    server = Server(
        uvicorn.Config(app, http=bounded_protocol(30.0, 1000), lifespan="off", log_config=None)
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        yield listening.getsockname()[1]
        server.should_exit = True
        await asyncio.wait_for(serving, 60)


async def test_one_that_reads_nothing_is_let_go_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_module, "SEND_SECONDS", 0.2)
    hub = Hub()
    async with served(hub) as port, asyncio.timeout(60):
        client, status = await asyncio.to_thread(stalled, port)
        with client:
            assert (status, len(hub)) == (200, 1)
            hub.publish("a", "rows", "x" * (7 << 20))
            while len(hub):
                hub.publish("a", "rows", "x" * (1 << 20))
                await asyncio.sleep(0.01)
            left = await asyncio.to_thread(rest_of, client)
    assert left < MUCH, "what was not taken is not kept for it"
    assert not [line for line in caplog.records if line.levelname == "ERROR"]


def rest_of(client: socket.socket) -> int:
    """Return the number of bytes that still come until the connection ends."""
    count = 0
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(1 << 20):
            count += len(part)
    return count


async def test_each_asks_anew_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "STREAM_SECONDS", 0.0)
    async with served(Hub()) as port, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/ui/api/stream", timeout=60)
    assert answer.text.endswith('event: bye\ndata: {"reason":"renew"}\n\n')


def test_two_hundred_that_read_nothing(tmp_path: Path) -> None:
    flags = ("--store", "memory", "--run-folder", str(tmp_path), "--request-timeout", "15")
    service = Service(tmp_path, *flags).start()
    figures = tmp_path / "trainer"
    figures.mkdir()
    service.post("/register", trainer(model="m", log_dir=str(figures)))
    with contextlib.ExitStack() as stack:
        events = Events(
            stack.enter_context(service.http.stream("GET", "/ui/api/stream", timeout=60))
        )
        events.next("hello")
        opened = [stalled(service.port) for _ in range(2 * MAX_PAGES)]
        for client, _ in opened:
            stack.enter_context(client)
        statuses = [status for _, status in opened]
        assert statuses == [200] * (MAX_PAGES - 1) + [503] * (MAX_PAGES + 1)
        refused = httpx.get(f"http://127.0.0.1:{service.port}/ui/api/stream", timeout=60)
        assert (refused.status_code, "close some" in refused.json()["error"]) == (503, True)
        assert service.get("/ui/api/page")["full"] == refused.json()["error"], (
            "a page says it to whoever opens it"
        )
        # More is sent than their connections hold, and the page that reads gets it while they do
        # not.
        with (figures / "metrics.jsonl").open("a") as file:
            for step in range(1, 41):
                file.write(json.dumps({"step": step, "note": "x" * (MUCH // 4 // 40)}) + "\n")
        told = 0
        while told < 40:  # what is read while it is still being written comes in parts
            told += len(events.next("rows")[1]["new"])
        assert told == 40
        wait_until("one to be let go of", lambda: service.get("/ui/api/page")["full"] or None, 60)
    assert service.signal(signal.SIGTERM) == 0
    assert "ERROR" not in service.log.read_text()
