"""Folders that are whole on the disk, or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def flush(folder: Path, moved: Callable[[], None]) -> None:
    """Make sure that everything in it is on the disk before the folder gets its name."""
    for path in [*sorted(folder.rglob("*")), folder]:
        flush_entry(path)
        moved()


def flush_entry(path: Path) -> None:
    """Put a file's content, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path, folder: Path) -> None:
    """Take a folder away at once: what has its name is whole, until nothing has."""
    gone = folder / f".{path.relative_to(folder).parts[0]}.{path.name}.old.draft-{os.getpid()}"
    path.rename(gone)
    shutil.rmtree(gone)
