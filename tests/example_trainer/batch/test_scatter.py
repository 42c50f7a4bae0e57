"""Bins arrive as they were sent; and ranks get their own, the same errors, and the same work to do
in the meantime.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.batch.groups import Batch
from example_trainer.batch.packing import PackedBin, empty_bin
from example_trainer.batch.prefetch import BinChannel, decode, encode
from example_trainer.parallel.ranks import Ranks
from tests.conftest import ROOT, Processes
from tests.example_trainer.batch.test_packing import batches, pack

WORKER = Path(__file__).resolve().parent / "scatter_worker.py"


def assert_same(one: PackedBin, other: PackedBin) -> None:
    for name, tensor in one.tensors().items():
        received = other.tensors()[name]
        assert (tensor.dtype, tensor.shape) == (received.dtype, received.shape)
        assert torch.equal(tensor.nan_to_num(99.0), received.nan_to_num(99.0))


@given(batches(), st.integers(1, 300), st.booleans())
def test_bins_survive_their_way(batch: Batch, budget: int, share: bool) -> None:
    (bins,) = pack(batch, budget, 1, share)
    bins = [*bins, empty_bin()]
    (received,) = decode(encode([bins]))
    for one, other in zip(bins, received, strict=True):
        assert_same(one, other)
    assert BinChannel(Ranks()).send([[bins], [[empty_bin()]]])[0] is bins, (
        "the only rank's need no way"
    )


def test_a_batch_without_bins_survives_its_way() -> None:
    assert decode(encode([])) == []


@pytest.mark.e2e
@pytest.mark.parametrize(("bins", "when"), [("own", "ahead"), ("same", "asked")])
def test_ranks_get_their_bins_from_rank_0(processes: Processes, bins: str, when: str) -> None:
    command = [sys.executable, "-m", "tests.forked_ranks", WORKER, bins, when]
    process = processes.start(bins, command, environment={"PYTHONPATH": str(ROOT)}, may_finish=True)
    status = process.guard.wait(timeout=120)
    lines = process.log_path.read_text().splitlines()
    assert status == 0, lines
    seen = [
        json.loads(line.removeprefix(f"rank {rank}: "))
        for rank in range(2)
        for line in lines
        if line.startswith(f"rank {rank}: {{")
    ]
    assert len(seen) == 2, lines
    both = [order for ours in seen for order in ours["orders"]]
    everything = [[group, number] for group in range(2) for number in range(3)]
    assert sorted(both) == sorted(everything if bins == "own" else 2 * everything)
    assert sum(ours["weight"] for ours in seen) == pytest.approx(1.0 if bins == "own" else 2.0)
    for rank, ours in enumerate(seen):
        assert ours["lengths"][0] == 40, "the prompt once"
        assert (ours["versions"], ours["age"], ours["queue"]) == ([1, 2, 3], 3, 9)
        assert ours["forwarded"] == 2 * (40 + 3 * 2)
        assert ours["lease"] == (rank == 0)
        assert ours["upkept"] == [0, 1]
    assert "rank 0: [(5, None), (6, None), (6, 'no good')]" in lines
    for rank, place in ((0, ""), (1, "waiting for a batch failed on rank 0: ")):
        assert any(
            line.startswith(f"rank {rank}: BatchError: {place}the batch from http")
            for line in lines
        )
        assert f"rank {rank}: RolloutServiceError: {place}the service is gone" in lines
    for rank, place in ((0, "receiving a batch failed on rank 1: "), (1, "")):
        assert (
            f"rank {rank}: OutOfMemoryError: {place}no room on cpu for a batch's tokens: tried to allocate"
            in lines
        )
