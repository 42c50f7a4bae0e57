"""Started by test_killed_saves.py: pairs of ranks that save at each step in the background; one of
them kills itself.

python -m tests.example_trainer.parallel.killed_saving_ranks START FOLDER STEPS RANK:EXCHANGE…

A rank is killed as it is about to send or receive its EXCHANGEth piece of a checkpoint; 0: none is.
Each pair saves into FOLDER/RANK:EXCHANGE. Prints a JSON list: for each pair, how many pieces rank 0
exchanged, and both exit statuses.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from example_trainer.models import load_model
from example_trainer.parallel.fsdp import sharded_decoder
from example_trainer.parallel.ranks import join_ranks
from example_trainer.training.checkpoints import BackgroundSave, Checkpoints
from example_trainer.training.optimizer import MasterAdamW
from tests.example_trainer.training.killed_saver import RUN
from tests.example_trainer.training.tiny_training import train
from tests.forked_ranks import RANKS, torchrun_variables


def save_each_step(start: Path, folder: Path, steps: int, deadly: int) -> int:
    """Train as one of the ranks. Returns how many pieces it exchanged."""
    done = 0
    exchange = BackgroundSave._exchange

    def counted(*arguments: Any) -> None:
        nonlocal done
        done += 1
        if done == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(*arguments)

    BackgroundSave._exchange = counted  # type: ignore[method-assign]
    with join_ranks(60, torch.device("cpu")) as ranks:
        model = load_model(
            str(start), torch.float32, "cpu", partial(sharded_decoder, world_size=RANKS)
        )
        optimizer = MasterAdamW(
            model, lr=0.02, schedule="cosine", total_steps=10, shards=model.shards
        )
        checkpoints = Checkpoints(folder, RUN, keep_states=steps, keep=steps, ranks=ranks)
        for step in range(1, steps + 1):
            train(model, optimizer, step)
            checkpoints.begin(model, optimizer, {})
        checkpoints.wait()
    return done


def run_pair(
    start: Path, folder: Path, steps: int, rank: int, deadly: int
) -> tuple[str, list[int]]:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    reader, writer = os.pipe()
    children = []
    for number in range(RANKS):
        child = os.fork()
        if child == 0:
            listening.close()
            status = 1
            try:
                os.environ |= torchrun_variables(number, port)
                done = save_each_step(start, folder, steps, deadly if number == rank else 0)
                if number == 0:
                    os.write(writer, str(done).encode())
                status = 0
            except Exception as error:  # noqa: BLE001 - the other one was killed
                sys.stderr.write(f"rank {number}: {type(error).__name__}: {error}\n")
            finally:
                os._exit(status)
        children.append(child)
    os.close(writer)
    # The store is the launcher's, so that it outlives the ranks.
    store = dist.TCPStore(
        "127.0.0.1", port, RANKS, True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    del store
    with os.fdopen(reader) as told:
        return told.read(), statuses


def main() -> None:
    torch.set_num_threads(1)
    start, folder, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    outcomes = []
    for name in sys.argv[4:]:
        rank, deadly = map(int, name.split(":"))
        outcomes.append(run_pair(start, folder / name, steps, rank, deadly))
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
