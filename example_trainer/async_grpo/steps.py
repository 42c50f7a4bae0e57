"""Show the trainer's steps on the driver's terminal, read from the trainer's log as it grows."""

from __future__ import annotations

import logging
from pathlib import Path

from example_trainer.observe.metrics import read_step_line

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 20
"""Read at a time; the rest follows at the next look."""
LONGEST_LINE = 1 << 16
"""Bytes. A longer line is not the line of a step, and only its end is kept."""


class StepFollower:
    """Logs a short line for each step that the trainer logs.

    Args:
        log: the trainer's log. It need not exist yet. What it holds already, of an earlier run, is
            skipped.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = log.stat().st_size if log.exists() else 0
        self._rest = b""
        self._last: int | None = None
        self._failed = False

    def report(self) -> None:
        """Log the steps that are new. An unreadable log costs one warning and no run."""
        try:
            text = self._read()
        except OSError as error:
            if not self._failed:
                logger.warning(
                    "[Async] steps are not shown here: %s cannot be read: %s",
                    self._log,
                    error.strerror or error,
                )
            self._failed = True
            return
        self._failed = False
        *lines, rest = (self._rest + text).split(b"\n")
        self._rest = rest[-LONGEST_LINE:]
        for line in lines:
            figures = read_step_line(line.decode(errors="replace"))
            if figures is not None and figures.step != self._last:  # every rank may log a step
                self._last = figures.step
                logger.info("[Async] %s", figures)

    def _read(self) -> bytes:
        try:
            size = self._log.stat().st_size
        except FileNotFoundError:
            return b""
        if size < self._offset:  # the file was replaced
            self._offset, self._rest = 0, b""
        if size == self._offset:
            return b""
        with self._log.open("rb") as file:
            file.seek(self._offset)
            text = file.read(MOST_BYTES)
        self._offset += len(text)
        return text
