"""The ranks of test_scatter.py: which get batches from rank 0. Arguments: each its `own` bins, or
the `same`; `ahead` of their training, or `asked` for."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import torch

from example_trainer.batch import prefetch
from example_trainer.batch.client import FetchedBatch, RolloutClient, TrainedBatch
from example_trainer.batch.prefetch import Batches, Minibatches, Upkeep
from example_trainer.batch.reader import BatchReader
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError, OutOfMemoryError, RolloutServiceError
from example_trainer.parallel.ranks import Ranks, join_ranks
from example_trainer.process import StopSignal, run

PROMPT = list(range(100, 140))


def groups() -> list[dict[str, Any]]:
    """Two groups of three rollouts, all different."""
    rows = [[[*PROMPT, 10 * g + i, 200 + 10 * g + i] for i in range(3)] for g in range(2)]
    return [
        {
            "tokens": tokens,
            "masks": [[-100] * len(PROMPT) + row[len(PROMPT) :] for row in tokens],
            "scores": [1.0, 0.0, 0.5],
            "inference_logprobs": [[1.0] * len(PROMPT) + [-0.25, -0.5] for _ in tokens],
            "weight_versions": [1, 2, 3],
        }
        for tokens in rows
    ]


class Client:
    """Two batches, then a bad one, then the end."""

    def __init__(self) -> None:
        self.stop = StopSignal()
        self.later = threading.Event()
        self.acknowledged: list[Any] = []
        self.answers = iter([groups(), groups(), [{"tokens": []}]])

    def next_batch(self, waited: Any) -> FetchedBatch:
        if not self.acknowledged:
            assert self.later.wait(60), "upkeep comes first"
        answer = next(self.answers, None)
        if answer is None:
            raise RolloutServiceError("the service is gone")
        return FetchedBatch(answer, TrainedBatch(len(self.acknowledged), 1), queue_size=9)

    def acknowledge(
        self, lease: TrainedBatch, version: int, skipped: str | None = None, report: Any = None
    ) -> None:
        self.acknowledged.append((version, skipped))

    def interrupt(self) -> None:
        return

    close = interrupt


def main(stop: StopSignal) -> None:
    prefetch.CALL_SECONDS = 0.0
    with join_ranks(60.0, torch.device("cpu")) as ranks:
        client = Client() if ranks.is_main else None
        config = TrainerConfig.model_validate({"model_name": "m", "forward_zero_advantages": True})
        reader = BatchReader(
            config, 1000, tokens_per_bin=4096, data_ranks=2 if sys.argv[1] == "own" else 1
        )
        batches = batches_of(client, ranks, reader, ahead=sys.argv[2] == "ahead")
        upkept: list[int] = []

        def work() -> None:
            upkept.extend(ranks.gather(ranks.rank))
            if client is not None:
                client.later.set()

        batch = batches.next(4, Upkeep(lambda: not upkept, work))
        ((one,),) = batch.minibatches
        seen = {
            "orders": sorted(one.orders.tolist()),
            "targets": sorted(one.targets.tolist()),
            "versions": sorted(set(one["versions"].tolist())),
            "weight": round(float(one.weights.sum()), 4),
            "lengths": one.lengths.tolist(),
            "age": batch.figures.age_max,
            "forwarded": batch.figures.forwarded_tokens,
            "queue": batch.queue_size,
            "lease": batch.lease is not None,
            "upkept": upkept,
        }
        told(ranks, json.dumps(seen))
        if sys.argv[2] == "ahead":
            until(lambda: batches._preparing.ready)  # on each rank, though none has asked
        batches.acknowledge(5)
        ((again,),) = batches.next(5).minibatches
        assert again.orders.tolist() == one.orders.tolist()
        batches.acknowledge(6)
        for kind in (BatchError, RolloutServiceError):
            try:
                batches.next(6)
            except kind as error:
                told(ranks, f"{type(error).__name__}: {error}")
                if kind is BatchError:
                    batches.acknowledge(6, skipped="no good")
        if client is not None:
            told(ranks, client.acknowledged)
        batches.close()
        no_room(ranks, reader)
        one_leaves(ranks, reader)


def batches_of(
    client: Client | None, ranks: Ranks, reader: BatchReader, ahead: bool = True
) -> Batches:
    """The batches of a rank; the first rank has the client."""
    service = cast(RolloutClient, client)
    return Batches(service, ranks, reader, torch.device("cpu"), last_version=100, ahead=ahead)


def no_room(ranks: Ranks, reader: BatchReader) -> None:
    """One rank has none for a batch: all ranks learn it, and go on with the next.

    Then the run ends while a batch is on its way.
    """
    client = Client() if ranks.is_main else None
    if client is not None:
        client.later.set()
    batches = batches_of(client, ranks, reader)
    copies = batches._copies
    hand_over = copies.handed_over

    def refuse(minibatches: Minibatches) -> Minibatches:
        copies.handed_over = hand_over  # type: ignore[method-assign]
        raise torch.OutOfMemoryError("tried to allocate")

    if ranks.rank == 1:
        copies.handed_over = refuse  # type: ignore[method-assign]
    try:
        batches.next(0)
    except OutOfMemoryError as error:
        told(ranks, f"OutOfMemoryError: {error}")
        batches.acknowledge(0, skipped="no room")
    assert batches.next(0).minibatches
    close(batches)


def one_leaves(ranks: Ranks, reader: BatchReader) -> None:
    """For rank 1 the run is over while rank 0 still waits for a batch, which then comes."""
    client = Client() if ranks.is_main else None
    batches = batches_of(client, ranks, reader)
    batches.begin(0)
    if client is None:
        close(batches)
    ranks.gather("it has left")
    if client is not None:
        client.later.set()
        until(lambda: batches._preparing.ready)
        close(batches)


def close(batches: Batches) -> None:
    """No rank waits for a batch that never comes."""
    thread = batches._preparing._thread
    assert thread is not None
    batches.close()
    assert not thread.is_alive()


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def told(ranks: Ranks, outcome: object) -> None:
    # One call, so that lines of two processes which write to the same file stay whole.
    sys.stdout.write(f"rank {ranks.rank}: {outcome}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(main))
