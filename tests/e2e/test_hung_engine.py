"""A vLLM server whose engine, or whose own process, is stopped while it samples: clients and
trainer go on without it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from atroposlib.inference import client
from atroposlib.inference.client import APIServerConfig
from atroposlib.inference.server_manager import ServerManager
from example_trainer.models.hf_checkpoint import load_model
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import BridgeServer
from tests.conftest import Processes
from tests.e2e.bridge_helpers import TOLERANCE, largest_difference, new_weights
from tests.e2e.conftest import BRIDGE_TIMEOUT, VllmServer, start_vllm

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

ENGINE_TIMEOUT = 6.0
"""Seconds; a step of the tiny model takes a few milliseconds, and a busy machine may hold it up."""
REASON = "vLLM's engine has not answered for 6 s (--engine-timeout)"
LONG: dict[str, Any] = {"max_tokens": 480, "ignore_eos": True}
REQUESTS = 32
"""As many as keep both servers busy for seconds, so that a busy machine does not come too late to
stop one."""


@pytest.fixture(scope="module")
def servers(
    module_processes: Processes,
    free_port: Callable[[], int],
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[VllmServer]:
    flags = ("--bridge-timeout", str(BRIDGE_TIMEOUT), "--engine-timeout", str(ENGINE_TIMEOUT))

    def start(_: int) -> VllmServer:
        return start_vllm(
            module_processes, free_port, tiny_model, tmp_path_factory.mktemp("vllm"), flags=flags
        )

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, range(2)))


def engine_of(server: VllmServer) -> int:
    children = psutil.Process(server.process.command_pid()).children(recursive=True)
    (engine,) = [
        child.pid
        for child in children
        if "EngineCor" in child.name() or "EngineCor" in " ".join(child.cmdline())
    ]
    return engine


def weights(server: VllmServer) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(f"{server.url}/weights", timeout=30).json()
    return told


def until(processes: Processes, what: str, condition: Callable[[], bool]) -> None:
    processes.wait_until(what, lambda: None if condition() else "not yet", 240)


def sampled_tokens(server: VllmServer) -> float:
    shown = httpx.get(f"{server.url}/metrics", timeout=30).text
    return sum(
        float(number)
        for number in re.findall(r"^vllm:generation_tokens_total\S* (\S+)", shown, re.MULTILINE)
    )


def stop_engine_while_it_samples(processes: Processes, server: VllmServer) -> int:
    """Stop the engine in a step whose shape it knows: in the first step of a shape it would have
    ten times as long.
    """
    before = sampled_tokens(server)
    until(processes, "many steps with all requests", lambda: sampled_tokens(server) > before + 1000)
    os.kill(engine := engine_of(server), signal.SIGSTOP)
    if not weights(server)["in_flight"]:
        os.kill(engine, signal.SIGCONT)
        raise AssertionError(
            "all was sampled before the engine was stopped: this test needs more requests"
        )
    return engine


def test_requests_end_with_503_and_the_server_heals_by_itself(
    module_processes: Processes, servers: list[VllmServer]
) -> None:
    server, prompt = servers[0], [72, 101, 108, 108, 111]
    greedy = server.generate(prompt, temperature=0.0, max_tokens=16)
    model = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"][0]["id"]
    completion = {"model": model, "prompt": prompt, "n": 8, **LONG}
    asked = {
        "/generate": {"prompt": {"prompt_token_ids": prompt}, "n": 16, **LONG},
        "/v1/completions": completion,
        "/v1/completions#stream": completion | {"stream": True},
    }
    with ThreadPoolExecutor(4) as pool:
        answers = {
            path: pool.submit(
                httpx.post, f"{server.url}{path.partition('#')[0]}", json=body, timeout=240
            )
            for path, body in asked.items()
        }
        engine = stop_engine_while_it_samples(module_processes, server)
        try:
            for path in ("/generate", "/v1/completions"):
                answer = answers[path].result()
                assert answer.status_code == 503, answer.text
                assert REASON in answer.json()["error"]
            stream = answers["/v1/completions#stream"].result()
            last = [line.removeprefix("data: ") for line in stream.text.splitlines() if line][-1]
            assert stream.status_code == 503 or json.loads(last)["error"]["code"] == 503
            assert REASON in last
            told = weights(server)
            assert (told["serving"], told["in_flight"]) == (False, 0)
            assert REASON in told["trouble"]
            assert REASON in server.state()["engine_trouble"]  # type: ignore[operator]
            for method, path in (
                ("GET", "/health"),
                ("GET", "/health_generate"),
                ("POST", "/generate"),
            ):
                refused = httpx.request(
                    method, f"{server.url}{path}", json=asked["/generate"], timeout=30
                )
                assert (refused.status_code, REASON in refused.text) == (503, True), path
        finally:
            os.kill(engine, signal.SIGCONT)
    until(module_processes, "the server to heal", lambda: weights(server)["serving"])
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    assert (
        server.generate(prompt, temperature=0.0, max_tokens=16)["token_ids"] == greedy["token_ids"]
    )
    assert f"[Engine] UNHEALTHY: {REASON}" in server.log
    assert "[Engine] vLLM's engine makes progress again" in server.log


async def ask_both(
    servers: list[VllmServer], requests: int, begun: Callable[[], None]
) -> list[Any]:
    """Ask the servers through the SDK; `begun` runs in a thread when the requests are under way."""
    addresses = ",".join(server.url for server in servers)
    manager = ServerManager([APIServerConfig(base_url=addresses, server_type="vllm")])
    try:
        asked = [
            asyncio.create_task(manager.generate(input_ids=[n + 1], n=4, **LONG))
            for n in range(requests)
        ]
        await asyncio.to_thread(begun)
        return list(await asyncio.wait_for(asyncio.gather(*asked), 240))
    finally:
        await manager.close()


@pytest.mark.parametrize("what", ["engine", "server"])
def test_a_fleet_of_two_goes_on_without_the_one_that_is_stopped(
    module_processes: Processes,
    servers: list[VllmServer],
    what: str,
    free_port: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(client, "MOVE_AFTER_SECONDS", 1.0)
    good, faulty = servers
    clients = [
        BridgeServer("localhost", server.port, BRIDGE_TIMEOUT, startup_timeout=120)
        for server in servers
    ]
    bridge = BroadcastBridge(clients, patience=3.0)
    bridge.serving_dtype()
    model = load_model(str(good.model), bridge.serving_dtype())  # type: ignore[arg-type]
    bridge.connect(model)
    stopped: list[int] = []

    def stop() -> None:
        if what == "engine":
            stopped.append(stop_engine_while_it_samples(module_processes, faulty))
        else:
            until(
                module_processes,
                "requests to be in flight",
                lambda: weights(faulty)["in_flight"] > 0,
            )
            stopped.append(faulty.process.command_pid())
            os.kill(stopped[0], signal.SIGSTOP)

    try:
        bridge.sync(1, new_weights(model, 1))
        answers = asyncio.run(ask_both(servers, REQUESTS, stop))
        assert [answer.prompt_tokens for answer in answers] == [[n + 1] for n in range(REQUESTS)], (
            "each has one answer, its own"
        )
        assert all(
            len(tokens) == LONG["max_tokens"]
            for answer in answers
            for tokens in answer.output_tokens
        )
        assert all(
            versions == [1] * 4 for versions in (answer.weight_versions for answer in answers)
        )
        named = REASON if what == "engine" else "does not answer"
        until(
            module_processes,
            "the trainer to name it",
            lambda: f"{faulty.url} ({named}" in bridge.server_trouble(),
        )
        bridge.sync(2, new_weights(model, 2))
        assert weights(good)["weight_version"] == 2
        assert "training goes on with 1 of 2 servers" in caplog.text
        os.kill(stopped.pop(), signal.SIGCONT)
        until(module_processes, "the server to be due", bridge.server_restarted)
        bridge.keep_serving(lambda: None)
        until(module_processes, "the server to serve", lambda: bool(weights(faulty)["serving"]))
        assert weights(faulty)["weight_version"] == 2, "it missed this one"
        assert bridge.server_trouble() == ""
        assert max(largest_difference(server, model) for server in servers) < TOLERANCE
        bridge.sync(3, new_weights(model, 3))
        assert max(largest_difference(server, model) for server in servers) < TOLERANCE
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        bridge.close()
