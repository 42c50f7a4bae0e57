"""A rank for the tests of the launcher: it does what its first argument names, and imports little.

    python launched_rank.py launch COUNT WHAT…      starts ranks of this script as the launcher does

Each rank writes one line `rank R pid P` when it is ready.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)


def main(arguments: list[str]) -> int:
    """Be the launcher or a rank. Returns the exit status."""
    if arguments[0] == "launch":
        from example_trainer.parallel.launch import launch
        from example_trainer.process import run

        command = [sys.executable, __file__, *arguments[2:]]
        return run(lambda stop: launch(command, int(arguments[1]), stop))
    from example_trainer.parallel.launched import end_with_launcher

    end_with_launcher()
    return be_rank(int(os.environ["RANK"]), *arguments)


def be_rank(rank: int, what: str, *values: str) -> int:
    """Do what a test asks of a rank."""
    if what == "ends":  # with the status of its number
        return int(values[rank])
    stopped: list[int] = []

    def received(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stopped.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, received)
    print(f"rank {rank} pid {os.getpid()}", flush=True)
    if what == "fails" and rank == 1:  # with this status, while the others wait for a signal
        return int(values[0])
    if what == "signalled":  # with a status beside the signal's
        while not stopped:
            time.sleep(0.01)
        time.sleep(0.3)  # a checkpoint is saved
        print(f"rank {rank} saved after {signal.Signals(stopped[0]).name}", flush=True)
        return 128 + stopped[0]
    time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
