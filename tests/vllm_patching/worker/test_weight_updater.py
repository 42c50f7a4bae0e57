"""The updater thread against a real sender: it receives, it survives the trainer, it takes the next
one.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.forked_commands import start_unguarded
from tests.geometries import geometry_of
from vllm_patching.protocol.checksum import weights_checksum
from vllm_patching.protocol.manifest import Manifest, ManifestEntry, buckets, flat_layout
from vllm_patching.protocol.messages import Route
from vllm_patching.transport.addresses import RendezvousError, reach
from vllm_patching.transport.rendezvous import Meeting, PeerWatch, host_store
from vllm_patching.weights.sharding import plan_shards
from vllm_patching.worker.receiving import CohortPlace, WeightUpdater

ROOT = Path(__file__).resolve().parents[3]
GEOMETRY = geometry_of("Qwen3", 1, 12, 8, 4, 2, 3, 70, tie_word_embeddings=True)
SECONDS = 60.0
"""For whatever must come; a trainer's process takes some to start."""

BUCKET_BYTES = 500
"""So that the model is several buckets."""
LAYOUT, NUM_BYTES = flat_layout(
    Manifest(
        0, 1, tuple(ManifestEntry(spec, "float32", "cpu") for spec in plan_shards(GEOMETRY, 0, 1))
    )
)

BUCKETS = buckets(LAYOUT, BUCKET_BYTES)

TRAINER = """
import math, sys, time, torch
from tests.vllm_patching.worker.test_weight_updater import BUCKETS, LAYOUT, new_weights
from vllm_patching.protocol.messages import Route
from vllm_patching.transport.lane import lane_places
from vllm_patching.transport.lane import form_lanes
from vllm_patching.transport.lane import GO, SENDER, nobody_lost
from vllm_patching.transport.rendezvous import Meeting, host_store
port, epoch, behaviour = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
meeting = Meeting("localhost", port, "s3cret")
store = host_store(meeting, 60)
place = lane_places(meeting, f"epoch{epoch}", 0, [0], SENDER, 1, Route.GLOO)[0]
store.set(place.offer, "")
while not store.check([place.here(1)]):
    time.sleep(0.01)
store.set(place.word, GO)
[lane] = form_lanes([place], torch.device("cpu"), 60, 60, nobody_lost, "the sender")
weights = [tensor for _, tensor in new_weights(spoil=behaviour == "nan")]
sent = {"wait": 0, "half": len(BUCKETS) // 2}.get(behaviour, len(BUCKETS))
for bucket in BUCKETS[:sent]:
    buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for piece in bucket.pieces:
        piece.in_buffer(buffer, LAYOUT[piece.item]).copy_(piece.of(weights[piece.item]))
    lane.wait(lane.begin((), buffer), math.inf, nobody_lost)
time.sleep(600)
"""


def new_weights(spoil: bool = False) -> list[tuple[str, torch.Tensor]]:
    """The trainer's message."""
    generator = torch.Generator().manual_seed(5)
    weights = [(item.name, torch.randn(item.shape, generator=generator)) for item in LAYOUT]
    if spoil:
        weights[2][1].view(-1)[-1] = float("inf")
    return weights


@pytest.fixture
def live() -> list[tuple[str, torch.Tensor]]:
    """The worker's parameters."""
    return [(item.name, torch.zeros(item.shape)) for item in LAYOUT]


@pytest.fixture
def updater(live: list[tuple[str, torch.Tensor]]) -> WeightUpdater:
    made = WeightUpdater(0, LAYOUT, NUM_BYTES, live, logging.getLogger("test"), BUCKET_BYTES)
    made.start()
    return made


def join(
    updater: WeightUpdater, port: int, epoch: int, direct: bool, timeout: float = SECONDS
) -> None:
    """Have it join a trainer, as a server does."""
    updater.aim_at(direct)
    updater.join_cohort(
        CohortPlace(at(port), f"epoch{epoch}", 1, 0, 1, 0, epoch, Route.GLOO, timeout, timeout)
    )


def at(port: int) -> Meeting:
    """The store of the trainer above."""
    return Meeting("localhost", port, "s3cret")


def wait_for(updater: WeightUpdater, phase: str, waits: bool = False) -> None:
    """Until it is in a phase, and waits for bytes or does not."""
    deadline = time.monotonic() + 2 * SECONDS
    while (updater.status.phase, updater.status.waits) != (phase, waits):
        assert time.monotonic() < deadline, f"{updater.status} instead of {phase}"
        time.sleep(0.01)


@contextmanager
def started_trainer(port: int, epoch: int, behaviour: str) -> Iterator[None]:
    """Start a trainer, which the end of the block kills."""
    arguments = [sys.executable, "-c", TRAINER, str(port), str(epoch), behaviour]
    trainer = start_unguarded(arguments, 2, os.environ, ROOT, "light")
    try:
        reach("localhost", port, "the test", SECONDS)
        yield
    finally:
        trainer.kill()
        trainer.wait()


def test_a_cohort_that_is_being_met_outlives_the_end_of_a_transfer(
    updater: WeightUpdater, free_port: Callable[[], int]
) -> None:
    port = free_port()
    store = host_store(at(port), SECONDS)
    updater.aim_at(direct=True)
    # Its other half never comes.
    updater.join_cohort(CohortPlace(at(port), "never", 2, 0, 1, 0, 1, Route.GLOO, SECONDS, SECONDS))
    for _ in range(2):  # the server asks again and again whether something may still be written
        assert updater.discard(SECONDS)
        assert (updater.status.phase, updater.status.error) == ("joining", "")
    updater.leave()
    updater.wait(SECONDS)
    assert updater.status.phase == "idle", "leaving breaks it off"
    del store


@pytest.mark.parametrize("direct", [False, True])
def test_what_the_trainer_sends_arrives_where_it_should(
    updater: WeightUpdater,
    live: list[tuple[str, torch.Tensor]],
    free_port: Callable[[], int],
    direct: bool,
) -> None:
    port = free_port()
    with started_trainer(port, 1, "send"):
        join(updater, port, 1, direct)
        wait_for(updater, "ready")
        updater.receive(3)
        status = updater.wait(SECONDS)
        assert (status.phase, status.version, status.not_finite) == ("received", 3, "")
        assert status.checksum == weights_checksum(new_weights())
        for (_, target), here, (_, sent) in zip(live, updater.staged(), new_weights(), strict=True):
            assert torch.equal(here, sent)
            assert torch.equal(target, sent) == direct, (
                "the live weights are touched by a direct transfer, and by no other"
            )
        assert updater.discard(SECONDS)
        assert updater.status.version is None


@pytest.mark.parametrize("how", ["a direct transfer", "a trainer that writes itself"])
def test_a_staging_buffer_that_is_not_needed_any_more_is_let_go(
    updater: WeightUpdater,
    live: list[tuple[str, torch.Tensor]],
    free_port: Callable[[], int],
    how: str,
) -> None:
    updater.aim(direct=False)
    assert updater.staging is not None
    memory = StorageWeakRef(updater.staging.untyped_storage())
    assert not memory.expired()
    if how == "a direct transfer":
        join(
            updater, free_port(), 1, True, 0.1
        )  # no peer is there, which is seen after the buffer is gone
        wait_for(updater, "failed")
        assert [tensor.data_ptr() for tensor in updater.staged()] == [
            tensor.data_ptr() for _, tensor in live
        ]
    else:
        updater.leave()
        wait_for(updater, "idle")
    assert (updater.staging, memory.expired()) == (None, True)


def test_infinity_is_found_on_the_way(updater: WeightUpdater, free_port: Callable[[], int]) -> None:
    port = free_port()
    with started_trainer(port, 1, "nan"):
        join(updater, port, 1, False)
        wait_for(updater, "ready")
        updater.receive(1)
        assert updater.wait(SECONDS).not_finite == LAYOUT[2].name


@pytest.mark.parametrize("behaviour", ["wait", "half"])
def test_a_trainer_that_dies_is_reported_and_the_next_one_is_served(
    updater: WeightUpdater, free_port: Callable[[], int], behaviour: str
) -> None:
    port = free_port()
    with started_trainer(port, 1, behaviour):
        join(updater, port, 1, False)
        wait_for(updater, "ready")
        updater.receive(1)
        wait_for(updater, "receiving", waits=True)
    wait_for(updater, "failed")
    assert updater.status.version is None
    assert "WeightUpdater_TP0" in updater.status.error
    second_port = free_port()
    with started_trainer(second_port, 2, "send"):
        join(updater, second_port, 2, False)
        wait_for(updater, "ready")
        updater.receive(1)
        wait_for(updater, "received")
        assert updater.status.error == ""


def test_nobody_at_the_rendezvous_is_an_error_after_the_deadline(
    updater: WeightUpdater, free_port: Callable[[], int]
) -> None:
    join(updater, free_port(), 1, False, 1.0)
    wait_for(updater, "failed")
    assert "cannot reach the trainer's rendezvous" in updater.status.error


def test_receiving_without_a_trainer_says_what_to_do(updater: WeightUpdater) -> None:
    updater.receive(1)
    wait_for(updater, "failed")
    assert "/bridge/init" in updater.status.error


def test_the_end_of_the_storing_process_is_seen_at_once(free_port: Callable[[], int]) -> None:
    port = free_port()
    store = host_store(at(port), 1.0)
    watch = PeerWatch(at(port), SECONDS)
    time.sleep(0.3)
    assert not watch.gone()
    del store
    deadline = time.monotonic() + SECONDS
    while not watch.gone():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    watch.close()


def test_a_port_in_use_names_the_port_and_the_remedy(free_port: Callable[[], int]) -> None:
    port = free_port()
    keep = host_store(at(port), 1.0)
    with pytest.raises(RendezvousError, match=rf"localhost:{port}.*MASTER_PORT"):
        host_store(at(port), 1.0)
    del keep


def test_a_command_that_fails_late_says_nothing_about_the_next(
    updater: WeightUpdater, free_port: Callable[[], int]
) -> None:
    """The old trainer's join is still waiting for its deadline when the new trainer has been
    announced.
    """
    join(updater, free_port(), 1, False, 1.0)
    port = free_port()
    with started_trainer(port, 2, "wait"):
        join(updater, port, 2, False)
        seen = set()
        deadline = time.monotonic() + SECONDS
        while updater.status.phase != "ready":
            seen.add(updater.status.phase)
            assert time.monotonic() < deadline, updater.status
            time.sleep(0.001)
        assert seen <= {"joining"}
        assert updater.status.epoch == 2
