"""The key of the vLLM servers goes only to addresses that the service's own options name."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from atroposlib.cli.run_api import parse_arguments
from atroposlib.dashboard.live.servers import ServerWatch
from tests.atroposlib.dashboard.inference_server import BRIDGE
from tests.atroposlib.service.conftest import Service, trainer

KEY = "key-of-the-vllm-servers"
WEIGHTS = {"instance": "one", "weight_version": 3, "weight_epoch": 7, "serving": True}


class KeyedServer:
    """Answers /weights to every caller and /bridge/state to the key, and records the key of each
    request.

    Args:
        moved_to: address to which /bridge/state is redirected; empty for an ordinary answer.
    """

    def __init__(self, moved_to: str = "") -> None:
        self.requests: queue.Queue[tuple[str, str | None]] = queue.Queue()
        noted = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                key = self.headers.get("Authorization")
                noted.put((self.path, key))
                is_bridge = self.path == "/bridge/state"
                status = (
                    307
                    if is_bridge and moved_to
                    else 401
                    if is_bridge and key != f"Bearer {KEY}"
                    else 200
                )
                body = json.dumps(BRIDGE if is_bridge else WEIGHTS).encode()
                self.send_response(status)
                if moved_to:
                    self.send_header("location", f"{moved_to}{self.path}")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def carried(self) -> list[tuple[str, str | None]]:
        """Path and Authorization of every request since the last call."""
        return [self.requests.get_nowait() for _ in range(self.requests.qsize())]

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def servers() -> Iterator[tuple[KeyedServer, KeyedServer]]:
    one, other = KeyedServer(), KeyedServer()
    yield one, other
    one.stop()
    other.stop()


def look(watch: ServerWatch, *urls: str) -> None:
    async def run() -> None:
        await watch.look(urls)
        await watch.look(urls)
        await watch.close()

    asyncio.run(run())


def test_only_the_addresses_of_the_options_get_the_key(
    servers: tuple[KeyedServer, KeyedServer], caplog: pytest.LogCaptureFixture
) -> None:
    own, stranger = servers
    watch = ServerWatch(KEY, frozenset({own.url}))
    with caplog.at_level(logging.WARNING):
        look(watch, own.url, stranger.url)
    assert own.carried() == [("/weights", f"Bearer {KEY}"), ("/bridge/state", f"Bearer {KEY}")] * 2
    assert stranger.carried() == [("/weights", None), ("/bridge/state", None)] * 2
    assert watch.servers[own.url].bridge["updates"] == 3
    unkeyed = watch.servers[stranger.url]
    assert (unkeyed.health, unkeyed.weight_version, unkeyed.bridge) == ("good", 3, {})
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if "requires its key" in record.getMessage()
    ]
    assert f"--vllm-server {stranger.url}" in line
    assert KEY not in line


def test_a_name_that_no_resolver_takes_does_not_stop_the_poll_of_others(
    servers: tuple[KeyedServer, KeyedServer],
) -> None:
    own, _ = servers
    watch = ServerWatch(KEY, frozenset({own.url}))
    names = f"http://{'a' * 64}:1", "http://xn--a:1"
    look(watch, *names, own.url)
    assert watch.servers[own.url].health == "good"
    assert [watch.servers[name].health for name in names] == ["silent"] * 2


def test_another_name_or_port_of_the_same_machine_gets_no_key(
    servers: tuple[KeyedServer, KeyedServer],
) -> None:
    own, stranger = servers
    renamed = own.url.replace("127.0.0.1", "localhost")
    look(ServerWatch(KEY, frozenset({own.url})), renamed, stranger.url)
    assert {key for _, key in own.carried() + stranger.carried()} == {None}


def test_a_redirect_takes_the_key_nowhere(servers: tuple[KeyedServer, KeyedServer]) -> None:
    _, stranger = servers
    moved = KeyedServer(stranger.url)
    look(ServerWatch(KEY, frozenset({moved.url})), moved.url)
    moved.stop()
    assert moved.carried()
    assert stranger.carried() == []


def test_options_name_addresses_in_one_form() -> None:
    given = parse_arguments(
        ["--vllm-server", "http://Node7:9001/", "--vllm-server", "http://[::1]:9002"]
    )
    assert given.vllm_server == ["http://node7:9001", "http://[::1]:9002"]


def test_a_wrong_address_is_refused_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--vllm-server", "node7:9001"])
    assert "write http://HOST:PORT" in capsys.readouterr().err


def test_a_stranger_that_registers_a_server_gets_no_key(
    tmp_path: Path, servers: tuple[KeyedServer, KeyedServer]
) -> None:
    own, stranger = servers
    flags = ("--store", "memory", "--vllm-server", own.url)
    service = Service(tmp_path, *flags, environ={"VLLM_API_KEY": KEY}).start()
    service.post("/register", trainer(model="m", inference_servers=[own.url, stranger.url]))
    # The queues end the wait: each server is polled within seconds.
    assert own.requests.get(timeout=120) == ("/weights", f"Bearer {KEY}")
    assert [stranger.requests.get(timeout=120) for _ in range(2)] == [
        ("/weights", None),
        ("/bridge/state", None),
    ]
    service.signal(signal.SIGTERM)
