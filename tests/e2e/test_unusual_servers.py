"""The weight bridge to unusual vLLM servers. They have several ranks, take turns with a trainer on
one GPU, are a child of simple_rl.py, share nothing, or are missing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

from example_trainer.child_processes.guard import descendants
from example_trainer.errors import BridgeError
from example_trainer.models.hf_checkpoint import load_model
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import BridgeServer, shapes_of
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from tests.conftest import ROOT, Processes, wait_until
from tests.e2e.bridge_helpers import TOLERANCE, checksums, joined, largest_difference, new_weights
from tests.e2e.conftest import BRIDGE_TIMEOUT, VllmServer, start_vllm, vllm_command
from tests.forked_commands import FORK_CHILDREN, run_command
from tests.light_servers import LightServer, Starter, until
from tests.still_running import resident_pages
from vllm_patching.protocol.messages import Writer

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


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
        until(lambda: server.process.poll() is not None)
        assert server.process.poll() == 1
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
        return httpx.get(f"{server.url}/health", timeout=60).status_code == 200
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
                if busy.search(httpx.get(f"{server.url}/metrics", timeout=120).text)
                else "it does not run"
            )

        processes.wait_until("the request", idle, 180)
        assert processes.stop(server.process) == 0
        if owed.exception(60) is None:
            assert owed.result().status_code == 503, owed.result().text


def test_a_server_that_is_stopped_while_it_loads_ends_at_once(
    processes: Processes, free_port: Callable[[], int], tiny_model: Path
) -> None:
    """vLLM alone ends once its engine has loaded the model, which may take minutes."""
    server = processes.start("vllm", vllm_command(tiny_model, free_port()))

    def loads() -> str | None:
        log = server.log_path.read_text(errors="replace")
        return None if "Resolved architecture" in log else "it has not read the model's folder"

    wait_until("the load", loads, 240)
    assert processes.stop(server) == 128 + signal.SIGTERM
    log = server.log_path.read_text(errors="replace")
    assert "[vLLM Patch] SIGTERM while the model loads: the server ends" in log


def test_no_server_is_one_line_with_the_remedy(free_port: Callable[[], int]) -> None:
    port = free_port()
    with pytest.raises(
        BridgeError, match=rf"no vLLM server at http://localhost:{port}.*vllm_api_server.py"
    ):
        BroadcastBridge(BridgeServer("localhost", port, 1.0)).serving_dtype()


def test_turns(
    processes: Processes, free_port: Callable[[], int], tiny_model: Path, tmp_path: Path
) -> None:
    flags = f"--colocate --bridge-timeout {BRIDGE_TIMEOUT} --num-gpu-blocks-override 1024"
    server = start_vllm(processes, free_port, tiny_model, tmp_path, flags=tuple(flags.split()))
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
        assert httpx.get(f"{server.url}/health", timeout=120).status_code == 200
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

    expect_memory_lent_in_a_turn(server, bridge)
    expect_turn_to_end_with_its_writer(server, bridge, model)
    bridge.close()


def expect_turn_to_end_with_its_writer(
    server: VllmServer, bridge: SingleCopyBridge, model: Any
) -> None:
    """A trainer that dies in its turn, having written nothing."""
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


def expect_memory_lent_in_a_turn(server: VllmServer, bridge: SingleCopyBridge) -> None:
    """However a turn ends, it ends, and the server has its memory back."""
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


def writer_of(pid: int) -> Writer:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Writer(os.uname().nodename, pid, int(fields[19]))


def wait_for(what: Callable[[], bool]) -> None:
    wait_until("what the test waits for", lambda: None if what() else "it is not so yet", 180)


def running_requests(server: VllmServer) -> float:
    """Requests that have taken part in a step, by vLLM's own count, which stands still with the
    engine.
    """
    lines = httpx.get(f"{server.url}/metrics", timeout=120).text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")
    )


def in_flight(server: VllmServer) -> int:
    count: int = httpx.get(f"{server.url}/weights", timeout=120).json()["in_flight"]
    return count


def memory_of(server: VllmServer) -> int:
    """Bytes of RAM that the server's processes have."""
    return resident_pages(descendants(server.process.guard.pid)) * os.sysconf("SC_PAGE_SIZE")


SCRIPT = str(ROOT / "example_trainer" / "simple_rl.py")
STEPS = 3


def test_on_a_cpu_it_trains_the_starter_model_and_sees_other_bits(
    processes: Processes, tmp_path: Path
) -> None:
    """Neither model nor problems nor output are named, as in the guide. vLLM's ordinary kernels
    sample, so the comparison finds differences. The second and the third batch are one step old,
    which the comparison knows. Held-out problems are answered."""
    command = [
        sys.executable,
        "-u",
        SCRIPT,
        "--device",
        "cpu",
        "--steps",
        str(STEPS),
        "--groups",
        "2",
        "--group-size",
        "4",
    ]
    command += [
        "--max-tokens",
        "24",
        "--staleness",
        "1",
        "--evaluate-every",
        "2",
        "--held-out",
        "4",
        "--loss",
        "cispo",
    ]
    run = tmp_path / "outputs" / "rl_training"  # where the guide has TensorBoard look
    text = processes.finish(
        processes.start("simple-rl", command, FORK_CHILDREN, tmp_path), seconds=280
    )
    (chosen,) = (
        line
        for line in text.splitlines()
        if "Training the starter model on sums with ordinary kernels" in line
    )
    assert "not Qwen/Qwen3-1.7B on openai/gsm8k: --device is cpu" in chosen
    assert f"Step {STEPS}/{STEPS}  reward " in text
    assert "bitwise determinism verified" not in text, "only a run that checked it may say so"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["weight_version"] for row in rows] == [1, 2, 3]
    assert [(row["age_mean"], row["age_max"]) for row in rows] == [(0.0, 0), (1.0, 1), (1.0, 1)]
    evaluations = [
        json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()
    ]
    assert [row["weight_version"] for row in evaluations] == [0, 2, 3]
    assert all(0 <= row["metrics"]["solved"] <= 1 for row in evaluations)
    expect_other_bits(rows, text)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for tag in ("train/reward_mean", "train/entropy", "train/mismatched_tokens"):
        assert [event.step for event in events.Scalars(tag)] == [1, 2, 3]
    saved = run / "checkpoints" / f"step_{STEPS}"
    assert f"Saved checkpoint outputs/rl_training/checkpoints/step_{STEPS}" in text
    expect_trained(ROOT / "assets" / "starter_model", saved)


def expect_trained(start: Path, saved: Path) -> None:
    """Expect a model that has learned, and that vLLM and the trainer can start from."""
    before, after = (load_file(folder / "model.safetensors") for folder in (start, saved))
    assert before.keys() == after.keys()
    assert all(
        (before[name] != after[name]).any()
        for name in ("model.embed_tokens.weight", "model.norm.weight")
    )
    assert AutoTokenizer.from_pretrained(saved).chat_template, (
        "vLLM and the trainer can start from it"
    )


def expect_other_bits(rows: list[dict[str, Any]], text: str) -> None:
    """The first step compares with the weights that sampled; the others' tokens are one step old."""
    compared, mismatched = (
        sum(row[name] for row in rows) for name in ("compared_tokens", "mismatched_tokens")
    )
    assert compared == rows[0]["tokens"]
    assert sum(row["older_tokens"] for row in rows) == rows[1]["tokens"] + rows[2]["tokens"]
    assert mismatched > compared / 4, "if so few tokens differed, equal bits would prove little"
    assert (
        f"{mismatched} of {compared} tokens have another logprob in the trainer than in vLLM"
        in text
    )
    assert max(row["max_logprob_difference"] for row in rows) < 1e-3, (
        "other bits, but the same model and weights"
    )
    for row in rows:
        assert row["perplexity_rollout"] != row["perplexity_trainer"]
    assert abs(rows[0]["perplexity_rollout"] - rows[0]["perplexity_trainer"]) < 1e-2
    assert 0 < rows[0]["mismatch_kl"] < 1e-6
    assert [row["mismatch_kl"] for row in rows[1:]] == [None, None], (
        "older weights are staleness, not mismatch"
    )
    assert abs(rows[0]["ratio_max"] - 1) < 1e-3
    assert len({row["weights_sha"] for row in rows}) == STEPS


def test_without_a_gpu_equal_bits_that_are_asked_for_end_with_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        SCRIPT,
        "--batch-invariant",
        "--device",
        "cpu",
        "--output",
        str(tmp_path / "run"),
    ]
    result = run_command(command)
    assert result.returncode == 2
    assert result.stdout.splitlines()[-1].endswith("give --no-batch-invariant here")
    assert "Traceback" not in result.stdout
