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
from pathlib import Path

from atroposlib.service.store import FIXED_BYTES, megabytes

logger = logging.getLogger(__name__)

RESERVE_BYTES = 64 << 20
"""Enough for hundreds of commits, and for many more as the log is folded into the file between
them."""


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
