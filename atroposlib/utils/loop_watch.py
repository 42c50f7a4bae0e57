"""The watch over an event loop: code that blocks it keeps everything else in the process waiting."""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

logger = logging.getLogger(__name__)


LOOKS = 10
"""The watch looks at the loop so many times within the limit."""
LIBRARIES = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).resolve().parents[1]),
)
"""Folders of code that only calls what blocks."""


class LoopWatch:
    """Logs which code blocks the running event loop: the first time, then each time that the sum of
    the standstills has doubled.

    The watch is a thread: while code blocks the loop, nothing else on it runs.
    """

    def __init__(self, limit: float) -> None:
        """
        Args:
            limit: seconds of a standstill below which nothing is logged.
        """
        self._limit = self._due = limit
        self._ended = threading.Event()
        self._answered = threading.Event()
        self._sum = self._still = 0.0

    def __enter__(self) -> Self:
        """Begin. Call on the loop."""
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._answered.set()
        self._thread = threading.Thread(target=self._watch, name="LoopWatch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the watch."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        pause = self._limit / LOOKS
        last, last_busy = time.monotonic(), time.process_time()
        while not self._ended.wait(pause):
            now, busy = time.monotonic(), time.process_time()
            # A process that was stopped by a signal used no CPU time, and its loop no code.
            self._look(min(now - last, max(2 * pause, busy - last_busy)))
            last, last_busy = now, busy

    def _look(self, passed: float) -> None:
        """Count the time that has passed since the last look."""
        if self._answered.is_set():
            if self._still >= self._limit:
                self._sum += self._still
            self._still = 0.0
            self._answered.clear()
            self._loop.call_soon_threadsafe(self._answered.set)
            return
        self._still += passed
        in_all = self._sum + self._still
        if self._still >= self._limit and in_all >= self._due:
            self._due = 2 * in_all
            logger.warning(
                "the event loop has stood still for %.0f s in %s, and %.0f s in all: every other item of this process "
                "waits. Make that code asynchronous, or call it with `await asyncio.to_thread(…)`",
                self._still,
                describe_code(sys._current_frames().get(self._thread_id)),
                in_all,
            )


def describe_code(frame: FrameType | None) -> str:
    """Return function, file and line of the innermost frame that is not a library's."""
    found, innermost = None, frame
    while frame is not None and found is None:
        if not frame.f_code.co_filename.startswith((*LIBRARIES, "<")):
            found = frame
        frame = frame.f_back
    frame = found or innermost
    if frame is None:
        return "code that has ended"
    code = frame.f_code
    return f"{code.co_qualname} ({Path(code.co_filename).name}, line {frame.f_lineno})"
