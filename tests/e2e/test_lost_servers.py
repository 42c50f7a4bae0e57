"""vLLM servers that are killed and started again while a trainer lives, and servers whose engine, or own
process, is stopped while it samples.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from atroposlib.inference import client
from atroposlib.inference.client import APIServerConfig
from atroposlib.inference.server_manager import ServerManager
from example_trainer.launcher import roles
from example_trainer.models.hf_checkpoint import load_model
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import BridgeServer
from tests.conftest import ROOT, Processes
from tests.e2e.bridge_helpers import (
    TOLERANCE,
    checksums,
    joined,
    largest_difference,
    made_up_group,
    new_weights,
)
from tests.e2e.conftest import BRIDGE_TIMEOUT, VllmServer, start_vllm, trainer_command

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


@dataclass
class MortalServer:
    """A server that tests kill and start again on the same port; `now` is the running process."""

    processes: Processes
    folder: Path
    now: VllmServer

    def kill(self) -> None:
        self.processes.kill(self.now.process)

    def start_again(self, ready: str = "/health_generate") -> None:
        port = self.now.port
        self.now = start_vllm(
            self.processes, lambda: port, self.now.model, self.folder, ready=ready
        )


def config_of(server: VllmServer) -> Path:
    return Path(httpx.get(f"{server.url}/bridge/info", timeout=120).json()["config_path"])


@pytest.fixture(scope="module")
def mortal(
    module_processes: Processes, server: VllmServer, free_port: Callable[[], int], tiny_model: Path
) -> MortalServer:
    """It shares the folder with the other one, which lives on."""
    folder = config_of(server).parent
    return MortalServer(
        module_processes, folder, start_vllm(module_processes, free_port, tiny_model, folder)
    )


@pytest.mark.parametrize("kind", ["direct", "single_copy"])
def test_a_server_that_was_killed_gets_the_present_weights_before_it_serves(
    mortal: MortalServer, kind: str, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(mortal.now, kind, free_port, monkeypatch) as (bridge, model):
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

        def write() -> None:
            for weight in weights.values():
                weight += 0.05
            write_again()

        def write_again() -> None:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(weights[name])

        bridge.sync(1, write)
        mortal.kill()
        bridge.keep_serving(write_again)  # it is away: nothing happens
        mortal.start_again(ready="/bridge/state")
        again = mortal.now
        refused = httpx.get(f"{again.url}/health", timeout=120)
        assert (refused.status_code, again.state()["weight_version"]) == (503, 0)
        assert "waiting for its weights" in refused.json()["error"]
        before = bridge.joins
        bridge.keep_serving(write_again)
        assert bridge.joins == before + 1
        assert httpx.get(f"{again.url}/health", timeout=120).status_code == 200
        assert (
            again.state()["weight_version"],
            again.generate([1], max_tokens=1)["weight_versions"],
        ) == (1, [1])
        assert largest_difference(again, model) < TOLERANCE
        bridge.sync(2, write)
        assert largest_difference(again, model) < TOLERANCE


def lasting(server: VllmServer) -> dict[str, object]:
    """Return a server's state of its bridge, without counters that grow by themselves."""
    return {key: value for key, value in server.state().items() if not key.endswith("_seconds")}


def test_the_engine_of_a_server_does_not_hold_its_port(server: VllmServer) -> None:
    """It ends a little after a server that is killed, which may be started again at once."""

    def listening(process: psutil.Process) -> set[int]:
        return {
            at.laddr.port
            for at in process.net_connections("tcp")
            if at.status == psutil.CONN_LISTEN
        }

    process = psutil.Process(server.process.command_pid())
    assert server.port in listening(process)
    children = process.children(recursive=True)
    assert children
    assert all(server.port not in listening(child) for child in children)


def test_two_servers_in_one_folder_keep_out_of_each_others_memory(
    mortal: MortalServer,
    server: VllmServer,
    free_port: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = config_of(server), config_of(mortal.now)
    assert (first.name, second.name) == (
        "vllm_bridge_config.json",
        f"vllm_bridge_config-{mortal.now.port}.json",
    )
    assert first.parent == second.parent
    kept = lasting(server)
    with joined(mortal.now, "single_copy", free_port, monkeypatch) as (bridge, model):
        bridge.sync(1, new_weights(model, 1))
        assert largest_difference(mortal.now, model) < TOLERANCE
        assert largest_difference(server, load_model(str(server.model), torch.float32)) < TOLERANCE
        mortal.kill()
        mortal.start_again(ready="/bridge/state")
        assert config_of(mortal.now) == second
        assert "waiting for its weights" in str(mortal.now.state()["last_error"])
        assert lasting(server) == kept
    assert first.exists()
    assert second.exists()


def test_one_trainer_serves_two_servers_and_one_of_them_may_die(
    mortal: MortalServer, server: VllmServer
) -> None:
    clients = [
        BridgeServer("localhost", s.port, BRIDGE_TIMEOUT, startup_timeout=240)
        for s in (server, mortal.now)
    ]
    bridge = BroadcastBridge(clients)
    model = load_model(str(server.model), torch.float32)
    bridge.connect(model)
    for version in (0, 1):
        report = bridge.sync(version, new_weights(model, version))
        assert report.bytes_moved == 2 * sum(
            p.numel() * p.element_size() for p in model.parameters()
        )
        for one in (server, mortal.now):
            assert one.state()["checksums"] == checksums(one, model)
            assert largest_difference(one, model) < TOLERANCE
    mortal.kill()
    thread = threading.Thread(target=mortal.start_again)
    thread.start()
    bridge.sync(2, new_weights(model, 2))  # without the second one
    assert server.state()["weight_version"] == 2
    deadline = time.monotonic() + 240
    while thread.is_alive():  # it serves when it has the present weights
        assert time.monotonic() < deadline
        if bridge.server_restarted():
            bridge.keep_serving(lambda: None)
        thread.join(0.2)
    for one in (server, mortal.now):
        assert one.state()["weight_version"] == 2
        assert largest_difference(one, model) < TOLERANCE
    bridge.close()


def test_a_trainer_of_two_ranks_that_waits_for_a_batch_brings_a_restarted_server_up_to_date(
    mortal: MortalServer, processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port = free_port()
    service = f"http://127.0.0.1:{port}"
    processes.start_service(port)
    _, _, *words = roles.anywhere(
        trainer_command(
            mortal.now.model,
            service,
            tmp_path,
            bridge="broadcast",
            vllm_port=mortal.now.port,
            training_steps=2,
            batch_size=1,
            gradient_accumulation_steps=4,
            seq_len=64,
            num_threads=1,
            rank_timeout=120,
        )
    )
    trainer = processes.start(
        "trainer",
        [sys.executable, "-m", "tests.forked_ranks", *words],
        # so the trainer takes the port after the ranks' store
        {"PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": "ranks"},
        directory=tmp_path,
    )
    httpx.post(f"{service}/scored_data", json=made_up_group(0), timeout=120).raise_for_status()
    processes.wait_for_text(trainer, "Step 1/2", seconds=120)
    mortal.kill()
    processes.wait_for_text(trainer, "does not answer; start it again", seconds=180)
    mortal.start_again()  # it generates, so it has weights that are trained on
    assert mortal.now.state()["weight_version"] == 1
    httpx.post(f"{service}/scored_data", json=made_up_group(1), timeout=120).raise_for_status()
    text = processes.finish(trainer, seconds=120)
    assert re.search(r"\[Fleet\] \S+ is back: serves version 1 ", text)
    assert "Training complete: 2 steps" in text
    trained = load_model(str(tmp_path / "checkpoints" / "step_2"), torch.float32)
    assert mortal.now.state()["weight_version"] == 2
    assert mortal.now.state()["checksums"] == checksums(mortal.now, trained)


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
    told: dict[str, Any] = httpx.get(f"{server.url}/weights", timeout=120).json()
    return told


def until(processes: Processes, what: str, condition: Callable[[], bool]) -> None:
    processes.wait_until(what, lambda: None if condition() else "not yet", 240)


def servers_that_serve(processes: Processes, servers: list[VllmServer]) -> list[VllmServer]:
    """Wait until each server serves; an engine that was stopped before may still be healing."""
    for server in servers:
        until(processes, f"{server.url} to serve", lambda at=server: weights(at)["serving"])
    return servers


def sampled_tokens(server: VllmServer) -> float:
    shown = httpx.get(f"{server.url}/metrics", timeout=120).text
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
    model = httpx.get(f"{server.url}/v1/models", timeout=120).json()["data"][0]["id"]
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
            # A client has its answer a moment before vLLM lets go of its request.
            until(
                module_processes,
                "the requests to be let go",
                lambda: weights(server)["in_flight"] == 0,
            )
            told = weights(server)
            assert not told["serving"]
            assert REASON in told["trouble"]
            assert REASON in server.state()["engine_trouble"]  # type: ignore[operator]
            for method, path in (
                ("GET", "/health"),
                ("GET", "/health_generate"),
                ("POST", "/generate"),
            ):
                refused = httpx.request(
                    method, f"{server.url}{path}", json=asked["/generate"], timeout=120
                )
                assert (refused.status_code, REASON in refused.text) == (503, True), path
        finally:
            os.kill(engine, signal.SIGCONT)
    until(module_processes, "the server to heal", lambda: weights(server)["serving"])
    assert httpx.get(f"{server.url}/health", timeout=120).status_code == 200
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
    good, faulty = servers_that_serve(module_processes, servers)
    clients = [
        BridgeServer("localhost", server.port, BRIDGE_TIMEOUT, startup_timeout=120)
        for server in servers
    ]
    bridge = BroadcastBridge(clients, patience=10.0)
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
        expect_answers_of_their_own(answers)
        # On a busy machine another reason may be named: no step, or a long first step of a shape.
        named = "vLLM's engine " if what == "engine" else "does not answer"
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


def expect_answers_of_their_own(answers: list[Any]) -> None:
    """Expect one whole answer for each request, by the weights that were served."""
    assert [answer.prompt_tokens for answer in answers] == [[n + 1] for n in range(REQUESTS)], (
        "each has one answer, its own"
    )
    assert all(
        len(tokens) == LONG["max_tokens"] for answer in answers for tokens in answer.output_tokens
    )
    assert all(versions == [1] * 4 for versions in (answer.weight_versions for answer in answers))
