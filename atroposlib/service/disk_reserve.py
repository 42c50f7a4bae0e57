"""Disk space that the store keeps for what empties its queue: batches that are handed out,
acknowledgements, registrations.

Posts are refused while there is little space. Another program may fill the disk all the same. So a
part of the space is allocated to a file of its own, which is removed when a commit that empties the
queue would fail without it.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

RESERVE_BYTES = 64 << 20
"""Enough for hundreds of commits, and for many more as the log is folded into the file between
them."""
SLACK_BYTES = 16 << 20
"""Free space below which no post may make the file longer."""
FIXED_BYTES = 2 << 20
"""Bytes of log for the pages that every post touches besides its bodies. Rebuilding the reserve
leaves them free."""


def megabytes(n_bytes: int) -> str:
    """Return a size for people, such as `3.1 MB`."""
    return f"{max(0, n_bytes) / 1e6:,.1f} MB"


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Space for a store, at one moment.

    Attributes:
        path: the store's file.
        free: bytes of the disk that this user may write.
        promised: bytes by which the file will grow when the log is folded into it.
        reusable: bytes of pages in the file that hold nothing.
        reserve: bytes kept for what empties the queue, if they are not used.
        reserve_is_whole: they are allocated.
        reserve_lacks_space: the system refused to allocate them for want of space, though `free`
            may be more: a quota.
        measured: when, in seconds of the monotonic clock.
    """

    path: Path
    free: int
    promised: int
    reusable: int
    reserve: int
    reserve_is_whole: bool
    reserve_lacks_space: bool = False
    measured: float = field(default_factory=time.monotonic)

    def needed_for(self, n_bytes: int) -> int:
        """Free bytes without which a post of this size is refused."""
        logged = n_bytes + n_bytes // 16 + FIXED_BYTES
        growth = max(0, logged - self.reusable)
        return self.promised + logged + (growth + SLACK_BYTES if growth else 0)

    def refusal(self, n_bytes: int) -> str | None:
        """Return the reason to refuse posts of so many bytes; None if there is space."""
        needed, folder = self.needed_for(n_bytes), self.path.absolute().parent
        kept = (
            f"{megabytes(self.reserve)} beyond that are reserved for batches and acknowledgements"
        )
        if not self.reserve_is_whole:
            needed += self.reserve
            kept = f"its reserve of {megabytes(self.reserve)} for batches and acknowledgements is not whole"
        if self.free >= needed and not self.reserve_lacks_space:
            return None
        return (
            f"store {self.path}: {megabytes(self.free)} are free on its disk, {megabytes(needed)} are needed for new groups, "
            f"and {kept}. New groups are refused until there is space: free some in {folder} or elsewhere on that disk"
        )


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
