"""The files of a store on a disk: a lock, a check that they keep their names, and a reserve of disk
space.

The lock keeps a second service from opening the store, by whatever name. The reserve is for what
empties the queue: batches that are handed out, acknowledgements, registrations. Posts are refused
while there is little space, but another program may fill the disk all the same. So a part of the
space is allocated to a file of its own, which is removed when a commit that empties the queue would
fail without it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from atroposlib.service.store import FIXED_BYTES, StoreError, megabytes
from atroposlib.utils.processes import file_users

logger = logging.getLogger(__name__)

LOCKED_BYTE = 1 << 62
"""Far beyond the bytes that SQLite locks in the same file."""
RESERVE_BYTES = 64 << 20
"""Enough for hundreds of commits, and for many more as the log is folded into the file between
them."""


def lock_file(path: Path) -> int:
    """Make the file if there is none, and lock it until the returned descriptor is closed.

    The lock belongs to the open file, not to the process: SQLite drops all locks of the process
    whenever it closes the file.

    Raises:
        StoreError: another service has it, or it cannot be opened.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreError(f"store {path}: {error.strerror}; pass another --store") from None
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock())
            # The service that had it may have moved the file away before it let go.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        except OSError as error:
            status = os.fstat(descriptor)
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise StoreError(
                    f"store {path}: it cannot be locked: {error.strerror}; pass another --store"
                ) from None
            pids = ", ".join(map(str, file_users(status))) or "not visible here"
            raise StoreError(
                f"store {path} is in use by another service (pid {pids}); stop it, or pass another --store"
            ) from None
        os.close(descriptor)


def require_same_files(opened: Mapping[Path, os.stat_result]) -> None:
    """Check that open files still have their names.

    Data that is written to a file without a name is gone when the process ends, although each write
    succeeds.

    Raises:
        StoreError: a file was removed, moved or replaced.
    """
    for path, before in opened.items():
        try:
            if os.path.samestat(os.stat(path), before):
                continue
            loss = "was replaced by another file"
        except OSError as error:
            loss = f"is not in its place ({error.strerror})"
        raise StoreError(
            f"store: {path} {loss}, so new data would be lost when this service ends; put the old file back, or "
            "start the service again with another --store"
        )


def _flock() -> bytes:
    """Return the C structure that asks for a write lock on one byte."""
    return struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, LOCKED_BYTE, 1, 0)


class Reserve:
    """The file that holds the reserve.

    Args:
        path: of the file. One that an earlier service left is taken over.
        size: bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.is_whole = self._is_allocated()
        self.lacks_space = False
        """The last attempt to allocate it failed for want of space."""
        self._complained = False

    def _is_allocated(self) -> bool:
        try:
            file = self.path.lstat()
        except OSError:
            return False
        return (
            file.st_size == self.size and file.st_blocks * 512 >= self.size
        )  # a copy may have holes

    def build(self, free: int) -> None:
        """Allocate the reserve, if it is not there and enough of the disk is free."""
        if self.is_whole or free < self.size + FIXED_BYTES:
            return
        try:
            self.path.unlink(missing_ok=True)
            descriptor = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            try:
                os.posix_fallocate(descriptor, 0, self.size)
            finally:
                os.close(descriptor)
        except OSError as error:  # a quota, or another program that was faster
            self._remove()
            self.lacks_space = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not self._complained:
                logger.warning(
                    "store: cannot allocate %s for %s: %s",
                    megabytes(self.size),
                    self.path,
                    error.strerror,
                )
            self._complained = True
            return
        self.is_whole, self.lacks_space, self._complained = True, False, False

    def release(self) -> bool:
        """Give the space back to the disk. Returns False if there was none to give."""
        self.is_whole = False
        return self._remove()

    def _remove(self) -> bool:
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.error("store: the reserve %s cannot be removed: %s", self.path, error.strerror)
            return False
        return True
