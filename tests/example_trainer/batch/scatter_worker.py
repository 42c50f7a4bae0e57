"""The ranks of test_scatter.py: which get batches from rank 0. Argument: each its `own` bins, or the `same`."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any, cast

import torch

from example_trainer.batch import prefetch
from example_trainer.batch.client import FetchedBatch, RolloutClient, TrainedBatch
from example_trainer.batch.prefetch import Batches, Upkeep
from example_trainer.batch.reader import BatchReader
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError, RolloutServiceError
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
    """A batch, then one that is no good, then the end."""

    def __init__(self) -> None:
        self.stop = StopSignal()
        self.later = threading.Event()
        self.acknowledged: list[Any] = []
        self.answers = iter([groups(), [{"tokens": []}]])

    def next_batch(self, waited: Any) -> FetchedBatch:
        if not self.acknowledged:
            assert self.later.wait(60), "upkeep comes first"
        answer = next(self.answers, None)
        if answer is None:
            raise RolloutServiceError("the service is gone")
        return FetchedBatch(answer, TrainedBatch(len(self.acknowledged), 1), queue_size=9)

    def acknowledge(self, lease: TrainedBatch, version: int, skipped: str | None = None, report: Any = None) -> None:
        self.acknowledged.append((version, skipped))

    def interrupt(self) -> None:
        return

    close = interrupt


def main(stop: StopSignal) -> None:
    prefetch.CALL_SECONDS = 0.0
    with join_ranks(60.0, torch.device("cpu")) as ranks:
        client = Client() if ranks.is_main else None
        config = TrainerConfig.model_validate({"model_name": "m", "forward_zero_advantages": True})
        reader = BatchReader(config, 1000, tokens_per_bin=4096, data_ranks=2 if sys.argv[1] == "own" else 1)
        batches = Batches(
            cast(RolloutClient, client), ranks, reader, torch.device("cpu"), last_version=100, ahead=False
        )  # fmt: skip
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
            "versions": sorted(set(one.versions.tolist())),
            "weight": round(float(one.weights.sum()), 4),
            "lengths": one.lengths.tolist(),
            "age": batch.figures.age_max,
            "forwarded": batch.figures.forwarded_tokens,
            "queue": batch.queue_size,
            "lease": batch.lease is not None,
            "upkept": upkept,
        }
        told(ranks, json.dumps(seen))
        batches.acknowledge(5)
        for kind in (BatchError, RolloutServiceError):
            try:
                batches.next(5)
            except kind as error:
                told(ranks, f"{type(error).__name__}: {error}")
                if kind is BatchError:
                    batches.acknowledge(5, skipped="no good")
        if client is not None:
            told(ranks, client.acknowledged)
        batches.close()


def told(ranks: Ranks, outcome: object) -> None:
    # One call, so that lines of two processes which write to the same file stay whole.
    sys.stdout.write(f"rank {ranks.rank}: {outcome}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(main))
