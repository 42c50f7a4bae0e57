"""Started by test_stream.py: two ranks whose model FSDP2 spreads send it to two servers, which rank
0 has in threads.

Argument: a file that is made when the servers have given up a transfer to which rank 1 does not
come.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from example_trainer.errors import BridgeError
from example_trainer.parallel.fsdp import sharded_decoder
from example_trainer.parallel.ranks import Ranks, join_ranks
from example_trainer.weight_bridge.stream import Cohort, CohortError, SendPlan, WeightStream
from tests.example_trainer.weight_bridge.cohort_world import (
    BUCKET_BYTES,
    GEOMETRY,
    SECONDS,
    Rank,
    at,
    join_all,
    later,
    make_servers,
    manifests_of,
)
from vllm_patching.protocol.messages import Route
from vllm_patching.transport.lane import nobody_lost
from vllm_patching.transport.rendezvous import KeyedStore, connect_store, host_store

CPU = torch.device("cpu")
FEW_SECONDS = 5.0
"""The deadline of a transfer, which is waited for; nothing has to succeed within it."""


def run_case(ranks: Ranks, port: int, store: KeyedStore, tp_size: int, dtype: torch.dtype) -> None:
    """Send twice to servers of so many ranks, then have it broken off, then once more over new
    lanes.
    """
    model = sharded_decoder(GEOMETRY, torch.float32, CPU, ranks.world_size)
    generator = torch.Generator().manual_seed(7)
    plan = SendPlan(ranks.world_size, tp_size)
    stream = WeightStream(
        model, manifests_of(tp_size, dtype), plan, ranks, CPU, Route.GLOO, BUCKET_BYTES
    )
    # One of the two senders to servers of one rank is on their machine.
    memory = stream.memory if tp_size == 2 or ranks.is_main else None
    cohort = Cohort(ranks, plan, CPU, SECONDS, memory)
    servers = make_servers(2, tp_size, dtype, direct=True) if ranks.is_main else []
    receivers: list[Rank] = [rank for server in servers for rank in server]

    def form(attempt: str, timeout: float = SECONDS) -> None:
        key = f"{tp_size}{attempt}"
        join_all(servers, port, key, plan.lanes, timeout=timeout)
        cohort.form(at(port), key, 2, Route.GLOO, store, SECONDS, nobody_lost)

    def update(version: int) -> None:
        weights = {}
        for name, parameter in model.named_parameters():
            whole = torch.randn(tuple(parameter.shape), generator=generator)
            model.shards.local(parameter).copy_(model.shards.take(name, whole))
            weights[name] = whole
        assert stream.not_finite() == ""
        for rank in receivers:
            rank.until("ready", "received")
            rank.updater.receive(version)
        checksums = stream.send(cohort, nobody_lost)
        for rank in receivers:
            status = rank.until("received", "failed")
            expected = rank.checksum_of(weights)
            assert status.checksum == checksums[rank.manifest.tp_rank] == expected, status
            assert rank.holds(weights)

    form("a")
    update(1)
    update(2)
    # Without receivers: rank 0 finds out, and rank 1, whose own lanes report nothing, leaves with
    # it.
    with pytest.raises(BridgeError, match="the servers are away"):
        stream.send(cohort, lambda: "the servers are away")
    form("b")
    update(3)
    if tp_size == 1:
        late_rank(ranks, stream, cohort, receivers, form)
        form("e")
        update(4)
    with pytest.raises(CohortError) as caught:
        cohort.form(at(port), f"{tp_size}c", 3, Route.GLOO, store, 1.0, nobody_lost)
    assert caught.value.missing == [1, 2, 3]
    last = list(model.parameters())[-1]
    if ranks.rank == 1:
        model.shards.local(last).view(-1)[-1] = float("inf")
    name = [name for name, _ in model.named_parameters()][-1]
    assert stream.not_finite() == name


def late_rank(
    ranks: Ranks,
    stream: WeightStream,
    cohort: Cohort,
    receivers: list[Rank],
    form: Callable[[str, float], None],
) -> None:
    """Rank 1 comes to a transfer when the receivers have given it up. It fails on both ranks, and
    the receivers name the lane whose weights did not come.
    """
    form("d", FEW_SECONDS)
    given_up = Path(sys.argv[1])

    def tell_of_the_end() -> None:
        for rank in receivers:
            rank.until("failed")
        given_up.touch()

    for rank in receivers:
        rank.until("ready")
        rank.updater.receive(9)
    if ranks.is_main:
        later(tell_of_the_end)
    else:
        deadline = time.monotonic() + SECONDS
        while not given_up.exists():
            assert time.monotonic() < deadline, "the receivers wait on"
            time.sleep(0.05)
    cohort.timeout = FEW_SECONDS
    with pytest.raises(BridgeError, match=r"trainer rank \d: lane \d of vLLM rank 0: "):
        stream.send(cohort, nobody_lost)
    cohort.timeout = SECONDS
    for rank in receivers:
        told = rank.until("failed").error
        assert re.search(r"lane \d of vLLM rank 0 \(receiver \d of 2\): not done within", told), (
            told
        )


def main() -> None:
    with join_ranks(SECONDS, CPU) as ranks:
        hosted = host_store(at(0), SECONDS) if ranks.is_main else None
        port = ranks.broadcast(
            hosted.kept.port if hosted is not None and hosted.kept is not None else 0
        )
        store = hosted or connect_store(at(port), "the other rank", SECONDS)
        run_case(ranks, port, store, 1, torch.float32)
        run_case(ranks, port, store, 2, torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
