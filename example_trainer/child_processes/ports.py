"""TCP ports that no other process uses, not even another starter that is about to use them."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
import stat
import tempfile
import weakref
from pathlib import Path
from types import TracebackType

from example_trainer.child_processes.files import open_own_folder
from example_trainer.child_processes.processes import ProcessError

LOWEST, HIGHEST = 20_000, 32_000
"""Below Linux's range for outgoing connections (32768 and up), so that none of those takes a port
in between."""
DEFAULT_RENDEZVOUS = 29_500
"""Port of trainers and of torchrun. They take it without a reservation."""


def is_free(port: int) -> bool:
    """Return whether a server could listen on this port, on every interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


class PortReservations:
    """Picks free ports and keeps others of this machine that pick ports off them until closed.

    A port is free to bind until its server has started, so asking the kernel is not enough. A lock
    on a file named after the port, which the kernel drops when this process ends, covers the time
    in between.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.gettempdir()) / f"lockstep-ports-{os.getuid()}"
        try:
            self._directory = open_own_folder(self.folder)
        except OSError as error:
            raise ProcessError(f"cannot reserve ports in {self.folder}: {error}") from error
        weakref.finalize(self, os.close, self._directory)
        self.held: dict[int, int] = {}

    def take(self, port: int) -> bool:
        """Reserve this port; False if it is in use or reserved.

        Raises:
            ProcessError: the port's lock is a link, or another user's file.
        """
        if port in self.held:
            return False
        lock = self._open_lock(port)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        if not is_free(port):
            os.close(lock)
            return False
        self.held[port] = lock
        return True

    def _open_lock(self, port: int) -> int:
        # Neither follow a link nor truncate: the folder may lie where other users can write.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        path = self.folder / str(port)
        try:
            lock = os.open(str(port), flags, 0o600, dir_fd=self._directory)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ProcessError(
                    f"{path} is a link, which may lead to a file of yours: remove it"
                ) from None
            raise ProcessError(
                f"cannot reserve port {port} with {path}: {error.strerror}"
            ) from error
        status = os.fstat(lock)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            os.close(lock)
            raise ProcessError(f"{path} is not a regular file of user {os.geteuid()}: remove it")
        return lock

    def pick(self) -> int:
        """Reserve some free port.

        Raises:
            ProcessError: two hundred tries found none.
        """
        for _ in range(200):
            port = random.randrange(LOWEST, HIGHEST)
            if port != DEFAULT_RENDEZVOUS and self.take(port):
                return port
        raise ProcessError(
            f"found no free TCP port between {LOWEST} and {HIGHEST}: see which processes listen there (ss -ltn)"
        )

    def close(self) -> None:
        """Give all reservations back. Afterwards ports can be reserved again."""
        for lock in self.held.values():
            os.close(lock)
        self.held.clear()

    def __enter__(self) -> PortReservations:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
