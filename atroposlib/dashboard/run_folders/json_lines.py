"""Follows a file of JSON lines that somebody else writes: every line is read once, in pieces of bounded size."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

import orjson

PIECE = 4 << 20
"""Bytes that are read at once."""
LONGEST_LINE = 16 << 20
"""Bytes of a line; a longer one is passed over, so that a file without line ends cannot fill the memory."""
_MARK = 256
"""Bytes before the place that was read up to, by which a file that was written anew in place is told from one that grew."""


@dataclass(slots=True)
class News:
    """What a look at the file has found.

    Attributes:
        rows: objects of new lines, oldest first.
        rewritten: the file is another one than at the last look, or was written anew: `rows` begin with its first.
        more: it holds more than one look reads; look again.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    rewritten: bool = False
    more: bool = False


class JsonLinesFile:
    """One file, which may not be there yet, may grow, may be cut off, replaced or removed.

    A line without its end is being written: it is read when it is whole. A line that is no object is counted and passed over.
    Not for several threads at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable = 0
        """Lines that were passed over, of the present file."""
        self.changed = 0.0
        """Unix time of its last change; 0 as long as it is not there."""
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._mark = b""
        self._tail = b""
        self._skipping = False

    def read_new(self) -> News:
        """What is new since the last look, of at most PIECE bytes (or one line, if that is longer).

        Raises:
            OSError: the file is there and cannot be read.
        """
        try:
            file = _opened(self.path)
        except (FileNotFoundError, NotADirectoryError):
            gone = self._identity is not None
            self._forget()
            return News(rewritten=gone)
        with file:
            stat = os.fstat(file.fileno())
            identity, self.changed = (stat.st_dev, stat.st_ino), stat.st_mtime
            rewritten = False
            if identity != self._identity or stat.st_size < self._offset or not self._is_as_it_was(file.fileno()):
                rewritten = self._identity is not None
                self._forget()
                self._identity, self.changed = identity, stat.st_mtime
            if stat.st_size <= self._offset:
                return News(rewritten=rewritten)
            rows = self._rows(self._whole_lines(file.fileno(), stat.st_size))
            return News(rows, rewritten, more=stat.st_size - self._offset > len(self._tail))

    def _forget(self) -> None:
        self._identity, self._offset, self._mark, self._tail = None, 0, b"", b""
        self._skipping, self.unreadable, self.changed = False, 0, 0.0

    def _is_as_it_was(self, file: int) -> bool:
        return os.pread(file, len(self._mark), self._offset - len(self._mark)) == self._mark

    def _whole_lines(self, file: int, size: int) -> list[bytes]:
        """The next lines that have their ends. What follows the last end is read again at the next look."""
        for wanted in (PIECE, LONGEST_LINE):
            data = os.pread(file, min(wanted, size - self._offset), self._offset)
            end = data.rfind(b"\n") + 1
            if end or len(data) < wanted:
                break
        if not end and len(data) == LONGEST_LINE:  # no line of ours: on to its end
            self.unreadable += not self._skipping
            self._skipping = True
            end = len(data)
            lines: list[bytes] = []
        else:
            lines = data[:end].split(b"\n")[:-1]
            if self._skipping and lines:
                self._skipping = False
                del lines[0]
        self._tail = data[end:]
        self._offset += end
        self._mark = (self._mark + data[max(0, end - _MARK) : end])[-_MARK:]
        return lines

    def _rows(self, lines: list[bytes]) -> list[dict[str, Any]]:
        rows = []
        for line in lines:
            if not line.strip():
                continue
            row = _parsed(line)
            if row is None:
                self.unreadable += 1
            else:
                rows.append(row)
        return rows


def last_rows(path: Path, most_bytes: int = 1 << 16) -> list[dict[str, Any]]:
    """The objects of the last lines of a file, oldest first, as far as they lie within its last bytes; none if it is not there
    or cannot be read."""
    try:
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - most_bytes)
            lines = os.pread(file.fileno(), most_bytes, begin).split(b"\n")
    except OSError:
        return []
    whole = lines[1 if begin else 0 : -1]
    return [row for line in whole if line.strip() and (row := _parsed(line)) is not None]


def _opened(path: Path) -> BinaryIO:
    """A file to be read. What is none is refused: a pipe would wait for somebody who writes."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is no file, but a folder, a pipe or a device")
    return os.fdopen(file, "rb")


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None if it is something else. NaN and infinities, which are no JSON, are read all the same."""
    try:
        row = orjson.loads(line)
    except ValueError:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None
