"""Weights go to all servers at the same time and arrive; what fails ends by its deadline, and the
rest goes on without it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from example_trainer.errors import BridgeError
from example_trainer.models import Decoder
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.stream import Cohort, CohortError, SendPlan, WeightStream
from tests.conftest import Processes
from tests.example_trainer.weight_bridge.cohort_world import (
    BUCKET_BYTES,
    GEOMETRY,
    SECONDS,
    at,
    join_all,
    make_servers,
    manifests_of,
)
from vllm_patching.protocol.messages import Route
from vllm_patching.transport import lane
from vllm_patching.transport.lane import SENDER, GlooLane, lane_places, nobody_lost
from vllm_patching.transport.rendezvous import host_store

pytestmark = pytest.mark.nightly

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]
WORLD = "tests.example_trainer.weight_bridge.cohort_world"
FEW_SECONDS = 4.0
"""The deadline of a transfer that a test waits for; nothing has to succeed within it."""


def mappings(pid: int) -> int:
    """Bytes of weights that are on their way, in a process."""
    return Path(f"/proc/{pid}/maps").read_text().count("lockstep-weights")


def random_model(dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(GEOMETRY, dtype)
    change(model)
    return model


def change(model: Decoder) -> None:
    """Other weights, as after a step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))


class Trainer:
    """A trainer of one process and its store."""

    def __init__(
        self,
        tp_size: int,
        dtype: torch.dtype,
        port: int,
        timeout: float = SECONDS,
        near: bool = True,
        trained: torch.dtype = torch.float32,
    ) -> None:
        self.model = random_model(trained)
        self.weights = {name: p.detach() for name, p in self.model.named_parameters()}
        self.plan = SendPlan(1, tp_size)
        self.port, self.store = port, host_store(at(port), SECONDS)
        self.stream = WeightStream(
            self.model,
            manifests_of(tp_size, dtype),
            self.plan,
            Ranks(),
            CPU,
            Route.GLOO,
            BUCKET_BYTES,
        )
        self.cohort = Cohort(Ranks(), self.plan, CPU, timeout, self.stream.memory if near else None)

    def form(
        self,
        key: str,
        members: int,
        seconds: float = SECONDS,
        lost: Callable[[], str] = nobody_lost,
    ) -> None:
        self.cohort.form(at(self.port), key, members, Route.GLOO, self.store, seconds, lost)

    def expect(self, key: str, members: Sequence[int], of: int) -> None:
        """Offer the memory, as `form` does, and return when these receivers have reported."""
        (place,) = lane_places(at(self.port), key, 0, [0], SENDER, of, Route.GLOO)
        assert self.stream.memory is not None
        self.store.set(place.offer, self.stream.memory.offer)
        self.store.wait([place.here(member) for member in members], timedelta(seconds=SECONDS))


@pytest.fixture
def over_gloo(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each message of either side."""
    sizes: list[int] = []
    start = GlooLane._start

    def counted(self: GlooLane, operation: str, options: object, tensor: torch.Tensor) -> object:
        sizes.append(tensor.nbytes)
        return start(self, operation, options, tensor)

    monkeypatch.setattr(GlooLane, "_start", counted)
    return sizes


@pytest.mark.parametrize(
    ("tp_size", "dtype", "direct", "near"),
    [
        (1, torch.float32, True, 2),
        (2, torch.bfloat16, False, 2),
        (2, torch.bfloat16, False, 0),
        (1, torch.float32, True, 1),
    ],
)
def test_what_is_sent_arrives_at_every_server(
    free_port: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    over_gloo: list[int],
    tp_size: int,
    dtype: torch.dtype,
    direct: bool,
    near: int,
) -> None:
    """Twice, the second time other weights, over the same lanes; to servers on the trainer's
    machine and elsewhere.
    """
    elsewhere = iter(["here", *["here"] * near, *["there"] * 2])
    if near == 1:
        monkeypatch.setattr(lane, "_network", lambda: next(elsewhere))
    gc.collect()  # what an earlier test left goes now, and not while this one counts
    before = mappings(os.getpid())
    trainer = Trainer(tp_size, dtype, free_port(), near=near > 0)
    servers = make_servers(2, tp_size, dtype, direct)
    join_all(servers, trainer.port, "first", trainer.plan.lanes)
    trainer.form("first", 2)
    ranks = [rank for server in servers for rank in server]
    for version in (1, 2):
        for rank in ranks:
            assert rank.until("ready", "received").cohort == "first"
            rank.updater.receive(version)
        checksums = trainer.stream.send(trainer.cohort, nobody_lost)
        for rank in ranks:
            status = rank.until("received")
            expected = rank.checksum_of(trainer.weights)
            assert (status.version, status.not_finite) == (version, "")
            assert status.checksum == checksums[rank.manifest.tp_rank] == expected
            assert status.received_bytes == sum(item.num_bytes for item in rank.layout)
            staged = zip(rank.updater.staged(), rank.layout, strict=True)
            assert direct or sum(t.nbytes for t, _ in staged) == status.received_bytes
            assert rank.holds(trainer.weights) == direct
        change(trainer.model)
    assert (max(over_gloo) > 8) == (near < 2), (
        "what is read where it is does not go through a socket"
    )
    assert mappings(os.getpid()) == before + 1, (
        "receivers map the sender's memory for the time of a transfer"
    )
    trainer.cohort.close()


@pytest.mark.parametrize("other", [None, torch.float16])
@pytest.mark.parametrize("trained", [torch.bfloat16, torch.float32])
def test_float16_servers_get_rounded_weights(
    free_port: Callable[[], int], trained: torch.dtype, other: torch.dtype | None
) -> None:
    """A trainer never computes in float16.

    It sends the servers' dtype, also where one parameter has another dtype than the rest.
    """
    trainer = Trainer(2, torch.float16, free_port(), trained=trained)
    name, odd = list(trainer.model.named_parameters())[2]
    odd.data = odd.data.to(other)
    trainer.weights[name] = odd.detach()
    trainer.stream.rebind()
    servers = make_servers(1, 2, torch.float16, True)
    join_all(servers, trainer.port, "first", trainer.plan.lanes)
    trainer.form("first", 1)
    for rank in servers[0]:
        rank.until("ready")
        rank.updater.receive(1)
    checksums = trainer.stream.send(trainer.cohort, nobody_lost)
    for rank in servers[0]:
        status = rank.until("received")
        assert (
            status.checksum == checksums[rank.manifest.tp_rank] == rank.checksum_of(trainer.weights)
        )
        assert status.received_bytes == sum(item.num_bytes for item in rank.layout)
        assert rank.holds(trainer.weights)
    trainer.cohort.close()
    name, parameter = next(trainer.model.named_parameters())
    parameter.data.view(-1)[0] = 1e5  # a number, and infinite in float16
    assert trainer.stream.not_finite() == name


def test_what_is_not_finite_is_found_before_anything_is_sent(free_port: Callable[[], int]) -> None:
    trainer = Trainer(1, torch.bfloat16, free_port())
    assert trainer.stream.not_finite() == ""
    name, parameter = list(trainer.model.named_parameters())[3]
    parameter.data.view(-1)[-1] = 3.4e38  # a number, but none of bfloat16's
    assert trainer.stream.not_finite() == name
    parameter.data.view(-1)[-1] = float("nan")
    assert trainer.stream.not_finite() == name


def test_a_receiver_that_does_not_come_is_named_and_the_others_are_free_at_once(
    free_port: Callable[[], int],
) -> None:
    trainer = Trainer(1, torch.float32, free_port())
    servers = make_servers(2, 1, torch.float32, False)
    join_all(servers, trainer.port, "first", 1, members=3)
    trainer.expect("first", [1, 2], of=3)
    with pytest.raises(
        CohortError, match=r"receiver\(s\) 2 of 3 .* did not come within 5 s"
    ) as caught:
        trainer.form(
            "first", 3, seconds=5
        )  # the two that are there must have met by then, on a busy machine too
    assert caught.value.missing == [3]
    for (rank,) in servers:
        assert "did not come within 5 s" in rank.until("failed").error
    join_all(servers, trainer.port, "second", 1)
    trainer.form("second", 2)
    for (rank,) in servers:
        rank.until("ready")
        rank.updater.receive(1)
    trainer.stream.send(trainer.cohort, nobody_lost)
    assert all(rank.until("received").error == "" for (rank,) in servers)
    trainer.cohort.close()


def test_a_transfer_that_is_lost_ends_at_once_on_both_sides(free_port: Callable[[], int]) -> None:
    """One server never receives; the rank that finds out reports it, and the other server's update
    is called off.
    """
    trainer = Trainer(1, torch.float32, free_port())
    servers = make_servers(2, 1, torch.float32, True)
    join_all(servers, trainer.port, "first", 1)
    trainer.form("first", 2)
    (first,), (second,) = servers
    first.until("ready")
    second.until("ready")
    first.updater.receive(1)
    began = time.monotonic()
    with pytest.raises(BridgeError, match="sending the weights failed: server 1 has caught fire"):
        trainer.stream.send(trainer.cohort, lambda: "server 1 has caught fire")
    assert not trainer.cohort.formed
    assert first.updater.discard(SECONDS), "it has let go"
    assert first.until("failed", "ready").version is None
    assert time.monotonic() - began < SECONDS / 2
    with pytest.raises(BridgeError, match="the cohorts are closed"):
        trainer.stream.send(trainer.cohort, nobody_lost)


class Server:
    """A server of one rank in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.until("idle")

    def tell(self, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def until(self, phase: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == phase:
                return
        raise AssertionError(f"it ended before it was {phase}")


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.process.send_signal(signal.SIGCONT)
    made.process.kill()
    made.process.wait()


@pytest.mark.parametrize(
    ("number", "near"), [(signal.SIGKILL, True), (signal.SIGSTOP, True), (signal.SIGSTOP, False)]
)
def test_a_server_that_is_killed_or_stopped_costs_a_deadline_and_the_rest_goes_on(
    server: Server, free_port: Callable[[], int], number: signal.Signals, near: bool
) -> None:
    trainer = Trainer(1, torch.float32, free_port(), timeout=FEW_SECONDS, near=near)
    (rank,) = ranks = [servers[0] for servers in make_servers(1, 1, torch.float32, False)]
    rank.join(trainer.port, "first", 2, 0, 1, FEW_SECONDS)
    server.tell(join=[trainer.port, "first", 2, 1, 1, FEW_SECONDS])
    trainer.form("first", 2)
    server.until("ready")
    rank.until("ready")
    server.process.send_signal(number)
    rank.updater.receive(1)
    began = time.monotonic()

    def send_twice() -> None:
        for _ in range(
            2
        ):  # what a stopped process's sockets still take may be all of a small model
            trainer.stream.send(trainer.cohort, nobody_lost)

    with pytest.raises(BridgeError, match=r"trainer rank 0: lane 0 of vLLM rank 0: "):
        send_twice()
    assert time.monotonic() - began < SECONDS / 2, (
        "the deadline of one transfer or two, on a machine that may be busy"
    )
    rank.updater.discard(SECONDS)
    trainer.cohort.timeout = SECONDS
    join_all([ranks], trainer.port, "second", 1)
    trainer.form("second", 1)
    rank.until("ready")
    rank.updater.receive(2)
    (checksum,) = trainer.stream.send(trainer.cohort, nobody_lost)
    assert rank.until("received").checksum == checksum == rank.checksum_of(trainer.weights)
    trainer.cohort.close()


def test_ranks_of_a_sharded_trainer_send_together(processes: Processes, tmp_path: Path) -> None:
    """Two ranks, FSDP2: see stream_worker.py."""
    command = [
        sys.executable,
        "-m",
        "tests.forked_ranks",
        Path(__file__).with_name("stream_worker.py"),
        tmp_path / "given-up",
    ]
    processes.finish(
        processes.start("ranks", command, environment={"PYTHONPATH": str(ROOT)}), seconds=240
    )
