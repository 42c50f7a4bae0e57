"""What the rollout service writes down of a run, so that it can be seen when the service is gone:
who it was, what happened, which weights its servers had, and how the stack was at the end."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from atroposlib.dashboard.run_folders.folder import OBSERVED, read_object
from atroposlib.utils.files import append_whole, cannot_write, ends_whole, write_whole

logger = logging.getLogger(__name__)

MAX_BYTES = 16 << 20
"""Bytes of a file of lines. A longer file is rotated: the earlier one is kept beside it."""
MAX_WAITING_BYTES = 1 << 20
"""Bytes of lines that wait for space on the disk. Further lines are dropped."""


def observed_folder(run_folder: Path | None, store: Path | None) -> ObservedFolder:
    """Where a service writes.

    Args:
        run_folder: the run's folder, if the service was told.
        store: the file of its store; None if it keeps everything in memory.
    """
    if run_folder is not None:
        return ObservedFolder(run_folder / OBSERVED)
    if store is not None:
        return ObservedFolder(store.with_name(f"{store.stem}.{OBSERVED}"))
    return ObservedFolder(None)


class ObservedFolder:
    """The folder, and how its files are written. Writing never fails for whoever calls: what cannot
    be written is complained about once, and the run goes on. Not for several threads at a time.

    Args:
        path: of the folder, which is made when something is written; None for one that is removed
            when this process ends.
    """

    def __init__(self, path: Path | None) -> None:
        self.is_kept = path is not None
        """The folder outlives this process."""
        if path is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="lockstep-page-")
            path = Path(self._temporary.name)
        self.path = path
        self._complained = False
        self._waiting: dict[str, bytes] = {}
        """Lines that the disk refused, by name of their file; they come with later ones."""

    @property
    def run(self) -> dict[str, Any]:
        """Who the run is, as it was written last; empty before."""
        return read_object(self.path / "run.json")

    @property
    def stack(self) -> dict[str, Any]:
        """The stack, as it was written last; empty before."""
        return read_object(self.path / "stack.json")

    def begin(self, run: Mapping[str, Any]) -> None:
        """Another run begins: what was written of an earlier one is put aside."""
        for name in ("events", "servers"):
            self._put_aside(self.path / f"{name}.jsonl")
        self.write("run.json", run)

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add lines to `name`.jsonl."""
        lines = self._waiting.pop(name, b"") + b"".join(
            orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows
        )
        if not lines:
            return
        path = self.path / f"{name}.jsonl"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size > MAX_BYTES:
                path.replace(path.with_name(f"{name}.full.jsonl"))
            with path.open("ab", buffering=0) as file:
                # A process may have been killed in the middle of a line.
                torn = bool(file.tell()) and not ends_whole(path)
                append_whole(file.fileno(), b"\n" * torn + lines)
        except OSError as error:
            self._complain(path, error, len(lines))
            if len(lines) <= MAX_WAITING_BYTES:
                self._waiting[name] = lines
        else:
            self._complained = False

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a whole file: whoever reads it sees this one or the one before."""
        path, whole = self.path / name, orjson.dumps(content)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(path, whole)
        except OSError as error:
            self._complain(path, error, len(whole))

    def _put_aside(self, path: Path) -> None:
        number = 1
        while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        try:
            if path.exists():
                path.rename(aside)
        except OSError as error:
            self._complain(path, error)

    def _complain(self, path: Path, error: OSError, n_bytes: int | None = None) -> None:
        if not self._complained:
            self._complained = True
            reason = cannot_write(path, error, n_bytes)
            logger.warning(
                "the page %s; make room there. The run goes on, and will not be seen whole later",
                reason,
            )
