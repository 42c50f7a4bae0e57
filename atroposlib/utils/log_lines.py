"""Log lines on a disk that may be full, and the bounds of a server's log: clients, also without the
key, cause lines in it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

from atroposlib.utils.files import DISK_REFUSALS

MAX_LINES, LINES_SECONDS = 100, 10.0
"""Lines of one statement of the code within so many seconds."""
MAX_LINE = 4096
"""Characters of a message."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogLines(logging.StreamHandler[TextIO]):
    """Writes log lines. Lines that a full disk refuses are counted, and the next line that is
    written names their number.

    Args:
        stream: where to; by default standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream or sys.stderr)
        self._refused = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, or count it."""
        before = self._refused
        super().emit(record)
        if self._refused == before:
            self._refused = 0

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, behind one with the number of lines that may be missing."""
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


class BoundedLines(logging.Filter):
    """Leaves out lines beyond MAX_LINES of one statement, and counts them in the next line of that
    statement.

    Args:
        clock: seconds, of a clock that never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._statements: dict[tuple[str, int, int], tuple[float, int]] = {}
        """When the present period of a statement began, and its lines since then."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is written."""
        key, now = (record.name, record.levelno, record.lineno), self._clock()
        began, count = self._statements.get(key, (now, 0))
        left_out = 0
        if now - began >= LINES_SECONDS:
            began, count, left_out = now, 0, max(0, count - MAX_LINES)
        self._statements[key] = (began, count + 1)
        if count >= MAX_LINES:
            return False
        message = record.getMessage()
        if left_out or len(message) > MAX_LINE:
            message = message[:MAX_LINE]
            if left_out:
                message += f" ({left_out} more lines like this one were left out)"
            record.msg, record.args = message, ()
        return True


def one_line(record: logging.LogRecord) -> bool:
    """Escape line ends and control characters of a message, so no client can write lines of its own
    into the log.
    """
    message = record.getMessage()
    if not message.isprintable():
        message = message.rstrip("\n")
        message = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
        record.msg, record.args = message, ()
    return True


def log_to_stderr() -> None:
    """Write the log of this process to standard error, bounded.

    A log that is set up already stays as it is.
    """
    handler = LogLines()
    handler.addFilter(BoundedLines())
    handler.addFilter(one_line)
    logging.basicConfig(level=logging.INFO, format=FORMAT, handlers=[handler])
