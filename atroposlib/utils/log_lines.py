"""Log lines on a disk that may be full."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from atroposlib.utils.whole_files import DISK_REFUSALS


class LogLines(logging.StreamHandler[TextIO]):
    """Writes log lines. Lines that a full disk refuses are counted, and the next line that is
    written names their number.

    Args:
        stream: where to; by default standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream if stream is not None else sys.stderr)
        self._refused = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, or count it."""
        before = self._refused
        super().emit(record)
        if self._refused == before:
            self._refused = 0

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, behind one that says how many may be missing."""
        line = super().format(record)
        if self._refused:
            # The disk may have taken a part of the last one.
            line = f"\n{self._refused} lines may be missing here: the disk of this log refused them\n{line}"
        return line

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a line that the disk refused; report all other errors as logging does."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError) and error.errno in DISK_REFUSALS:
            self._refused += 1
            return
        super().handleError(record)
