"""Files and folders to which other users of the machine get no access."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_own_folder(folder: Path) -> int:
    """Make the folder if it is missing, and return a descriptor of it. Other users get no access to
    it.

    Another user may have made the folder first, or a link in its place. Files in it must be opened
    relative to the descriptor, with O_NOFOLLOW.

    Raises:
        OSError: the folder is a link, belongs to another user, or cannot be made; the message has a
            remedy.
    """
    remedy = "remove it, or set TMPDIR to a folder of your own"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        reason = "it is a link" if folder.is_symlink() else error.strerror
        raise OSError(error.errno, f"{reason}; {remedy}", str(folder)) from error
    found = os.fstat(directory)
    if found.st_uid != os.geteuid():
        os.close(directory)
        reason = f"it belongs to user {found.st_uid} and not to {os.geteuid()}"
        raise OSError(errno.EPERM, f"{reason}; {remedy}", str(folder))
    if found.st_mode & 0o077:
        os.fchmod(directory, 0o700)
    return directory


@contextmanager
def private_files(wanted: bool = True) -> Iterator[None]:
    """In the block this process, and children that it starts, make files 0600 and folders 0700.

    Args:
        wanted: False to leave the umask as it is.
    """
    if not wanted:
        yield
        return
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
