"""Files that other users of the machine must not read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

PRIVATE_UMASK = 0o077


def use_private_files(existing: Iterable[Path] = ()) -> None:
    """From now on this process and its children make files 0600 and folders 0700.

    Args:
        existing: files, and folders with all that is in them, that are closed to other users too.
            Missing ones, links and those of other users are left as they are.
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
