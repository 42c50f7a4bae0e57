"""The key of the vLLM servers goes only to addresses that the service's own options name."""

from __future__ import annotations

import asyncio
import logging
import queue
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from atroposlib.cli.run_api import parse_arguments
from atroposlib.dashboard.live.servers import ServerWatch
from tests.atroposlib.service.conftest import Service, trainer
from tests.http_server import Answer, HttpServer, Request
from tests.inference_standin import BRIDGE

KEY = "key-of-the-vllm-servers"
WEIGHTS = {"instance": "one", "weight_version": 3, "weight_epoch": 7, "serving": True}


class KeyedServer(HttpServer):
    """Answers /weights to every caller and /bridge/state to the key, and records the key of each
    request.

    Args:
        moved_to: address to which /bridge/state is redirected; empty for an ordinary answer.
    """

    def __init__(self, moved_to: str = "") -> None:
        self.moved_to = moved_to
        self.noted: queue.Queue[tuple[str, str | None]] = queue.Queue()
        super().__init__(self.keyed)

    def keyed(self, request: Request) -> Answer:
        self.noted.put((request.path, request.headers["Authorization"]))
        if request.path != "/bridge/state":
            return 200, WEIGHTS
        if self.moved_to:
            return 307, BRIDGE, {"location": f"{self.moved_to}{request.path}"}
        if request.headers["Authorization"] != f"Bearer {KEY}":
            return 401, BRIDGE
        return 200, BRIDGE

    def carried(self) -> list[tuple[str, str | None]]:
        """Path and Authorization of every request since the last call."""
        return [self.noted.get_nowait() for _ in range(self.noted.qsize())]


@pytest.fixture
def servers() -> Iterator[tuple[KeyedServer, KeyedServer]]:
    with KeyedServer() as one, KeyedServer() as other:
        yield one, other


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
    with KeyedServer(stranger.url) as moved:
        look(ServerWatch(KEY, frozenset({moved.url})), moved.url)
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
    assert own.noted.get(timeout=120) == ("/weights", f"Bearer {KEY}")
    assert [stranger.noted.get(timeout=120) for _ in range(2)] == [
        ("/weights", None),
        ("/bridge/state", None),
    ]
    service.signal(signal.SIGTERM)
