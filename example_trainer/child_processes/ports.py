"""TCP ports that nobody else uses, not even another starter that is about to use them."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

from example_trainer.child_processes.processes import ProcessError

LOWEST, HIGHEST = 20_000, 32_000
"""Below Linux's range for outgoing connections (32768 and up), so that none of those takes a port in between."""


def is_free(port: int) -> bool:
    """Whether a server could listen on this port, on every interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


class PortReservations:
    """Picks free ports and keeps others of this machine that pick ports off them until closed.

    A port is free to bind until its server has started, so asking the kernel is not enough: a lock on a file named after the
    port, which the kernel drops when this process ends, covers the time in between.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.gettempdir()) / f"lockstep-ports-{os.getuid()}"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.held: dict[int, IO[str]] = {}

    def take(self, port: int) -> bool:
        """Reserve this very port; False if it is in use or reserved."""
        if port in self.held:
            return False
        lock = (self.folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        if not is_free(port):
            lock.close()
            return False
        self.held[port] = lock
        return True

    def pick(self) -> int:
        """Reserve some free port.

        Raises:
            ProcessError: two hundred tries found none.
        """
        for _ in range(200):
            port = random.randrange(LOWEST, HIGHEST)
            if self.take(port):
                return port
        raise ProcessError(f"found no free TCP port between {LOWEST} and {HIGHEST}: see which processes listen there (ss -ltn)")

    def close(self) -> None:
        """Give all reservations back."""
        for lock in self.held.values():
            lock.close()
        self.held.clear()

    def __enter__(self) -> PortReservations:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
