"""A lock on the store's file itself, so that no second service opens it, by whatever name."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from atroposlib.service.store import StoreError
from atroposlib.utils.processes import file_users

LOCKED_BYTE = 1 << 62
"""Far beyond the bytes that SQLite locks in the same file."""


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
            named = ", ".join(map(str, file_users(status))) or "not visible here"
            raise StoreError(
                f"store {path} is in use by another service (pid {named}); stop it, or pass another --store"
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
            happened = (
                None if os.path.samestat(os.stat(path), before) else "was replaced by another file"
            )
        except OSError as error:
            happened = f"is not in its place ({error.strerror})"
        if happened:
            raise StoreError(
                f"store: {path} {happened}, so new data would be lost when this service ends; put the old file back, or "
                "start the service again with another --store"
            )


def _flock() -> bytes:
    """Return the C structure that asks for a write lock on one byte."""
    return struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, LOCKED_BYTE, 1, 0)
