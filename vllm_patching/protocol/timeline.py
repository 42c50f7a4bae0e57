"""Spans of a process's activities, in a file of its own, if LOCKSTEP_TIMELINE names a folder.

One JSON object a line. The first one of each process names it:

    {"role": "trainer", "name": "rank0", "pid": 7, "host": "node1", "began": 1790000000000000000}
    {"what": "train", "begin": 1790000000000000000, "end": 1790000000250000000, "version": 3}

Moments are Unix nanoseconds. `python -m bench.timelines FOLDER --output DIR` draws them.
Needs nothing but Python, so that every role may use it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "LOCKSTEP_TIMELINE"
"""Environment variable with the folder for the files; without it nothing is written."""
MOST_BYTES = 64 << 20
"""Limit of one file. Later spans are dropped, with one warning."""
LONGEST_SPAN_SECONDS = 10.0
"""A longer activity is written in pieces, at the next event after this time, so that a kill loses
no more."""

Fact = int | float | str | bool

_BEHIND = time.time_ns() - time.monotonic_ns()
"""Unix time less the monotonic clock's, once for a process: a change of the system clock tears no
span."""


def unix_ns(moment: float | None = None) -> int:
    """Unix nanoseconds of a moment of time.monotonic() or time.perf_counter(), in seconds; of now
    without one.
    """
    return _BEHIND + (time.monotonic_ns() if moment is None else int(moment * 1e9))


class Timeline:
    """The spans of one process.

    Safe to use from several threads; whatever goes wrong with the file ends the writing alone.
    """

    def __init__(
        self, path: Path | None, role: str, name: str, most_bytes: int = MOST_BYTES
    ) -> None:
        """
        Args:
            path: the file, which is continued; None: nothing is written.
            role: what kind of process, such as `trainer`.
            name: which of them.
            most_bytes: how long the file may grow.
        """
        self._path, self._left, self._file = path, most_bytes, -1
        self._lock = threading.Lock()
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._left -= os.fstat(self._file).st_size
        except OSError as error:
            self._give_up(f"{error.strerror or error}")
        self._line(
            {
                "role": role,
                "name": name,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "began": unix_ns(),
            }
        )

    @property
    def on(self) -> bool:
        """Return whether spans are written."""
        return self._file >= 0

    def write(self, what: str, begin: int, end: int | None = None, **facts: Fact) -> None:
        """Write a span.

        Args:
            what: such as `train`.
            begin, end: Unix nanoseconds (`unix_ns`); without an end it is over now.
            facts: such as the weight version.
        """
        if self.on:
            self._line(
                {"what": what, "begin": begin, "end": unix_ns() if end is None else end, **facts}
            )

    @contextmanager
    def span(self, what: str, **facts: Fact) -> Iterator[None]:
        """Write a span of what is done within the block, however that ends."""
        begin = unix_ns()
        try:
            yield
        finally:
            self.write(what, begin, None, **facts)

    def close(self) -> None:
        """Write nothing more. Safe to call twice."""
        with self._lock:
            self._shut()

    def _line(self, content: dict[str, Fact]) -> None:
        line = json.dumps(content).encode() + b"\n"
        with self._lock:
            if self._file < 0:
                return
            self._left -= len(line)
            if self._left < 0:
                self._give_up("it has reached its greatest length; nothing more is written to it")
                return
            size = os.fstat(self._file).st_size
            try:
                left = line
                # usually at once, so that a kill leaves whole lines; a full disk may take a part
                while left:
                    left = left[os.write(self._file, left) :]
            except OSError as error:
                if os.fstat(self._file).st_size > size:
                    os.ftruncate(self._file, size)
                reason = f"cannot write {len(line)} bytes: {error.strerror or error}"
                self._give_up(
                    f"{reason}; nothing more is written to it, make room before the next start"
                )

    def _give_up(self, reason: str) -> None:
        logger.warning("%s (%s): %s", self._path, VARIABLE, reason)
        self._shut()

    def _shut(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def open_timeline(role: str, name: str) -> Timeline:
    """The timeline of this process, in the folder that LOCKSTEP_TIMELINE names; one that writes
    nothing without it.

    Args:
        role: trainer, generator, reference, parameter-server.
        name: which of them; no two that live at the same time may have the same.
    """
    folder = os.environ.get(VARIABLE, "")
    file = re.sub(r"[^A-Za-z0-9.-]+", "_", f"timeline-{role}-{name}")
    return Timeline(Path(folder) / f"{file}.jsonl" if folder else None, role, name)


class Activity:
    """The activity of a process, one at a time: a span ends when the next begins."""

    def __init__(self, timeline: Timeline, clock: Callable[[], int] = unix_ns) -> None:
        """
        Args:
            timeline: gets the spans.
            clock: Unix nanoseconds.
        """
        self._timeline, self._clock = timeline, clock
        self._what, self._begin = "", 0

    def be(self, what: str) -> None:
        """Begin this activity; empty: none, which makes no span."""
        now = self._clock()
        if what == self._what and now - self._begin < LONGEST_SPAN_SECONDS * 1e9:
            return
        if self._what:
            self._timeline.write(self._what, self._begin, now)
        self._what, self._begin = what, now
