"""The rollouts of a run, from the archive that its service keeps or from the groups that its
environment writes.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from atroposlib.dashboard.rollouts.archive import (
    ARCHIVE,
    Archive,
    NoSuchError,
    PostedGroup,
    newest_archive,
)
from atroposlib.dashboard.rollouts.text import tokenizer_content
from atroposlib.dashboard.run_folders.runs import MAX_GROUP_BYTES, RunFiles
from atroposlib.utils.jsonl import LineFollower

logger = logging.getLogger(__name__)

MAX_OPEN = 4
"""Archives."""
MAX_BYTES_READ = 128 << 20
"""Bytes of the files of groups of a run that are read the first time: the end of each."""
_Stamp = tuple[tuple[Path, int], ...]
"""Path and inode of each file: another run may have written files of the same names."""


class OpenArchives:
    """The archives that were read last, kept open. Every method is safe to call from any thread.

    Args:
        tokenizer: folder or name of the tokenizer of files of groups; None if their messages are
            enough.
    """

    def __init__(self, tokenizer: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._open: OrderedDict[_Stamp, Archive | GroupFiles] = OrderedDict()

    def kept(self, files: RunFiles) -> Archive | None:
        """Return the archive that the service kept of a run; None if there is none.

        Raises:
            ArchiveError: it cannot be read.
        """
        path = newest_archive(files.recorded(""))
        stamp = path and _stamp([path])
        if not path or not stamp:
            return None
        return self._opened(stamp, Archive, lambda: Archive(path, read_only=True))

    def of(self, files: RunFiles) -> Archive:
        """Return the rollouts of a run.

        Raises:
            NoSuchError: none are kept of it.
            ArchiveError: they cannot be read.
        """
        if (kept := self.kept(files)) is not None:
            return kept
        stamp = _stamp(files.groups)
        if not stamp:
            raise NoSuchError(
                f"no rollouts are kept of {files.name}: the service keeps them in {ARCHIVE} from "
                "the first group on, unless --keep-rollouts is 0. An environment writes them "
                "with --env.data_path_to_save_groups FILE"
            )
        paths = [path for path, _ in stamp]
        groups = self._opened(stamp, GroupFiles, lambda: GroupFiles(paths, self._tokenizer))
        return groups.archive()

    def _opened(self, stamp: _Stamp, kind: type[T], make: Callable[[], T]) -> T:
        with self._lock:
            source = self._open.get(stamp)
            if not isinstance(source, kind):
                source = self._open[stamp] = make()
            self._open.move_to_end(stamp)
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            return source


class GroupFiles:
    """An archive of files of groups (JSON lines), made of their ends when it is first used, and
    extended as they grow.

    Args:
        files: oldest first.
        tokenizer: see OpenArchives.
        max_bytes: of all files, that are read the first time.
    """

    def __init__(
        self, files: Sequence[Path], tokenizer: str | None = None, max_bytes: int = MAX_BYTES_READ
    ) -> None:
        self._files, self._tokenizer, self._max_bytes = files, tokenizer, max_bytes
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-rollouts-")
        self._archive: Archive | None = None
        self._followers: list[LineFollower] = []
        self._groups = 0

    def archive(self) -> Archive:
        """Return the archive, with the groups that were written since the last call.

        Raises:
            ArchiveError: the temporary folder cannot be written.
        """
        with self._lock:
            archive = self._archive or self._begin()
            if not all([self._add_new(archive, follower) for follower in self._followers]):
                # A file was rewritten: its groups in the archive are not its groups any more.
                archive = self._begin()
                for follower in self._followers:
                    self._add_new(archive, follower)
            return archive

    def close(self) -> None:
        """Close and remove the archive."""
        with self._lock:
            self._remove()
            self._folder.cleanup()

    def _remove(self) -> None:
        if self._archive is not None:
            self._archive.close()
        self._archive = None
        for file in Path(self._folder.name).glob(f"{ARCHIVE}*"):
            file.unlink()

    def _begin(self) -> Archive:
        self._remove()
        archive = self._archive = Archive(Path(self._folder.name) / ARCHIVE)
        self._groups = 0
        share = self._max_bytes // len(self._files)
        self._followers = [
            LineFollower(file, last_bytes=share, max_line=MAX_GROUP_BYTES) for file in self._files
        ]
        content = self._tokenizer and tokenizer_content(self._tokenizer)
        if content:
            with archive.transaction():
                archive.keep_tokenizer(content)
        return archive

    def _add_new(self, archive: Archive, follower: LineFollower) -> bool:
        """Add the groups that were written since the last call, and return False if the file was
        rewritten.
        """
        skipped, too_long, more = 0, follower.too_long, True
        while more:
            new = follower.read_new()
            if new.rewritten:
                return False
            more = new.more
            if not new.lines and not follower.tail:
                continue
            with archive.transaction():
                lines = [line for line in new.lines if line.strip()]
                skipped += sum(not self._add(archive, follower, line) for line in lines)
                # A group at the end may lack nothing but the line's end. Otherwise, it is still
                # being written.
                if not more and follower.tail and self._add(archive, follower, follower.tail):
                    follower.take_tail()
        skipped += follower.too_long - too_long
        if skipped:
            logger.warning(
                "%d lines of %s are not groups, and are passed over", skipped, follower.path
            )
        return True

    def _add(self, archive: Archive, follower: LineFollower, line: bytes) -> bool:
        try:
            archive.add(PostedGroup(self._groups, follower.changed, follower.path.stem, line))
        except (ValueError, TypeError, LookupError, OverflowError):
            return False
        self._groups += 1
        return True


T = TypeVar("T", Archive, GroupFiles)


def _stamp(files: Sequence[Path]) -> _Stamp:
    """Return path and inode of the files that exist."""
    return tuple((file, file.stat().st_ino) for file in files if file.is_file())
