"""The rollouts of a run from its files: the archive that its service keeps, or the groups that its environment writes."""

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
from atroposlib.dashboard.run_folders.folder import RunFiles

logger = logging.getLogger(__name__)

MOST_OPEN = 4
"""Archives."""
MOST_BYTES_READ = 128 << 20
"""Of the files of groups of a run, when they are first read: the end of each."""
_AT_ONCE = 500
"""Groups in a transaction."""

_Stamp = tuple[tuple[Path, int], ...]
"""Path and inode of each file: another run may have written others of the same names."""


class _Opened(Protocol):
    def source(self) -> RolloutSource:
        """The rollouts, up to date. May take long the first time."""

    def close(self) -> None:
        """Let go of what is open."""


class OpenArchives:
    """The archives that were read last, kept open. Any method may be called from any thread.

    Args:
        tokenizer: folder or name of the tokenizer of files of groups; None where their messages will do.
    """

    def __init__(self, tokenizer: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._open: OrderedDict[_Stamp, _Opened] = OrderedDict()

    def kept(self, files: RunFiles) -> RolloutSource | None:
        """The archive that the service kept of a run; None if it kept none.

        Raises:
            ArchiveError: it cannot be read.
        """
        path = None if files.observed is None else newest_archive(files.observed)
        inode = None if path is None else _inode(path)
        if path is None or inode is None:
            return None
        return self._opened(((path, inode),), lambda: KeptArchive(path)).source()

    def of(self, files: RunFiles) -> RolloutSource:
        """The rollouts of a run.

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
        return self._opened(stamp, lambda: GroupFiles([file for file, _ in stamp], self._tokenizer)).source()

    def _opened(self, stamp: _Stamp, make: Callable[[], _Opened]) -> _Opened:
        with self._lock:
            known = self._open.get(stamp)
            if known is None:
                known = self._open[stamp] = make()
            self._open.move_to_end(stamp)
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            return known


class KeptArchive:
    """One that a service keeps, or kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._source: RolloutSource | None = None

    def source(self) -> RolloutSource:
        """Raises ArchiveError: see RolloutSource."""
        with self._lock:
            if self._source is None:
                self._source = RolloutSource(self._path)
            return self._source

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            if self._source is not None:
                self._source.close()


class GroupFiles:
    """An archive of files of groups (JSON lines), made of their ends when it is first asked for, and added to as they grow.

    Args:
        files: oldest first.
        tokenizer: see OpenArchives.
        most_bytes: of all files, that are read the first time.
    """

    def __init__(self, files: Sequence[Path], tokenizer: str | None = None, most_bytes: int = MOST_BYTES_READ) -> None:
        self._files, self._tokenizer, self._most_bytes = files, tokenizer, most_bytes
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-rollouts-")
        self._archive: Archive | None = None
        self._source: RolloutSource | None = None
        self._read_to: dict[Path, int] = {}
        self._groups = 0

    def source(self) -> RolloutSource:
        """The rollouts, with those that were written since.

        Raises:
            ArchiveError: the temporary folder cannot be written.
        """
        with self._lock:
            if self._archive is None or any(_size(file) < read for file, read in self._read_to.items()):
                self._begin()
            for file in self._files:
                self._add_new(file)
            if self._source is None:
                self._source = RolloutSource(Path(self._folder.name) / ARCHIVE)
            return self._source

    def close(self) -> None:
        """Forget it all."""
        with self._lock:
            self._let_go()
            self._folder.cleanup()

    def _let_go(self) -> None:
        for part in self._source, self._archive:
            if part is not None:
                part.close()
        self._source = self._archive = None

    def _begin(self) -> None:
        self._let_go()
        path = Path(self._folder.name) / ARCHIVE
        for file in path.parent.glob(f"{ARCHIVE}*"):
            file.unlink()
        self._archive, self._groups = Archive(path), 0
        self._read_to = {file: _line_before(file, _size(file) - self._most_bytes // len(self._files)) for file in self._files}
        content = None if self._tokenizer is None else tokenizer_content(self._tokenizer)
        if content is not None:
            self._archive.begin()
            self._archive.text = TextOfTokens.of_file(content)
            self._archive.keep_tokenizer(content)
            self._archive.commit()

    def _add_new(self, file: Path) -> None:
        archive = self._archive
        if archive is None or _size(file) <= self._read_to[file]:
            return
        passed_over, came = 0, file.stat().st_mtime
        archive.begin()
        with file.open("rb") as lines:
            lines.seek(self._read_to[file])
            for line in lines:
                try:
                    archive.add(PostedGroup(self._groups, came, file.stem, line))
                    self._groups += 1
                    if self._groups % _AT_ONCE == 0:
                        archive.commit()
                        archive.begin()
                except (ValueError, TypeError, LookupError, OverflowError):
                    if not line.endswith(b"\n"):  # it is being written
                        break
                    passed_over += bool(line.strip())
                self._read_to[file] += len(line)
        archive.commit()
        if passed_over:
            logger.warning("%d lines of %s are no groups, and are passed over", passed_over, file)


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except OSError:  # it is not there, or not any more
        return None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _line_before(file: Path, place: int) -> int:
    """Where the first line begins that lies wholly behind a place of a file."""
    if place <= 0:
        return 0
    with file.open("rb") as lines:
        lines.seek(place - 1)
        lines.readline()
        return lines.tell()
