"""A trainer and a real vLLM that take turns: one copy of the weights, and the keys' and values'
memory handed to and fro.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.child_processes.guard import descendants
from example_trainer.errors import BridgeError
from example_trainer.models.hf_checkpoint import load_model
from example_trainer.weight_bridge.server import BridgeServer, shapes_of
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from tests.conftest import Processes, wait_until
from tests.e2e.bridge_helpers import TOLERANCE, largest_difference, new_weights
from tests.e2e.conftest import BRIDGE_TIMEOUT, VllmServer, start_vllm
from tests.still_running import resident_pages
from vllm_patching.protocol.messages import Writer

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]


def test_turns(
    processes: Processes, free_port: Callable[[], int], tiny_model: Path, tmp_path: Path
) -> None:
    flags = (
        "--colocate",
        "--bridge-timeout",
        str(BRIDGE_TIMEOUT),
        "--num-gpu-blocks-override",
        "1024",
    )
    server = start_vllm(processes, free_port, tiny_model, tmp_path, flags=flags)
    bridge = SingleCopyBridge(BridgeServer("localhost", server.port, BRIDGE_TIMEOUT), colocate=True)
    dtype = bridge.serving_dtype()
    assert dtype is not None
    assert bridge.lent_bytes == 256 << 20
    model = load_model(str(server.model), dtype)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def write_initial() -> None:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(initial[name])

    bridge.connect(model)
    bridge.sync(0, write_initial)
    answers: list[dict[str, Any]] = []

    def request(prompt: list[int], tokens: int) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: answers.append(
                server.generate(prompt, max_tokens=tokens, ignore_eos=True)
            ),
            daemon=True,
        )
        thread.start()
        return thread

    running = request([1, 2, 3], 450)
    wait_for(lambda: running_requests(server) == 1)
    with bridge.turn(lambda: None):
        state = server.state()
        assert (state["turn"], state["healthy"], state["trouble"]) == ("training", True, "")
        assert "requests wait for the end of its turn" in str(state["turn_reason"])
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
        assert not answers, "it is in the middle of a request"
        waiting = request([4, 5], 5)
        wait_for(lambda: in_flight(server) == 2)
        bridge.sync(1, new_weights(model, 1))
        assert server.state()["turn"] == "training", "an update does not end the turn"
        assert not answers
    assert server.state()["turn"] == "sampling"
    assert bridge.turn_figures["freed_bytes"] == bridge.lent_bytes
    assert (
        bridge.turn_figures["seconds"]
        > bridge.turn_figures["rest"] + bridge.turn_figures["wake"]
        > 0
    )
    for thread in (running, waiting):
        thread.join(120)
    versions = sorted(
        [version for version, _ in answer["weight_version_spans"][0]] for answer in answers
    )
    assert versions == [[0, 1], [1]], "one went on, the other began after the turn"
    assert largest_difference(server, model) < TOLERANCE

    resident = memory_of(server)
    rested = resident

    def fail_in_a_turn() -> None:
        nonlocal rested
        with bridge.turn(lambda: None):
            rested = memory_of(server)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_a_turn()
    assert rested < resident - 0.7 * bridge.lent_bytes
    assert server.state()["turn"] == "sampling", "however a turn ends"

    client = BridgeServer("localhost", server.port, BRIDGE_TIMEOUT)
    dying = subprocess.Popen(["sleep", "600"])
    try:
        epoch = client.init("single_copy", shapes_of(model), writers=[writer_of(dying.pid)])[
            "epoch"
        ]
        assert client.call("/turns/rest", {"epoch": epoch})["turn"] == "training"
        with pytest.raises(BridgeError, match="has had its turn on this GPU"):
            bridge.connect(model)
    finally:
        dying.kill()
        dying.wait()
    wait_for(lambda: server.state()["turn"] == "sampling")
    assert "has ended in its turn" in server.log
    assert largest_difference(server, model) < TOLERANCE, "it had written nothing"
    client.close()
    bridge.close()


def writer_of(pid: int) -> Writer:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Writer(os.uname().nodename, pid, int(fields[19]))


def wait_for(what: Callable[[], bool]) -> None:
    wait_until("what the test waits for", lambda: None if what() else "it is not so yet", 180)


def running_requests(server: VllmServer) -> float:
    """Requests that have taken part in a step, by vLLM's own count, which stands still with the
    engine.
    """
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")
    )


def in_flight(server: VllmServer) -> int:
    count: int = httpx.get(f"{server.url}/weights", timeout=30).json()["in_flight"]
    return count


def memory_of(server: VllmServer) -> int:
    """Bytes of RAM that the server's processes have."""
    return resident_pages(descendants(server.process.guard.pid)) * os.sysconf("SC_PAGE_SIZE")
