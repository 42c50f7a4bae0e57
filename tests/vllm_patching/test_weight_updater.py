"""The updater thread against a real trainer-side group: it receives, it survives the trainer, it takes the next one."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_patching.distributed_utils import BridgeGroups, Rendezvous, RendezvousError, host_store, rendezvous_address
from vllm_patching.manifest import Manifest, ManifestEntry
from vllm_patching.sharding import ModelGeometry, plan_shards
from vllm_patching.weight_updater import WeightUpdater

ROOT = Path(__file__).resolve().parents[2]
GEOMETRY = ModelGeometry("qwen3", 1, 12, 8, 4, 2, 3, 70, True, False, False, False, True)
SECONDS = 10.0

TRAINER = """
import sys, time, torch
from vllm_patching.distributed_utils import BridgeGroups, Rendezvous, host_store
port, epoch, num_bytes, behaviour = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = host_store("localhost", port, 10)
groups = BridgeGroups(Rendezvous("localhost", port, epoch, 0, 2, "gloo", 10), store, torch.device("cpu"))
if behaviour == "send":
    groups.send(torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8), 1)
if behaviour != "die":
    sys.stdin.readline()
"""


def manifest() -> Manifest:
    return Manifest(0, 1, tuple(ManifestEntry(spec, "float32", "cpu") for spec in plan_shards(GEOMETRY, 0, 1)))


@pytest.fixture
def updater() -> WeightUpdater:
    made = WeightUpdater(manifest(), torch.device("cpu"), logging.getLogger("test"))
    made.start()
    return made


def wait_for(updater: WeightUpdater, phase: str) -> None:
    deadline = time.monotonic() + 30
    while updater.status.phase != phase:
        assert time.monotonic() < deadline, f"{updater.status} instead of {phase}"
        time.sleep(0.01)


def start_trainer(port: int, epoch: int, num_bytes: int, behaviour: str) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", TRAINER, str(port), str(epoch), str(num_bytes), behaviour]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, cwd=ROOT)


def test_what_the_trainer_sends_is_staged(updater: WeightUpdater, free_port: Callable[[], int]) -> None:
    port = free_port()
    trainer = start_trainer(port, 1, updater.num_bytes, "send")
    try:
        updater.join(Rendezvous("localhost", port, 1, 1, 2, "gloo", SECONDS))
        wait_for(updater, "ready")
        updater.receive(3)
        wait_for(updater, "staged")
        assert updater.status.staged_version == 3
        assert updater.staging is not None
        assert torch.equal(updater.staging, torch.arange(updater.num_bytes).to(torch.uint8))
        updater.discard()
        assert updater.status.staged_version is None
    finally:
        trainer.kill()
        trainer.wait()


def test_a_trainer_that_dies_is_reported_and_the_next_one_is_served(
    updater: WeightUpdater, free_port: Callable[[], int]
) -> None:
    port = free_port()
    first = start_trainer(port, 1, updater.num_bytes, "wait")
    updater.join(Rendezvous("localhost", port, 1, 1, 2, "gloo", SECONDS))
    wait_for(updater, "ready")
    updater.receive(1)
    first.kill()
    first.wait()
    wait_for(updater, "failed")
    assert updater.status.staged_version is None
    assert "WeightUpdater_TP0" in updater.status.error
    second_port = free_port()
    second = start_trainer(second_port, 2, updater.num_bytes, "send")
    try:
        updater.join(Rendezvous("localhost", second_port, 2, 1, 2, "gloo", SECONDS))
        wait_for(updater, "ready")
        updater.receive(1)
        wait_for(updater, "staged")
        assert updater.status.error == ""
    finally:
        second.kill()
        second.wait()


def test_nobody_at_the_rendezvous_is_an_error_after_the_deadline(updater: WeightUpdater, free_port: Callable[[], int]) -> None:
    updater.join(Rendezvous("localhost", free_port(), 1, 1, 2, "gloo", 1.0))
    wait_for(updater, "failed")
    assert "cannot reach the trainer's rendezvous" in updater.status.error


def test_receiving_without_a_trainer_says_what_to_do(updater: WeightUpdater) -> None:
    updater.receive(1)
    wait_for(updater, "failed")
    assert "/bridge/init" in updater.status.error


def test_a_worker_that_never_comes_is_an_error_on_the_trainers_side(free_port: Callable[[], int]) -> None:
    port = free_port()
    store = host_store("localhost", port, 1.0)
    with pytest.raises(RendezvousError, match=r"rank 0 waited 1 s for the other 1 rank"):
        BridgeGroups(Rendezvous("localhost", port, 1, 0, 2, "gloo", 1.0), store, torch.device("cpu"))


def test_a_port_in_use_names_the_port_and_the_remedy(free_port: Callable[[], int]) -> None:
    port = free_port()
    keep = host_store("localhost", port, 1.0)
    with pytest.raises(RendezvousError, match=rf"localhost:{port}.*MASTER_PORT"):
        host_store("localhost", port, 1.0)
    del keep


@pytest.mark.parametrize("value", ["abc", "0", "70000", "-1"])
def test_a_wrong_master_port_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MASTER_PORT", value)
    with pytest.raises(RendezvousError, match="MASTER_PORT"):
        rendezvous_address()


def test_other_machines_need_an_address_that_they_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_INFERENCE_NODES", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(RendezvousError, match="MASTER_ADDR=localhost"):
        rendezvous_address()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4000")
    assert rendezvous_address() == ("10.0.0.1", 4000)
    monkeypatch.setenv("NUM_INFERENCE_NODES", "many")
    with pytest.raises(RendezvousError, match="NUM_INFERENCE_NODES='many'"):
        rendezvous_address()


def test_a_command_that_fails_late_says_nothing_about_the_next(updater: WeightUpdater, free_port: Callable[[], int]) -> None:
    """The old trainer's join is still waiting for its deadline when the new trainer has been announced."""
    updater.join(Rendezvous("localhost", free_port(), 1, 1, 2, "gloo", 1.0))
    port = free_port()
    trainer = start_trainer(port, 2, updater.num_bytes, "wait")
    try:
        updater.join(Rendezvous("localhost", port, 2, 1, 2, "gloo", SECONDS))
        seen = set()
        deadline = time.monotonic() + 30
        while updater.status.phase != "ready":
            seen.add(updater.status.phase)
            assert time.monotonic() < deadline, updater.status
            time.sleep(0.001)
        assert seen <= {"joining"}
        assert updater.status.epoch == 2
    finally:
        trainer.kill()
        trainer.wait()
