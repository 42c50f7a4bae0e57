"""vLLM servers that are killed and started again while a trainer lives: no token is sampled with
weights other than the trainer's.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import torch

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

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]


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
    return Path(httpx.get(f"{server.url}/bridge/info", timeout=30).json()["config_path"])


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
        refused = httpx.get(f"{again.url}/health", timeout=30)
        assert (refused.status_code, again.state()["weight_version"]) == (503, 0)
        assert "waiting for its weights" in refused.json()["error"]
        before = bridge.joins
        bridge.keep_serving(write_again)
        assert bridge.joins == before + 1
        assert httpx.get(f"{again.url}/health", timeout=30).status_code == 200
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
    httpx.post(f"{service}/scored_data", json=made_up_group(0), timeout=30).raise_for_status()
    processes.wait_for_text(trainer, "Step 1/2", seconds=120)
    mortal.kill()
    processes.wait_for_text(trainer, "does not answer; start it again", seconds=180)
    mortal.start_again()  # it generates, so it has weights that are trained on
    assert mortal.now.state()["weight_version"] == 1
    httpx.post(f"{service}/scored_data", json=made_up_group(1), timeout=30).raise_for_status()
    text = processes.finish(trainer, seconds=120)
    assert re.search(r"\[Fleet\] \S+ is back: serves version 1 ", text)
    assert "Training complete: 2 steps" in text
    trained = load_model(str(tmp_path / "checkpoints" / "step_2"), torch.float32)
    assert mortal.now.state()["weight_version"] == 2
    assert mortal.now.state()["checksums"] == checksums(mortal.now, trained)
