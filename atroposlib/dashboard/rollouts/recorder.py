"""Writes the archive while the service runs, in a thread of its own, so that no post and no trainer
ever waits for it.

What comes faster than the archive may cost is left out, whole groups at a time, and counted: the
service has other work to do.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.dashboard.rollouts.archive import (
    ARCHIVE,
    MAX_BYTES,
    MAX_ROLLOUTS,
    Archive,
    ArchiveError,
    ArchiveFullError,
    PostedGroup,
    archive_of_next_run,
    newest_archive,
)
from atroposlib.dashboard.rollouts.rollout_stats import parity_of, read_report
from atroposlib.dashboard.rollouts.text import TextOfTokens, tokenizer_content
from atroposlib.utils.whole_files import disk_refusal

logger = logging.getLogger(__name__)

BYTES_PER_SECOND = 1 << 20
"""That are kept in the long run: a few hundredths of a core."""
BUSY_CORES, BUSY_SHARE = 1 / 3, 0.25
"""While the service uses more than so many cores, this share of them: it has other work to do."""
BURST_BYTES = 8 << 20
"""That are kept when none came before, and that may wait for the disk."""
GROUP_BYTES = 32 << 10
"""What a group counts as besides its body: the smallest takes half a millisecond too."""
MAX_REPORTS = 64
COMMIT_SECONDS = 0.5
"""What comes within it is one transaction."""
CLOSE_SECONDS = 10.0
_SAY_SECONDS = 60.0


class _AnotherRun:
    """What comes after it is of another run."""


@dataclass(frozen=True)
class _Report:
    seqs: tuple[int, ...]
    told: Any


_Waiting = PostedGroup | _Report | _AnotherRun


def _by_run(some: Sequence[_Waiting]) -> list[list[PostedGroup | _Report]]:
    """What came, run by run; the first of them is the one that went on before."""
    runs: list[list[PostedGroup | _Report]] = [[]]
    for one in some:
        if isinstance(one, _AnotherRun):
            runs.append([])
        else:
            runs[-1].append(one)
    return runs


class Allowance:
    """How many bytes may be taken: so many a second, and what was saved up, to a bound.

    Args:
        per_second, most: bytes.
        now: in seconds of a clock that never goes back.
    """

    def __init__(self, per_second: float, most: float, now: float) -> None:
        self.per_second, self.most = per_second, most
        self._left, self._since = float(most), now

    def take(self, size: int, now: float) -> bool:
        """Take so many bytes if they are there.

        What is larger than the bound may be taken when all is saved up.
        """
        self._left = min(self.most, self._left + (now - self._since) * self.per_second)
        self._since = now
        if self._left < min(size, self.most):
            return False
        self._left -= size
        return True


class RolloutRecorder:
    """Keeps rollouts as the service gets them, and what the trainer tells of them. It neither waits
    nor raises.

    Args:
        folder: of the archives, one for each run that is kept there; None keeps nothing.
        most_bytes, most_rollouts: see Archive.
        tokenizer: folder or name of the sampled model's tokenizer; None for that of the model that
            the trainer names.
        told: called with the id of the newest group and the number of groups after each
            transaction, in the thread.
        bytes_per_second: of bodies, in the long run.

    Attributes:
        recorded, left_out: groups.
    """

    def __init__(
        self,
        folder: Path | None,
        most_bytes: int = MAX_BYTES,
        most_rollouts: int = MAX_ROLLOUTS,
        tokenizer: str | None = None,
        told: Callable[[int, int], None] | None = None,
        bytes_per_second: float = BYTES_PER_SECOND,
    ) -> None:
        self.folder, self._most_bytes, self._most_rollouts = folder, most_bytes, most_rollouts
        self.told = told
        self.recorded = self.left_out = 0
        self._allowance, self._per_second = (
            Allowance(bytes_per_second, BURST_BYTES, time.monotonic()),
            bytes_per_second,
        )
        self._closing = threading.Event()
        self._changed = threading.Condition()
        """Guards what follows."""
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = self._reports = 0
        self._model = tokenizer
        self._named = tokenizer is not None
        self._closed = folder is None
        self._said_at: float | None = None
        # Of the thread:
        self._used, self._since = time.process_time(), time.monotonic()
        self._archive: Archive | None = None
        self._path: Path | None = None
        self._loaded: str | None = None
        self._thread: threading.Thread | None = None
        if folder is not None:
            self._thread = threading.Thread(target=self._run, name="rollout-archive", daemon=True)
            self._thread.start()

    # ---- on the service's event loop ----

    def model(self, name: str | None) -> None:
        """The trainer has named its model, whose tokenizer makes text of tokens."""
        with self._changed:
            if not self._named and name:
                self._model = name

    def posted(self, groups: Sequence[tuple[int, str, bytes]]) -> None:
        """Groups were accepted: sequence number, name of the environment, body of each."""
        now, clock = time.time(), time.monotonic()
        with self._changed:
            if self._closed:
                return
            before = len(self._waiting)
            for seq, environment, body in groups:
                size = len(body) + GROUP_BYTES
                fits = self._waiting_bytes + size <= BURST_BYTES or not self._waiting_bytes
                if not fits or not self._allowance.take(size, clock):
                    self.left_out += 1
                    continue
                self._waiting.append(PostedGroup(seq, now, environment, body))
                self._waiting_bytes += size
            if (
                len(self._waiting) > before
            ):  # to wake the thread for nothing costs more than to keep a group
                self._changed.notify_all()

    def reported(self, seqs: Sequence[int], report: Any) -> None:
        """The trainer says what it computed for tokens of a batch of these groups, in the order in
        which it got them.
        """
        with self._changed:
            if self._closed or self._reports >= MAX_REPORTS:
                return
            self._waiting.append(_Report(tuple(seqs), report))
            self._reports += 1
            self._changed.notify_all()

    def another_run(self) -> None:
        """What comes from now on is of another run, and goes into an archive of its own: the lists
        are of one run. From any thread."""
        with self._changed:
            if not self._closed:
                self._waiting.append(_AnotherRun())
                self._changed.notify_all()

    def close(self) -> None:
        """Write what waits, within a deadline."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.warning(
                    "the archive of rollouts in %s is not written to its end after %g s",
                    self.folder,
                    CLOSE_SECONDS,
                )

    def stats(self) -> dict[str, int]:
        """Groups kept, and left out, since the service began."""
        return {"recorded": self.recorded, "left_out": self.left_out}

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while (some := self._next()) is not None:
                for run, of_one_run in enumerate(_by_run(some)):
                    if run:
                        self._begin_another()
                    if of_one_run:
                        self._keep(of_one_run)
                # By an event of its own: no post wakes it out of this.
                self._closing.wait(COMMIT_SECONDS)
                self._take_less_while_busy()
        except (ArchiveError, OSError) as error:
            logger.warning("rollouts are not kept for the page: %s", error)
        except Exception:
            logger.exception(
                "rollouts are not kept for the page any more: the archive in %s failed", self.folder
            )
        finally:
            with self._changed:
                self._closed = True
                self._waiting.clear()
            if self._archive is not None:
                self._archive.close()

    def _keep(self, some: Sequence[PostedGroup | _Report]) -> None:
        """Write what came; leave it out while the disk is full."""
        try:
            archive = self._opened()
        except (ArchiveFullError, OSError) as error:
            line = str(error) if isinstance(error, ArchiveFullError) else disk_refusal(error)
            if line is None:
                raise
            self._leave_out(some, line)
        else:
            self._write(archive, some)

    def _leave_out(self, some: Sequence[PostedGroup | _Report], reason: str) -> None:
        with self._changed:
            self.left_out += sum(isinstance(one, PostedGroup) for one in some)
        self._say(f"{len(some)} groups and reports are not kept for the page: {reason}")

    def _take_less_while_busy(self) -> None:
        used, since = self._used, self._since
        self._used, self._since = time.process_time(), time.monotonic()
        busy = self._used - used > BUSY_CORES * (self._since - since)
        with self._changed:
            self._allowance.per_second = self._per_second * (BUSY_SHARE if busy else 1.0)

    def _opened(self) -> Archive:
        """The archive of the present run, made when something comes: a service that gets nothing
        leaves nothing behind.
        """
        assert self.folder is not None
        if self._archive is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self._path or newest_archive(self.folder) or self.folder / ARCHIVE
            self._archive, self._loaded = Archive(path, self._most_bytes, self._most_rollouts), None
        with self._changed:
            model = self._model
        if model != self._loaded:
            self._loaded = model
            self._take_tokenizer(self._archive, model)
        return self._archive

    def _begin_another(self) -> None:
        assert self.folder is not None
        if self._archive is not None:
            self._archive.close()
            self._archive = None
        before = newest_archive(self.folder)
        self._path = None if before is None else archive_of_next_run(before)

    def _next(self) -> list[_Waiting] | None:
        """Return the waiting entries as soon as there are some; None after `close`."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait(1.0)
            some = list(self._waiting)
            self._waiting.clear()
            self._waiting_bytes = self._reports = 0
            return some or None

    def _take_tokenizer(self, archive: Archive, model: str | None) -> None:
        content = None if model is None else tokenizer_content(model)
        if content is None:
            logger.info(
                "no tokenizer of %s is here: the page shows messages, or token ids; --tokenizer names one",
                model,
            )
            return
        try:
            archive.text = TextOfTokens.of_file(content)
        except Exception as error:  # noqa: BLE001 - whatever another library raises: text is missing, no more
            logger.warning(
                "the tokenizer of %s cannot be read: %s", model, " ".join(str(error).split())
            )
            return
        try:
            archive.begin()
            archive.keep_tokenizer(content)
            archive.commit()
        except sqlite3.Error as error:
            archive.roll_back()
            self._loaded = None  # the next groups bring it once more
            self._say(
                f"the tokenizer of {model} is not kept for the page: {archive.path}: {error}; is the disk full?"
            )

    def _write(self, archive: Archive, some: Sequence[PostedGroup | _Report]) -> None:
        newest, added = 0, 0
        try:
            archive.begin()
            for one in some:
                if isinstance(one, _Report):
                    self._write_report(archive, one)
                    continue
                try:
                    newest = archive.add(one)
                    added += 1
                except (ValueError, TypeError, LookupError, OverflowError) as error:
                    self._say(
                        f"group {one.seq} is not kept for the page: {type(error).__name__}: {error}"
                    )
                    with self._changed:
                        self.left_out += 1
            archive.commit()
        except sqlite3.Error as error:
            archive.roll_back()
            self._leave_out(some, f"{archive.path}: {error}; is the disk full?")
            return
        with self._changed:
            self.recorded += added
        if added and self.told is not None:
            self.told(newest, self.recorded)

    def _write_report(self, archive: Archive, report: _Report) -> None:
        try:
            parity = parity_of(report.told)
            if parity is not None:
                archive.add_parity(parity, report.seqs)
            for number, place, trained in read_report(report.told):
                group = archive.group_of(report.seqs[number]) if number < len(report.seqs) else None
                if group is not None:
                    archive.add_trained(group, [(place, trained)])
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            self._say(
                f"what the trainer reports of tokens is passed over: {type(error).__name__}: {error}"
            )

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if self._said_at is None or now - self._said_at > _SAY_SECONDS:
            self._said_at = now
            logger.warning("%s", text)
