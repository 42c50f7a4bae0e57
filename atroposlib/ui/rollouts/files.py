"""The rollouts of a run from its files: the archive that its service kept, or the groups that its environment wrote."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from atroposlib.ui.rollouts.archive import Archive, PostedGroup
from atroposlib.ui.rollouts.source import NoSuchError, RolloutSource
from atroposlib.ui.rollouts.text import TextOfTokens, tokenizer_content
from atroposlib.ui.run.folder import RunFiles

logger = logging.getLogger(__name__)

ARCHIVE = "rollouts.db"
"""The archive's name in the folder of what the service observed."""
MOST_OPEN = 4
"""Archives."""
MOST_BYTES_READ = 128 << 20
"""Of the ends of files of groups: the newest."""

_Stamp = tuple[tuple[Path, int, int], ...]
"""Path, inode and size of each file: another run may have written others of the same names."""


class OpenArchives:
    """The archives that were read last, kept open. Any method may be called from any thread.

    Args:
        tokenizer: folder or name of the tokenizer of files of groups; None where their messages will do.
    """

    def __init__(self, tokenizer: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._open: OrderedDict[_Stamp, tuple[RolloutSource, tempfile.TemporaryDirectory[str] | None]] = OrderedDict()

    def of(self, files: RunFiles) -> RolloutSource:
        """The rollouts of a run.

        Raises:
            NoSuchError: none are kept of it.
            ArchiveError: they cannot be read.
        """
        path = None if files.observed is None else files.observed / ARCHIVE
        if path is not None and path.is_file():
            return self._opened(((path, path.stat().st_ino, 0),), [])
        if not files.groups:
            raise NoSuchError(
                f"no rollouts are kept of {files.name}: the service keeps them in {ARCHIVE} from the first group on, unless "
                "--keep-rollouts is 0; an environment writes them with --env.data_path_to_save_groups FILE"
            )
        stamp = tuple((file, file.stat().st_ino, file.stat().st_size) for file in files.groups)
        return self._opened(stamp, files.groups)

    def _opened(self, stamp: _Stamp, groups: Sequence[Path]) -> RolloutSource:
        with self._lock:
            known = self._open.get(stamp)
            if known is None:
                folder = tempfile.TemporaryDirectory(prefix="lockstep-rollouts-") if groups else None
                path = Path(folder.name) / ARCHIVE if folder else stamp[0][0]
                if folder:
                    archive_of_groups(path, groups, self._tokenizer)
                known = self._open[stamp] = (RolloutSource(path), folder)
            self._open.move_to_end(stamp)
            while len(self._open) > MOST_OPEN:
                _, (source, folder) = self._open.popitem(last=False)
                source.close()
                if folder is not None:
                    folder.cleanup()
            return known[0]


def archive_of_groups(path: Path, files: Sequence[Path], tokenizer: str | None = None) -> int:
    """Make an archive of files of groups (JSON lines), of their newest MOST_BYTES_READ each.

    Returns:
        How many groups it holds. Lines that are none are passed over.
    """
    archive = Archive(path)
    content = None if tokenizer is None else tokenizer_content(tokenizer)
    archive.begin()
    if content is not None:
        archive.text = TextOfTokens.of_file(content)
        archive.keep_tokenizer(content)
    added = 0
    for file in files:
        passed_over = 0
        for line in newest_lines(file):
            try:
                archive.add(PostedGroup(added, file.stat().st_mtime, file.stem, line))
                added += 1
            except (ValueError, TypeError, LookupError, OverflowError):
                passed_over += 1
        if passed_over:
            logger.warning("%d lines of %s are no groups, and are passed over", passed_over, file)
    archive.commit()
    archive.close()
    return added


def newest_lines(file: Path, most_bytes: int = MOST_BYTES_READ) -> Iterator[bytes]:
    """The last whole lines of a file, as many as lie within its last bytes."""
    with file.open("rb") as lines:
        begin = max(0, file.stat().st_size - most_bytes)
        if begin:
            lines.seek(begin - 1)
            lines.readline()
        yield from (line for line in lines if line.strip())
