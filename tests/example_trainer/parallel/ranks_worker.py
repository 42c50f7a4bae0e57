"""Started by test_ranks.py: two ranks that agree, disagree, fail or fall silent.

Argument: which of these.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from example_trainer.errors import CheckpointError, NonFiniteError
from example_trainer.parallel.ranks import Ranks, agreed_stop, join_ranks
from example_trainer.process import StopRequested, StopSignal, run
from tests.listening import listeners

TIMEOUT = 120.0
SILENT_TIMEOUT = 20.0
"""Deadline of the case that waits for it to pass: longer than two processes on a busy machine need
to find each other.
"""


def told(ranks: Ranks, what: str, outcome: object) -> None:
    # One call, so that lines of two processes which write to the same file stay whole.
    sys.stdout.write(f"rank {ranks.rank}: {what}: {outcome}\n")
    sys.stdout.flush()


def agree(ranks: Ranks, stop: StopSignal) -> None:
    another = ranks.new_group("another")
    told(ranks, "listens on", {listener.address for listener in listeners([os.getpid()])})
    ranks.barrier("until both are connected")
    del another
    sent = {"text": "é" * 100_000, "number": 1.5, "none": None, "list": [1, [2]]}
    assert ranks.broadcast(sent if ranks.is_main else "ignored") == sent
    assert ranks.gather("x" * ranks.rank * 1000) == ["", "x" * 1000]
    assert ranks.on_main("asking", lambda: [ranks.rank]) == [0]
    assert ranks.together("working", lambda: ranks.rank) == ranks.rank
    assert ranks.shared("working", lambda: [ranks.rank, None]) == [[0, None], [1, None]]

    def fail_on_one() -> None:
        if ranks.rank == 1:
            raise NonFiniteError("the weight w is NaN")

    def fail_on_main() -> None:
        raise CheckpointError("the disk\n is full")

    for work in (
        lambda: ranks.together("stepping", fail_on_one),
        lambda: ranks.on_main("writing", fail_on_main),
        lambda: ranks.shared("comparing", fail_on_one),
    ):
        try:
            work()
        except Exception as error:  # noqa: BLE001 - shown
            told(ranks, type(error).__name__, error)
    shared = agreed_stop(stop, ranks)
    shared.defer()
    if ranks.rank == 1:
        stop.request(15)  # as if SIGTERM had come to this rank alone
    try:
        shared.check()
    except StopRequested as request:
        told(ranks, "stopped by", request)


def main(stop: StopSignal) -> None:
    with join_ranks(
        SILENT_TIMEOUT if sys.argv[1] == "silent" else TIMEOUT, torch.device("cpu")
    ) as ranks:
        match sys.argv[1]:
            case "agree":
                agree(ranks, stop)
            case "bug":  # one rank fails outside of anything agreed, while the other waits for it
                if ranks.rank == 1:
                    raise ValueError("a surprise")
                dist.all_reduce(torch.ones(3))
            case "silent":
                if ranks.rank == 1:
                    time.sleep(3 * SILENT_TIMEOUT)
                ranks.barrier("meeting")


if __name__ == "__main__":
    sys.exit(run(main))
