"""The weight bridge to servers of several ranks, that share nothing, or that are not there."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch

from example_trainer.errors import BridgeError
from example_trainer.models.hf_checkpoint import load_model
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from tests.conftest import Processes
from tests.e2e.bridge_helpers import TOLERANCE, checksums, joined, largest_difference, new_weights
from tests.e2e.conftest import BRIDGE_TIMEOUT, VllmServer, start_vllm
from tests.light_servers import LightServer, Starter, until

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]


def test_two_ranks_get_their_own_shards(
    processes: Processes,
    free_port: Callable[[], int],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = start_vllm(
        processes, free_port, tiny_model, tmp_path, flags=("--tensor-parallel-size", "2")
    )
    for rank in range(2):
        assert f"Weight updater thread started (name: WeightUpdater_TP{rank})" in server.log
    with joined(server, "overlapped", free_port, monkeypatch) as (bridge, model):
        report = bridge.sync(1, new_weights(model, 1))
        expected = checksums(server, model)
        assert server.state()["checksums"] == expected
        assert expected[0] == report.checksum != expected[1]
        assert largest_difference(server, model) < TOLERANCE
    single = SingleCopyBridge(BridgeServer("localhost", server.port, BRIDGE_TIMEOUT))
    with pytest.raises(BridgeError, match=r"vLLM's 2 ranks.*--use-shared-memory"):
        single.connect(model)


def test_every_replica_of_a_data_parallel_server_gets_the_weights(
    processes: Processes,
    free_port: Callable[[], int],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = start_vllm(
        processes, free_port, tiny_model, tmp_path, flags=("--data-parallel-size", "2")
    )
    with joined(server, "direct", free_port, monkeypatch) as (bridge, model):
        bridge.sync(1, new_weights(model, 1))
        ranks = server.state()["ranks"]
        assert isinstance(ranks, list)
        assert {(rank["replica"], rank["tp_rank"]) for rank in ranks} == {(0, 0), (1, 0)}
        assert server.state()["checksums"] == checksums(server, model)
        # Each of these is several requests, which vLLM deals out over the replicas.
        assert largest_difference(server, model) < TOLERANCE
        assert largest_difference(server, model) < TOLERANCE
    single = SingleCopyBridge(BridgeServer("localhost", server.port, BRIDGE_TIMEOUT))
    with pytest.raises(BridgeError, match="--use-shared-memory"):
        single.connect(model)
    training_goes_on_without_a_server_that_lost_a_replica(server, free_port, tmp_path, monkeypatch)


def training_goes_on_without_a_server_that_lost_a_replica(
    server: VllmServer, free_port: Callable[[], int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill one of two replicas' processes, between two updates of a fleet with another server."""
    starter = Starter(folder / "light")
    other = LightServer(starter, free_port(), "localhost", model=server.model)
    other.start()
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    bridge = BroadcastBridge(
        [
            BridgeServer("localhost", s.port, BRIDGE_TIMEOUT, startup_timeout=60)
            for s in (server, other)
        ]
    )
    try:
        model = load_model(str(server.model), torch.float32)
        bridge.connect(model)
        assert bridge.sync(2, new_weights(model, 2)).fleet["good"] == 2
        os.kill(child_called(b"EngineCore_DP1", server.process.command_pid()), signal.SIGKILL)
        report = bridge.sync(3, new_weights(model, 3))
        assert (report.fleet["good"], report.fleet["size"]) == (1, 2)
        assert other.state()["checksums"] == [report.checksum]
        assert bridge.server_urls() == [other.url]
        until(lambda: not healthy(server))
        assert bridge.sync(4, new_weights(model, 4)).fleet["good"] == 1
    finally:
        bridge.close()
        starter.close()


def child_called(title: bytes, of: int) -> int:
    """The process of this title that a process has started, or one that it has started."""
    parents, called = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended in between
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
            called += [int(folder.name)] * (title in (folder / "cmdline").read_bytes())

    def is_ours(pid: int) -> bool:
        return pid == of or (pid in parents and is_ours(parents[pid]))

    (found,) = filter(is_ours, called)
    return found


def healthy(server: VllmServer) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_server_that_does_not_share_says_so(
    processes: Processes, free_port: Callable[[], int], tiny_model: Path, tmp_path: Path
) -> None:
    server = start_vllm(processes, free_port, tiny_model, tmp_path, shared=False)
    with pytest.raises(BridgeError, match="VLLM_ENABLE_SHARED_WEIGHTS"):
        BroadcastBridge(BridgeServer("localhost", server.port, BRIDGE_TIMEOUT)).serving_dtype()
    assert len(server.generate([1, 2, 3], max_tokens=3, ignore_eos=True)["token_ids"][0]) == 3
    refuses_a_head_that_does_not_end(server)
    ends_though_it_owes_answers(server, processes)


def refuses_a_head_that_does_not_end(server: VllmServer) -> None:
    """Its connections have the bounds of `atroposlib.web.bounded_protocol`."""
    with (
        socket.create_connection(("localhost", server.port), timeout=60) as client,
        suppress(ConnectionResetError),
    ):
        client.sendall(b"GET /health HTTP/1.1\r\nx: " + b"y" * 100_000)
        assert client.recv(1000).startswith(b"HTTP/1.1 431 ")
    assert healthy(server)


def ends_though_it_owes_answers(server: VllmServer, processes: Processes) -> None:
    """Requests under way get an error, not a stump that could pass for an answer; and the server
    ends by itself.
    """
    body = {
        "prompt": {"prompt_token_ids": [1, 2, 3]},
        "max_tokens": 500,
        "ignore_eos": True,
        "n": 64,
    }
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, timeout=120) as client:
        owed = pool.submit(client.post, "/generate", json=body)
        busy = re.compile(r"^vllm:num_requests_running\S* [1-9]", re.MULTILINE)

        def idle() -> str | None:
            return (
                None
                if busy.search(httpx.get(f"{server.url}/metrics", timeout=30).text)
                else "it does not run"
            )

        processes.wait_until("the request", idle, 180)
        assert processes.stop(server.process) not in (128 + signal.SIGKILL, -signal.SIGKILL)
        if owed.exception(60) is None:
            assert owed.result().status_code == 503, owed.result().text


def test_no_server_is_one_line_with_the_remedy(free_port: Callable[[], int]) -> None:
    port = free_port()
    with pytest.raises(
        BridgeError, match=rf"no vLLM server at http://localhost:{port}.*vllm_api_server.py"
    ):
        BroadcastBridge(BridgeServer("localhost", port, 1.0)).serving_dtype()
