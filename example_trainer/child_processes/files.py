"""Files that are written whole or not at all, and the line for a disk that refuses.

Standard library only.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Files and folders to which other users of the machine get no access.


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
    status = os.fstat(directory)
    if status.st_uid != os.geteuid():
        os.close(directory)
        reason = f"it belongs to user {status.st_uid} and not to {os.geteuid()}"
        raise OSError(errno.EPERM, f"{reason}; {remedy}", str(folder))
    if status.st_mode & 0o077:
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


DISK_REFUSALS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG))
"""Errors of a disk that takes no more: full, quota used up, read-only, broken, or a limit on the
size of a file."""


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file, or leave it as it is. The content is on the disk when this returns.

    Args:
        mode: of the file, less what the umask takes away.

    Raises:
        OSError: nothing has changed, and the temporary file in the same folder is gone. It names
            the file.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            _write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.replace(path)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def cannot_write(path: Path | str, error: OSError, n_bytes: int | None = None) -> str:
    """Return the beginning of an error line, such as
    `cannot write 812 bytes to /x/a.json: No space left on device`.

    Args:
        path: of the file, on whose disk the free space is looked up.
        n_bytes: size of the content, if it is known.
    """
    size = "" if n_bytes is None else f"{n_bytes:,} bytes to "
    return f"cannot write {size}{path}: {error.strerror or error}{_free(Path(path), error)}"


def _free(path: Path, error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    folder = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    with suppress(OSError):
        return f" ({shutil.disk_usage(folder).free:,} bytes are free there)"
    return ""


def disk_refusal(error: BaseException) -> str | None:
    """Return the line for an error of a disk that takes no more; None for all others."""
    if not isinstance(error, OSError) or error.errno not in DISK_REFUSALS:
        return None
    if error.filename is None:
        if error.errno == errno.EIO:  # a terminal that is gone, for instance
            return None
        return f"the disk refuses to be written: {error.strerror}; make room, or write elsewhere"
    return f"{cannot_write(str(error.filename), error)}; make room there, or write elsewhere"
