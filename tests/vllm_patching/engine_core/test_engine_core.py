"""Engine steps and the core: it goes on only with the expected weights; progress and stores."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from tests.listening import listeners
from vllm_patching.engine_core import extension as engine_core
from vllm_patching.engine_core.loopback_stores import LoopbackStore, install_in
from vllm_patching.protocol.messages import CAN_VERIFY_AND_RESUME, VERIFY_AND_RESUME


class Core:
    """An engine core whose workers hold given weights."""

    def __init__(self, checksums: list[str], not_finite: str = "") -> None:
        self.answers = [
            {"tp_rank": r, "checksum": c, "not_finite": not_finite} for r, c in enumerate(checksums)
        ]
        self.asked: list[str] = []
        self.paused = True

    def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        assert self.paused, "checked while the engine runs"
        self.asked.append(method)
        return self.answers

    def resume_scheduler(self) -> None:
        self.paused = False


def ask(core: Core, expected: list[str], seconds: float = 60.0) -> dict[str, Any]:
    return engine_core.verify_and_resume(
        core, "lockstep_check", expected, 7, time.monotonic() + seconds
    )


@given(
    st.lists(st.sampled_from("ab"), min_size=1, max_size=4),
    st.lists(st.sampled_from("ab"), min_size=4, max_size=4),
)
def test_it_goes_on_only_with_the_expected_weights_on_every_rank(
    held: list[str], expected: list[str]
) -> None:
    core = Core(held)
    before = time.monotonic()
    answer = ask(core, expected[: len(held)])
    assert core.asked == ["lockstep_check"]
    assert answer["answers"] == core.answers
    assert core.paused == (held != expected[: len(held)]) == (answer["resumed_at"] is None)
    if not core.paused:
        assert before <= answer["resumed_at"] <= time.monotonic()


def test_ranks_that_answer_in_another_order_are_told_apart() -> None:
    core = Core(["a", "b"])
    core.answers.reverse()
    assert ask(core, ["a", "b"])["resumed_at"] is not None


def test_weights_that_are_not_finite_are_not_gone_on_with() -> None:
    core = Core(["a"], not_finite="model.norm.weight")
    assert ask(core, ["a"])["resumed_at"] is None
    assert core.paused


def test_it_does_not_go_on_once_nobody_waits_any_more() -> None:
    core = Core(["a"])
    assert ask(core, ["a"], seconds=-0.001)["resumed_at"] is None
    assert core.paused


def test_a_check_that_fails_leaves_the_engine_paused() -> None:
    core = Core(["a"])
    core.answers = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        ask(core, ["a"])
    assert core.paused


def test_vllm_finds_the_plugin_by_the_folder_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.distributions(path=[str(engine_core.PLUGIN_FOLDER)])
    points = [point for distribution in found for point in distribution.entry_points]
    assert [(point.group, point.name) for point in points] == [
        ("vllm.general_plugins", engine_core.PLUGIN_NAME)
    ]
    assert points[0].load() is engine_core.install


def test_it_is_installed_where_an_engine_core_is_and_does_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Module:
        EngineCore = type("EngineCore", (Core,), {})

    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", Module)  # type: ignore[arg-type]
    engine_core.install()
    core = Module.EngineCore(["a"])
    assert getattr(core, CAN_VERIFY_AND_RESUME)()
    assert (
        getattr(core, VERIFY_AND_RESUME)("lockstep_check", ["a"], 7, time.monotonic() + 60)[
            "resumed_at"
        ]
        is not None
    )
    monkeypatch.delitem(sys.modules, "vllm.v1.engine.core")
    engine_core.install()


@pytest.mark.parametrize(
    ("plugins", "then"),
    [
        (None, None),
        ("", "lockstep"),
        ("other", "other,lockstep"),
        ("lockstep,other", "lockstep,other"),
    ],
)
def test_processes_that_vllm_starts_load_it_too(
    monkeypatch: pytest.MonkeyPatch, plugins: str | None, then: str | None
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    variables = {"PYTHONPATH": "/somewhere"} | (
        {} if plugins is None else {"VLLM_PLUGINS": plugins}
    )
    for _ in range(2):
        engine_core.prepare_environment(variables)
        assert variables["PYTHONPATH"].split(os.pathsep) == [
            "/somewhere",
            str(engine_core.PLUGIN_FOLDER),
        ]
        assert variables.get("VLLM_PLUGINS") == then
        assert sys.path.count(str(engine_core.PLUGIN_FOLDER)) == 1


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
