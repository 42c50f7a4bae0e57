"""No connection between the stack's parts goes through a proxy, whatever the environment names as
one.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.web.connections import direct_client
from example_trainer.batch.client import RolloutClient
from example_trainer.batch.local_sampler import Sampler
from example_trainer.batch.problems import Problem
from example_trainer.launcher.status import queue_of, served_version
from example_trainer.process import StopSignal
from example_trainer.weight_bridge.lora import LoraServer
from example_trainer.weight_bridge.owned_server import OwnedServer
from example_trainer.weight_bridge.server import BridgeServer
from tests.conftest import ROOT
from tests.example_trainer.batch.registration import REGISTRATION
from tests.http_server import Answer, HttpServer, Request

PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def contenting(request: Request) -> Answer:
    """Answer with fields that any of the clients is content with."""
    if request.path == "/metrics":
        return 200, b"lockstep_weight_version 7\n"
    lists = ("token_ids", "token_logprobs", "weight_versions", "weight_version_spans")
    fields: dict[str, Any] = {"instance": "other", "current": None, "queue_size": 7, "uuid": 1}
    fields["queue"] = {"groups": 7}
    return 200, fields | {name: [] for name in (*lists, "finish_reasons")}


def asked(server: HttpServer) -> list[str]:
    return [request.path for request in server.requests]


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with HttpServer(contenting) as listener:
        yield listener


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    with HttpServer(contenting) as listener:
        for name in PROXY_VARIABLES:
            monkeypatch.setenv(name, listener.url)
            monkeypatch.setenv(name.lower(), listener.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield listener


def ask_rollouts(port: int, _: Path) -> object:
    client = RolloutClient(f"http://127.0.0.1:{port}", StopSignal(), service_timeout=60)
    client.register(REGISTRATION)
    return client.close()


def ask_owned(port: int, folder: Path) -> object:
    server = OwnedServer(
        "serve {model}", "", "name", "127.0.0.1", port, folder / "log", None, None, 20.0
    )
    assert not server._client.missing("/health")
    return server.close()


def ask_sampler(port: int, _: Path) -> object:
    sampler = Sampler(f"http://127.0.0.1:{port}", str(ROOT / "assets" / "starter_model"), 1, 1, 0)
    (group,) = sampler.groups([Problem("1 + 1", "2")])
    assert group["tokens"] == []
    return sampler.close()


CLIENTS: dict[str, Callable[[int, Path], object]] = {
    "bridge": lambda port, _: BridgeServer("127.0.0.1", port, 60.0).has_restarted(),
    "lora": lambda port, _: LoraServer("127.0.0.1", port, 60.0).has_lost_adapter(),
    "rollouts": ask_rollouts,
    "legacy server": ask_owned,
    "samples of the deterministic check": ask_sampler,
    "status: queue": lambda port, _: queue_of(f"http://127.0.0.1:{port}", "")[0],
    "status: version": lambda port, _: served_version(port),
}


@pytest.mark.parametrize("ask", CLIENTS.values(), ids=CLIENTS)
def test_no_client_of_ours_asks_a_proxy(
    ask: Callable[[int, Path], object], server: HttpServer, proxy: HttpServer, tmp_path: Path
) -> None:
    assert httpx.get(f"http://127.0.0.1:{server.port}/control", timeout=60).status_code == 200
    # The variables do work.
    assert (asked(proxy), asked(server)) == ([f"{server.url}/control"], [])
    assert ask(server.port, tmp_path) in (None, True, 7)
    assert asked(server)
    assert len(proxy.requests) == 1


def test_certificates_of_ones_own_are_heeded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "authority.pem").write_text("no certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    with pytest.raises(OSError, match=r"(?i)no.certificate"):
        direct_client("https://127.0.0.1:1", 1.0)


def opened_without_us(path: Path) -> list[str]:
    """Calls in a file that make an HTTP connection of their own."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            words = ast.unparse(node.func)
            if words.startswith("httpx.") and words.rpartition(".")[2] in {
                "Client", "AsyncClient", "get", "post", "put", "patch", "delete", "request", "stream",
            }:  # fmt: skip
                found.append(f"{path}:{node.lineno} {words}")
            if words.endswith("request.urlopen"):
                found.append(f"{path}:{node.lineno} {words}")
    return found


def test_every_client_of_the_trainer_and_the_scripts_is_made_in_one_place() -> None:
    ours = [
        folder
        for folder in ROOT.iterdir()
        if (folder / "__init__.py").exists() or folder.name == "scripts"
    ]
    others = {"atroposlib", "environments", "tests", "bench"}
    files = [path for folder in ours if folder.name not in others for path in folder.rglob("*.py")]
    assert ROOT / "example_trainer" / "batch" / "client.py" in files
    found = [call for path in files for call in opened_without_us(path)]
    assert found == [], "atroposlib/web/connections.py makes them"


def test_the_vllm_server_has_one_client() -> None:
    """Deadlines, retries and errors are the same for all who ask it. The others ask the rollout
    service from threads of their own: for evaluations, and for members of the fleet."""
    makers = [
        path.relative_to(ROOT / "example_trainer")
        for path in (ROOT / "example_trainer").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] == "direct_client"
    ]
    asks_the_service = ["batch/evaluations.py", "weight_bridge/service_board.py"]
    assert sorted(map(str, makers)) == sorted([*asks_the_service, "vllm_client.py"])


def test_no_connection_is_closed_while_threads_ask() -> None:
    """A pool that closes what looks idle closes sockets under requests now and then; this one has
    nothing to close.
    """
    threads = 48  # more than the 20 idle connections that httpx keeps by itself
    together = threading.Barrier(threads)

    def answer(_: Request) -> Answer:
        together.wait(60)  # all of a round are under way at the same time
        return 200, {}

    with (
        HttpServer(answer, keep_alive=True) as server,
        direct_client(server.url, 60.0) as client,
        ThreadPoolExecutor(threads) as pool,
    ):

        def ask(_: int) -> int:
            return client.post("/generate", json={}).status_code

        for _ in range(4):
            assert list(pool.map(ask, range(threads))) == [200] * threads
    assert len({request.client_port for request in server.requests}) == threads
