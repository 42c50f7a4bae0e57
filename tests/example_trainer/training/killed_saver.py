"""Trains a tiny model with a checkpoint at each step, in forked processes that kill themselves in
the middle of writing.

Every second step has its weights written first, as for a server that is restarted on them.

python -m tests.example_trainer.training.killed_saver START FOLDER STEPS POINT…

A point is after how many operations on files SIGKILL comes; 0: never. Each process saves into
FOLDER/POINT. Prints a JSON list: for each point the operations that were done, and the exit status.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from atroposlib.wire import TrainerSession
from example_trainer.models import safetensors_writer
from example_trainer.training import checkpoints as checkpointing
from example_trainer.training.checkpoints import Checkpoints
from example_trainer.training.runs import Run
from tests.example_trainer.training.tiny_training import load, train

RUN = Run("a", "model", (TrainerSession(1000, 0),))


class Deadline:
    """Counts operations on files, and kills the process at one."""

    def __init__(self, point: int) -> None:
        self.point, self.done = point, 0

    def count(self, *_: object) -> None:
        self.done += 1
        if self.done == self.point:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.count()
            return real(*arguments, **options)

        setattr(owner, name, counted)


def save_each_step(start: Path, folder: Path, steps: int, point: int) -> int:
    """Returns how many operations on files it took."""
    torch.set_num_threads(1)
    deadline = Deadline(point)
    safetensors_writer._AT_ONCE = 1000
    write = checkpointing.write_safetensors

    def write_and_count(*arguments: Any, **options: Any) -> None:
        write(*arguments, **(options | {"moved": deadline.count}))

    checkpointing.write_safetensors = write_and_count
    deadline.before(os, "fsync")
    deadline.before(Path, "rename")
    deadline.before(Path, "write_bytes")
    deadline.before(shutil, "rmtree")
    real_unlink = os.unlink

    def unlink(*arguments: Any, **options: Any) -> None:  # what rmtree takes away, file by file
        deadline.count()
        real_unlink(*arguments, **options)

    os.unlink = unlink
    model, optimizer = load(start)
    checkpoints = Checkpoints(folder, RUN, keep_states=1, keep=2)
    for step in range(1, steps + 1):
        train(model, optimizer, step)
        if step % 2 == 0:
            checkpoints.wait()  # or the number of operations would not be the same each time
            checkpoints.save_weights(model, optimizer, {})
        checkpoints.begin(model, optimizer, {})
    checkpoints.wait()
    return deadline.done


def main() -> None:
    start, folder, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    outcomes = []
    for point in map(int, sys.argv[4:]):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.write(
                    writer, str(save_each_step(start, folder / str(point), steps, point)).encode()
                )
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reader) as told:
            outcomes.append([told.read(), os.waitstatus_to_exitcode(status)])
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
