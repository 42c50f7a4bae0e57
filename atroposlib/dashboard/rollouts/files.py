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
from typing import Protocol

from atroposlib.dashboard.rollouts.archive import ARCHIVE, Archive, PostedGroup, newest_archive
from atroposlib.dashboard.rollouts.archive_reader import NoSuchError, RolloutSource
from atroposlib.dashboard.rollouts.text import TextOfTokens, tokenizer_content
from atroposlib.dashboard.run_folders.folder import MAX_GROUP_BYTES, RunFiles
from atroposlib.utils.jsonl import LineFollower

logger = logging.getLogger(__name__)

MAX_OPEN = 4
"""Archives."""
MAX_BYTES_READ = 128 << 20
"""Bytes of the files of groups of a run that are read the first time: the end of each."""
_Stamp = tuple[tuple[Path, int], ...]
"""Path and inode of each file: another run may have written files of the same names."""


class _Opened(Protocol):
    def source(self) -> RolloutSource:
        """Return the rollouts, up to date. The first call may take long."""

    def close(self) -> None:
        """Close the files."""


class OpenArchives:
    """The archives that were read last, kept open. Every method is safe to call from any thread.

    Args:
        tokenizer: folder or name of the tokenizer of files of groups; None if their messages are
            enough.
    """

    def __init__(self, tokenizer: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._open: OrderedDict[_Stamp, _Opened] = OrderedDict()

    def kept(self, files: RunFiles) -> RolloutSource | None:
        """Return the archive that the service kept of a run; None if there is none.

        Raises:
            ArchiveError: it cannot be read.
        """
        path = None if files.observed is None else newest_archive(files.observed)
        inode = None if path is None else _inode(path)
        if path is None or inode is None:
            return None
        return self._opened(((path, inode),), lambda: KeptArchive(path)).source()

    def of(self, files: RunFiles) -> RolloutSource:
        """Return the rollouts of a run.

        Raises:
            NoSuchError: none are kept of it.
            ArchiveError: they cannot be read.
        """
        if (kept := self.kept(files)) is not None:
            return kept
        stamp = tuple((file, inode) for file in files.groups if (inode := _inode(file)) is not None)
        if not stamp:
            raise NoSuchError(
                f"no rollouts are kept of {files.name}: the service keeps them in {ARCHIVE} from the first group on, unless "
                "--keep-rollouts is 0; an environment writes them with --env.data_path_to_save_groups FILE"
            )
        return self._opened(
            stamp, lambda: GroupFiles([file for file, _ in stamp], self._tokenizer)
        ).source()

    def _opened(self, stamp: _Stamp, make: Callable[[], _Opened]) -> _Opened:
        with self._lock:
            known = self._open.get(stamp)
            if known is None:
                known = self._open[stamp] = make()
            self._open.move_to_end(stamp)
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            return known


class KeptArchive:
    """An archive that a service keeps, or kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._source: RolloutSource | None = None

    def source(self) -> RolloutSource:
        """Return the rollouts. Raises ArchiveError: see RolloutSource."""
        with self._lock:
            if self._source is None:
                self._source = RolloutSource(self._path)
            return self._source

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._source is not None:
                self._source.close()


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
        self._source: RolloutSource | None = None
        self._followers: list[LineFollower] = []
        self._groups = 0

    def source(self) -> RolloutSource:
        """Return the rollouts, with those that were written since the last call.

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
            if self._source is None:
                self._source = RolloutSource(Path(self._folder.name) / ARCHIVE)
            return self._source

    def close(self) -> None:
        """Close and remove the archive."""
        with self._lock:
            self._let_go()
            self._folder.cleanup()

    def _let_go(self) -> None:
        for part in self._source, self._archive:
            if part is not None:
                part.close()
        self._source = self._archive = None

    def _begin(self) -> Archive:
        self._let_go()
        path = Path(self._folder.name) / ARCHIVE
        for file in path.parent.glob(f"{ARCHIVE}*"):
            file.unlink()
        archive = self._archive = Archive(path)
        self._groups = 0
        share = self._max_bytes // len(self._files)
        self._followers = [
            LineFollower(file, last_bytes=share, max_line=MAX_GROUP_BYTES) for file in self._files
        ]
        content = None if self._tokenizer is None else tokenizer_content(self._tokenizer)
        if content is not None:
            archive.begin()
            archive.text = TextOfTokens.of_file(content)
            archive.keep_tokenizer(content)
            archive.commit()
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
            archive.begin()
            skipped += sum(
                bool(line.strip()) and not self._add(archive, follower, line) for line in new.lines
            )
            # A group at the end may lack nothing but the line's end. Otherwise, it is still being
            # written.
            if not more and follower.tail and self._add(archive, follower, follower.tail):
                follower.take_tail()
            archive.commit()
        skipped += follower.too_long - too_long
        if skipped:
            logger.warning(
                "%d lines of %s are no groups, and are passed over", skipped, follower.path
            )
        return True

    def _add(self, archive: Archive, follower: LineFollower, line: bytes) -> bool:
        try:
            archive.add(PostedGroup(self._groups, follower.changed, follower.path.stem, line))
        except (ValueError, TypeError, LookupError, OverflowError):
            return False
        self._groups += 1
        return True


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except OSError:  # it is not there, or not any more
        return None
