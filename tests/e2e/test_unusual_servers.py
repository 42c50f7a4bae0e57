"""The weight bridge to servers of several ranks, that share nothing, or that are not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from example_trainer.errors import BridgeError
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from tests.conftest import Processes
from tests.e2e.bridge_helpers import TOLERANCE, checksums, joined, largest_difference, new_weights
from tests.e2e.conftest import BRIDGE_TIMEOUT, start_vllm

pytestmark = pytest.mark.e2e


def test_two_ranks_get_their_own_shards(
    processes: Processes, free_port: Callable[[], int], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_vllm(processes, free_port, tiny_model, tmp_path, flags=("--tensor-parallel-size", "2"))
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
    processes: Processes, free_port: Callable[[], int], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_vllm(processes, free_port, tiny_model, tmp_path, flags=("--data-parallel-size", "2"))
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


def test_a_server_that_does_not_share_says_so(
    processes: Processes, free_port: Callable[[], int], tiny_model: Path, tmp_path: Path
) -> None:
    server = start_vllm(processes, free_port, tiny_model, tmp_path, shared=False)
    with pytest.raises(BridgeError, match="VLLM_ENABLE_SHARED_WEIGHTS"):
        BroadcastBridge(BridgeServer("localhost", server.port, BRIDGE_TIMEOUT)).serving_dtype()
    assert len(server.generate([1, 2, 3], max_tokens=3, ignore_eos=True)["token_ids"][0]) == 3


def test_no_server_is_one_line_with_the_remedy(free_port: Callable[[], int]) -> None:
    port = free_port()
    with pytest.raises(BridgeError, match=rf"no vLLM server at http://localhost:{port}.*vllm_api_server.py"):
        BroadcastBridge(BridgeServer("localhost", port, 1.0)).serving_dtype()
