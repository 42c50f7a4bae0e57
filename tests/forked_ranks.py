"""Two ranks as torchrun starts them (FORKED_RANKS: another number), forked from one process that
has imported torch. That is a third of the work of three that do.

python -m tests.forked_ranks SCRIPT ARGUMENTS…

For messages between ranks. torchrun's own behaviour (it is killed, it gets a signal) is tested with
forked_torchrun.py.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist

import example_trainer.grpo
import example_trainer.parallel.fsdp  # noqa: F401 - imported once, before the ranks part
from example_trainer.child_processes.ports import PortReservations
from tests.forked_commands import end

RANKS = int(os.environ.get("FORKED_RANKS", "2"))
OWN_END_SECONDS = 15.0
"""Seconds in which ranks may end by themselves when another has failed, with their reason, before
they are asked to.
"""


def torchrun_variables(rank: int, port: int) -> dict[str, str]:
    """Return torchrun's variables for one of its ranks; its store listens on the port."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def be_rank(rank: int, port: int, command: list[str]) -> None:
    """Run the script as if torchrun had started it by its path."""
    os.environ |= torchrun_variables(rank, port)
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


def reserve_pair(reservations: PortReservations) -> int:
    """Reserve two ports in a row: the first for the ranks' store, the second for the meeting of
    trainer and servers.
    """
    for _ in range(200):
        port = reservations.pick()
        if reservations.take(port + 1):
            return port
    raise RuntimeError("found no two free TCP ports in a row: see which processes listen (ss -ltn)")


def main(command: list[str]) -> int:
    """Status 1 if a rank failed; the others are then asked to end, as by torchrun."""
    with PortReservations() as reservations, socket.socket() as listening:
        port = reserve_pair(reservations)  # the ranks inherit the locks
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen()
        living: set[int] = set()
        for rank in range(RANKS):
            if child := os.fork():
                living.add(child)
            else:
                listening.close()
                end(partial(be_rank, rank, port, command))
        # The store is the launcher's, so that it outlives the ranks.
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            RANKS,
            True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    failed = False
    asked = float("inf")
    while living:
        child, status = os.waitpid(-1, os.WNOHANG if failed else 0)
        living.discard(child)
        if status and not failed:
            failed, asked = True, time.monotonic() + OWN_END_SECONDS
        if failed and not child:
            if time.monotonic() > asked:
                asked = float("inf")
                for other in living:
                    os.kill(other, signal.SIGTERM)
            time.sleep(0.02)
    del store
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
