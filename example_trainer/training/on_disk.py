"""Folders that are whole on the disk, or not there."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)


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


def put_in_place(draft: Path, final: Path) -> None:
    """Give a folder that is whole its name; one that has the name is removed afterwards."""
    if not final.exists():
        draft.rename(final)
        return
    logger.warning("Replacing checkpoint %s, which was there before", final)
    old = draft.with_name(draft.name.replace(".draft-", ".old.draft-"))
    final.rename(old)
    draft.rename(final)
    shutil.rmtree(old, ignore_errors=True)  # the next trainer removes what is left
