"""Keys go to the servers that own options name, and to no other: not along a redirect, and not to
an address from a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from atroposlib.cli import collecting
from atroposlib.dashboard.live.servers import ServerWatch
from atroposlib.inference.client import APIServerConfig, VLLMServer
from atroposlib.inference.server_manager import FleetFollower, ServerManager, create_proxy_session
from atroposlib.service_client import RolloutServiceClient
from atroposlib.web.connections import direct_client
from example_trainer.api_keys import ServerKeys
from example_trainer.child_processes import processes
from example_trainer.vllm_client import VLLMClient
from example_trainer.weight_bridge.service_board import ServiceBoard
from tests.http_server import Answer, HttpServer, Request

KEY = "a-key-that-strangers-want"
PATIENT = 60.0


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLOUT_API_KEY", "VLLM_API_KEY", "ATROPOS_PROXY_API_KEY"):
        monkeypatch.setenv(name, KEY)


def answering(content: object) -> HttpServer:
    """Start a server with one answer for every path."""
    return HttpServer(lambda _: (200, content))


@pytest.fixture
def stranger() -> Iterator[HttpServer]:
    with answering({}) as server:
        yield server


# ---- redirects ----


def trainer_asks(url: str) -> None:
    with direct_client(url, PATIENT, KEY) as http:
        http.post("/register", json={})


def trainer_asks_vllm(url: str) -> None:
    client = VLLMClient(url, PATIENT, KEY)
    with suppress(Exception):
        client.call("/bridge/info", {})
    client.close()


def script_asks(url: str) -> None:
    with suppress(OSError):
        processes.get_json(f"{url}/fleet", PATIENT, KEY)


def script_posts(url: str) -> None:
    with suppress(OSError):
        processes.post_json(f"{url}/fleet/join", {"url": "http://h:1"}, PATIENT, KEY)


def collector_asks(url: str) -> None:
    with suppress(Exception):
        collecting.Service(url, 0.1, KEY).request("GET", "/status")


async def environment_asks(url: str) -> None:
    client = RolloutServiceClient(url, 0.1, KEY)
    with suppress(Exception):
        await client.get("/info")
    await client.close()


async def follower_asks(url: str) -> None:
    follower = FleetFollower(url, KEY)
    await follower.ask()
    await follower.close()


def sampling_server(url: str) -> VLLMServer:
    return VLLMServer(
        APIServerConfig(base_url=f"{url}/v1", api_key=KEY, model_name="m", timeout=60)
    )


async def environment_samples(url: str) -> None:
    server = sampling_server(url)
    with suppress(httpx.HTTPError):
        await server.http.post("/generate", json={})
    await server.close()


async def environment_completes(url: str) -> None:
    server = sampling_server(url)
    with suppress(Exception):
        await server.openai.completions.create(model="m", prompt="x")
    await server.close()


async def proxy_client_asks(url: str) -> None:
    with suppress(httpx.HTTPError):
        await create_proxy_session(url)


async def page_asks(url: str) -> None:
    watch = ServerWatch(KEY, frozenset({url}))
    await watch.look([url])
    await watch.close()


CLIENTS: list[Callable[[str], Any]] = [
    trainer_asks, trainer_asks_vllm, script_asks, script_posts, collector_asks, environment_asks, follower_asks,
    environment_samples, environment_completes, proxy_client_asks, page_asks,
]  # fmt: skip


@pytest.mark.parametrize("ask", CLIENTS, ids=lambda ask: ask.__name__)
def test_a_redirect_does_not_carry_the_key_elsewhere(
    ask: Callable[[str], Any], stranger: HttpServer
) -> None:
    other = stranger.url.replace("127.0.0.1", "localhost")

    def redirect(request: Request) -> Answer:
        return 307, {}, {"Location": other + request.path}

    with HttpServer(redirect) as named:
        outcome = ask(named.url)
        if asyncio.iscoroutine(outcome):
            asyncio.run(outcome)
        assert named.saw(KEY), "the server that was named gets it"
    assert not stranger.saw(KEY)


# ---- addresses from a rollout service ----


def table(keyed: bool, *urls: str) -> dict[str, Any]:
    servers = [{"url": url, "standing": "good"} for url in urls]
    return {"servers": servers, "wanted": list(urls), "left": [], "keyed": keyed, "published": 1.0}


async def followed(service: HttpServer, own: HttpServer, service_key: str | None) -> list[str]:
    """The servers of an environment after it has read a service's table, each of them asked once."""
    manager = ServerManager(
        [APIServerConfig(base_url=f"{own.url}/v1", api_key=KEY, model_name="m", timeout=60)]
    )
    manager.follower = FleetFollower(service.url, service_key)
    await manager._follow_once()
    for server in manager.servers:
        with suppress(httpx.HTTPError):
            await server.http.get("/weights")
    urls = [server.root_url for server in manager.servers]
    await manager.close()
    return urls


@pytest.mark.parametrize(
    ("keyed", "service_key", "trusted"),
    [(False, None, False), (False, "s", False), (True, None, False), (True, "s", True)],
)
def test_an_environment_uses_addresses_of_a_service_that_needs_a_key(
    stranger: HttpServer,
    keyed: bool,
    service_key: str | None,
    trusted: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with answering({}) as own, answering(table(keyed, own.url, stranger.url)) as service:
        urls = asyncio.run(followed(service, own, service_key))
        assert urls == ([own.url, stranger.url] if trusted else [own.url])
        assert own.saw(KEY)
    assert stranger.saw(KEY) == trusted
    assert (f"{stranger.url} is not used" in caplog.text) == (not trusted)


def test_an_environment_without_keys_uses_every_address(
    monkeypatch: pytest.MonkeyPatch, stranger: HttpServer
) -> None:
    monkeypatch.delenv("VLLM_API_KEY")
    manager = ServerManager([APIServerConfig(base_url="http://127.0.0.1:1/v1", model_name="m")])
    with answering(table(False, stranger.url)) as service:
        manager.follower = FleetFollower(service.url)
        asyncio.run(manager._follow_once())
    assert [server.root_url for server in manager.servers] == [stranger.url]


@pytest.mark.parametrize(
    ("keyed", "service_key", "trusted"),
    [(False, None, False), (False, "s", False), (True, None, False), (True, "s", True)],
)
def test_a_trainer_lets_in_addresses_of_a_service_that_needs_a_key(
    stranger: HttpServer,
    keyed: bool,
    service_key: str | None,
    trusted: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = "http://127.0.0.1:9001"
    caplog.set_level(logging.WARNING)
    with answering(table(keyed, own, stranger.url)) as service:
        board = ServiceBoard(service.url, service_key, keys=ServerKeys(True, [own]))
        for _ in range(3):
            assert board.publish([]) == ([own, stranger.url] if trusted else [own], [])
        board.close()
    assert caplog.text.count(f"{stranger.url} does not join") == (not trusted), "once"


def test_a_trainer_without_a_key_lets_in_every_address(stranger: HttpServer) -> None:
    with answering(table(False, stranger.url)) as service:
        board = ServiceBoard(service.url, None)
        assert board.publish([]) == ([stranger.url], [])
        board.close()


def test_the_page_sends_no_key_to_a_server_that_a_request_named(stranger: HttpServer) -> None:
    async def look() -> None:
        watch = ServerWatch(KEY, frozenset({"http://127.0.0.1:9001"}))
        await watch.look([stranger.url])
        await watch.close()

    asyncio.run(look())
    assert stranger.requests
    assert not stranger.saw(KEY)
