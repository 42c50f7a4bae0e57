"""Files that are written whole or not at all, files that other users must not read, and the line
for a disk that refuses.

Standard library only.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

DISK_REFUSALS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG))
"""Errors of a disk that takes no more: full, quota used up, read-only, broken, or a limit on the
size of a file."""
UNFIT_PATH = frozenset(
    (
        errno.EEXIST,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENOENT,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EROFS,
    )
)
"""Errors of a path that this user can never write, however much space there is."""


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


def append_whole(descriptor: int, content: bytes) -> None:
    """Append to an open file that no one else writes, all or nothing.

    Raises:
        OSError: nothing was appended.
    """
    size = os.fstat(descriptor).st_size
    try:
        _write_all(descriptor, content)
    except OSError:
        if (
            os.fstat(descriptor).st_size > size
        ):  # the disk took a part, and what comes later must begin a line
            os.ftruncate(descriptor, size)
        raise


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def cannot_write(
    path: Path | str, error: OSError, n_bytes: int | None = None, name: str = ""
) -> str:
    """Return the beginning of an error line, such as
    `cannot write 812 bytes to /x/a.json: No space left on device`.

    Args:
        path: of the file, on whose disk the free space is looked up.
        n_bytes: size of the content, if it is known.
        name: what to call the file instead.
    """
    size = "" if n_bytes is None else f"{n_bytes:,} bytes to "
    return f"cannot write {size}{name or path}: {error.strerror or error}{_free(Path(path), error)}"


def _free(path: Path, error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    folder = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    with suppress(OSError):
        return f" ({shutil.disk_usage(folder).free:,} bytes are free there)"
    return ""


def remedy(error: BaseException, other: str) -> str:
    """Return the advice that fits an error of writing. Only a full disk needs room.

    Args:
        other: the advice that always helps, such as `change --save-path`.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EACCES, errno.EPERM):
        return f"let this user write there, or {other}"
    return other if number in UNFIT_PATH else f"make room there, or {other}"


def require_writable(folder: Path) -> None:
    """Try to write in a folder, or where it would be made. Leaves nothing behind.

    Raises:
        OSError: the folder cannot be written or made. It names the folder.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    try:
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a folder")
        with tempfile.TemporaryFile(dir=nearest, buffering=0) as file:
            file.write(b"0")
    except OSError as error:
        error.filename = str(folder)
        raise


def disk_refusal(error: BaseException) -> str | None:
    """Return the line for an error of a disk that takes no more; None for all others."""
    if not isinstance(error, OSError) or error.errno not in DISK_REFUSALS:
        return None
    if error.filename is None:
        if error.errno == errno.EIO:  # a terminal that is gone, for instance
            return None
        return f"the disk refuses to be written: {error.strerror}; make room, or write elsewhere"
    return f"{cannot_write(str(error.filename), error)}; make room there, or write elsewhere"


MAX_KEPT_BYTES = 64 << 20
"""Bytes of lines that wait in memory for space on the disk."""


class KeptLines:
    """Appends lines to a file. Lines that the disk refuses wait in memory, and come with later
    ones.

    Args:
        path: of the file, which is made. If an earlier process left half a line at its end, the
            next line begins behind it.

    Raises:
        OSError: there can be no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._lost = 0
        status = os.fstat(self._file.fileno())
        if (
            stat.S_ISREG(status.st_mode) and status.st_size and not ends_whole(path)
        ):  # a pipe, such as /dev/stdout, has no end
            self._waiting.append(b"")

    def write(self, line: bytes) -> None:
        """Append a line, given without its end.

        It is in the file when this returns, unless the disk refuses it.
        """
        if self._waiting_bytes + len(line) > MAX_KEPT_BYTES:
            self._lost += 1
            return
        before = self._waiting_bytes
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        error = self._append()
        if error is not None and not before:
            reason = cannot_write(self.path, error, len(line) + 1)
            logger.warning(
                "%s; make room there: lines wait in memory and are written when there is space",
                reason,
            )
        elif error is None and before:
            logger.warning("%s is written again, with all lines that waited", self.path)

    def write_now(self, line: bytes) -> None:
        """Append a line, or nothing of it.

        Raises:
            OSError: the disk refuses it, or lines that wait.
        """
        self._waiting.append(line)
        if (error := self._append()) is not None:
            self._waiting.pop()
            raise error

    def _append(self) -> OSError | None:
        try:
            append_whole(self._file.fileno(), b"".join(line + b"\n" for line in self._waiting))
        except OSError as error:
            return error
        self._waiting, self._waiting_bytes = [], 0
        return None

    def close(self) -> None:
        """Try once more to write what waits, and close the file."""
        error = self._append() if self._waiting else None
        lost = self._lost + len(self._waiting)
        if lost:
            reason = (
                f"{cannot_write(self.path, error)}; make room there"
                if error is not None
                else str(self.path)
            )
            logger.error("%s: the last %d lines are lost", reason, lost)
        self._file.close()


def ends_whole(path: Path) -> bool:
    """Return whether the last byte of a file that is not empty ends a line."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


PRIVATE_UMASK = 0o077


def use_private_files(existing: Iterable[Path] = ()) -> None:
    """From now on this process and its children make files 0600 and folders 0700.

    Args:
        existing: files, and folders with all that is in them, that are closed to other users too.
            Missing ones, links and files of other users are left as they are.
    """
    os.umask(PRIVATE_UMASK)
    for path in existing:
        _close(path)
        if path.is_dir() and not path.is_symlink():
            for below in path.rglob("*"):
                _close(below)


def _close(path: Path) -> None:
    try:
        status = path.lstat()
        if status.st_uid == os.geteuid() and (
            stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
        ):
            path.chmod(stat.S_IMODE(status.st_mode) & ~PRIVATE_UMASK)
    except FileNotFoundError:  # never made, or removed by its owner in this moment
        return
