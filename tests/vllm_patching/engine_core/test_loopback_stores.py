"""Stores of vLLM's workers: on loopback for workers of one machine, as torch has them otherwise."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.listening import listeners
from vllm_patching.engine_core.loopback_stores import LoopbackStore, install_in

RENDEZVOUS = importlib.import_module("torch.distributed.rendezvous")
SOON = timedelta(seconds=60)


def listens(port: int) -> list[str]:
    return [own.address for own in listeners([os.getpid()]) if own.port == port]


def test_ranks_that_meet_at_loopback_are_reached_from_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]
) -> None:
    monkeypatch.setattr(RENDEZVOUS, "TCPStore", TCPStore)  # put back at the end
    install_in(RENDEZVOUS)
    port = free_port()

    def meet(rank: int) -> dist.Store:
        """Wait for the other rank, as vLLM's workers do."""
        store, *place = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", rank, 2, timeout=SOON))
        assert place == [rank, 2]
        return store

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(meet, range(2))
    assert listens(port) == ["127.0.0.1"]
    first.set("word", "here")
    assert second.get("word") == b"here"


def test_a_store_on_any_free_port_says_which() -> None:
    store = LoopbackStore(
        host_name="localhost", port=0, is_master=True, wait_for_workers=False, timeout=SOON
    )
    assert store.port
    assert listens(store.port) == ["127.0.0.1"]
    client = LoopbackStore("127.0.0.1", store.port, 2, False, wait_for_workers=False, timeout=SOON)
    client.set("from", "the client")
    assert store.get("from") == b"the client"


def test_a_host_that_others_reach_stays_open_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_patching.engine_core.loopback_stores.is_loopback", lambda host: False)
    store = LoopbackStore("127.0.0.1", 0, 1, True, wait_for_workers=False, timeout=SOON)
    assert listens(store.port) not in ([], ["127.0.0.1"])


def test_a_port_that_is_taken_is_torchs_to_report() -> None:
    first = LoopbackStore("127.0.0.1", 0, 1, True, wait_for_workers=False, timeout=SOON)
    with pytest.raises(RuntimeError, match=r"EADDRINUSE|address already in use"):
        LoopbackStore("127.0.0.1", first.port, 1, True, wait_for_workers=False, timeout=SOON)


def test_a_module_that_has_something_else_of_that_name_is_left_alone() -> None:
    module = ModuleType("other")
    install_in(module)
    assert not hasattr(module, "TCPStore")
    module.TCPStore = int  # type: ignore[attr-defined]
    install_in(module)
    assert module.TCPStore is int
