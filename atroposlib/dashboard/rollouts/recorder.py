"""Writes the archive while the service runs, in a thread of its own, so that no post and no trainer
ever waits for it.

The archive's share of the service's time is bounded. Groups that come faster are left out, whole
groups at a time, and counted.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
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
from atroposlib.dashboard.rollouts.rollout_stats import TrainerReport
from atroposlib.dashboard.rollouts.text import tokenizer_content
from atroposlib.utils.files import disk_refusal
from atroposlib.web.middleware import fault_of

logger = logging.getLogger(__name__)

BYTES_PER_SECOND = 1 << 20
"""Bytes per second that are kept in the long run: a few hundredths of a core."""
BUSY_CORES, BUSY_SHARE = 1 / 3, 0.25
"""While the service uses more than so many cores, this share of them: it has other work to do."""
BURST_BYTES = 8 << 20
"""Bytes that are kept at once after a pause, and that may wait for the disk."""
GROUP_BYTES = 32 << 10
"""Bytes that a group counts as besides its body: the smallest takes half a millisecond too."""
MAX_REPORTS = 64
COMMIT_SECONDS = 0.5
"""Groups that come within it are one transaction."""
CLOSE_SECONDS = 10.0
_WARN_SECONDS = 60.0


@dataclass(frozen=True)
class _Report:
    seqs: tuple[int, ...]
    report: Any


_Entry = PostedGroup | _Report


class Allowance:
    """A number of bytes that may be taken: it grows with time, up to a bound.

    Args:
        per_second, most: bytes.
        now: in seconds of a clock that never goes back.
    """

    def __init__(self, per_second: float, most: float, now: float) -> None:
        self.per_second, self.most = per_second, most
        self._left, self._since = float(most), now

    def take(self, size: int, now: float) -> bool:
        """Take so many bytes if they are there.

        More bytes than the bound may be taken when all is saved up.
        """
        self._left = min(self.most, self._left + (now - self._since) * self.per_second)
        self._since = now
        if self._left < min(size, self.most):
            return False
        self._left -= size
        return True


class RolloutRecorder:
    """Keeps rollouts as the service gets them, and what the trainer reports of them. It neither
    waits nor raises.

    Args:
        folder: of the archives, one for each run that is kept there; None keeps nothing.
        most_bytes, most_rollouts: see Archive.
        tokenizer: folder or name of the sampled model's tokenizer; None for that of the model that
            the trainer names.
        on_kept: called with the id of the newest group and the number of groups after each
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
        on_kept: Callable[[int, int], None] = lambda newest, groups: None,
        bytes_per_second: float = BYTES_PER_SECOND,
    ) -> None:
        self.folder, self._most_bytes, self._most_rollouts = folder, most_bytes, most_rollouts
        self._on_kept = on_kept
        self.recorded = self.left_out = 0
        self._allowance = Allowance(bytes_per_second, BURST_BYTES, time.monotonic())
        self._per_second = bytes_per_second
        self._closing = threading.Event()
        self._changed = threading.Condition()
        """Guards the following attributes."""
        self._waiting: list[tuple[int, _Entry]] = []
        """Number of the run, and the entry."""
        self._waiting_bytes = self._reports = self._run_number = 0
        self._model = tokenizer
        self._has_tokenizer = tokenizer is not None
        self._closed = folder is None
        self._warned_at = -math.inf
        # Used by the thread alone:
        self._used, self._since = time.process_time(), time.monotonic()
        self._archive: Archive | None = None
        self._path: Path | None = None
        self._written_run = 0
        self._loaded: str | None = None
        self._thread: threading.Thread | None = None
        if folder is not None:
            self._thread = threading.Thread(target=self._run, name="rollout-archive", daemon=True)
            self._thread.start()

    # ---- on the service's event loop ----

    def model(self, name: str | None) -> None:
        """Take the name of the trainer's model, whose tokenizer makes text of tokens."""
        with self._changed:
            if not self._has_tokenizer and name:
                self._model = name

    def posted(self, groups: Sequence[tuple[int, str, bytes]]) -> None:
        """Take accepted groups: sequence number, name of the environment, body of each."""
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
                self._waiting.append((self._run_number, PostedGroup(seq, now, environment, body)))
                self._waiting_bytes += size
            # To wake the thread for nothing costs more than to keep a group.
            if len(self._waiting) > before:
                self._changed.notify_all()

    def reported(self, seqs: Sequence[int], report: Any) -> None:
        """Take the trainer's numbers for tokens of a batch of these groups, in the order in which it
        got them.
        """
        with self._changed:
            if self._closed or self._reports >= MAX_REPORTS:
                return
            self._waiting.append((self._run_number, _Report(tuple(seqs), report)))
            self._reports += 1
            self._changed.notify_all()

    def another_run(self) -> None:
        """Keep later groups in an archive of their own: the lists are of one run. Any thread may
        call it.
        """
        with self._changed:
            self._run_number += 1

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
            while waiting := self._next():
                for number, entries in groupby(waiting, key=itemgetter(0)):
                    self._keep(number, [entry for _, entry in entries])
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

    def _next(self) -> list[tuple[int, _Entry]]:
        """Return the waiting entries as soon as there are some; none after `close`."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait(1.0)
            waiting, self._waiting = self._waiting, []
            self._waiting_bytes = self._reports = 0
            return waiting

    def _keep(self, run: int, entries: Sequence[_Entry]) -> None:
        """Write entries of a run; leave them out while the disk is full."""
        try:
            archive = self._opened(run)
        except ArchiveFullError as error:
            self._leave_out(entries, str(error))
        except OSError as error:
            refusal = disk_refusal(error)
            if refusal is None:
                raise
            self._leave_out(entries, refusal)
        else:
            self._write(archive, entries)

    def _leave_out(self, entries: Sequence[_Entry], reason: str) -> None:
        with self._changed:
            self.left_out += sum(isinstance(entry, PostedGroup) for entry in entries)
        self._warn(f"{len(entries)} groups and reports are not kept for the page: {reason}")

    def _take_less_while_busy(self) -> None:
        used, since = self._used, self._since
        self._used, self._since = time.process_time(), time.monotonic()
        per_second = self._per_second
        if self._used - used > BUSY_CORES * (self._since - since):
            per_second *= BUSY_SHARE
        with self._changed:
            self._allowance.per_second = per_second

    def _opened(self, run: int) -> Archive:
        """Return the archive of a run, made when something comes: a service that gets nothing
        leaves nothing behind.
        """
        assert self.folder is not None
        if run != self._written_run:
            self._begin_another()
            self._written_run = run
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
        self._path = before and archive_of_next_run(before)

    def _take_tokenizer(self, archive: Archive, model: str | None) -> None:
        content = model and tokenizer_content(model)
        if not content:
            logger.info(
                "no tokenizer of %s is here: the page shows messages, or token ids; --tokenizer names one",
                model,
            )
            return
        try:
            with archive.transaction():
                archive.keep_tokenizer(content)
        except sqlite3.Error as error:
            self._loaded = None  # the next groups bring it once more
            self._warn(
                f"the tokenizer of {model} is not kept for the page: {archive.path}: {error}; is the disk full?"
            )
        except Exception as error:  # noqa: BLE001 - whatever another library raises: text is missing, no more
            reason = " ".join(str(error).split())
            logger.warning("the tokenizer of %s cannot be read: %s", model, reason)

    def _write(self, archive: Archive, entries: Sequence[_Entry]) -> None:
        newest, added, refused = 0, 0, 0
        try:
            with archive.transaction():
                for entry in entries:
                    try:
                        if isinstance(entry, _Report):
                            _write_report(archive, entry)
                        else:
                            newest = archive.add(entry)
                            added += 1
                    except (ValueError, TypeError, LookupError, OverflowError) as error:
                        refused += isinstance(entry, PostedGroup)
                        self._warn_of(entry, error)
        except (sqlite3.Error, ArchiveError) as error:
            self._leave_out(entries, f"{archive.path}: {error}; is the disk full?")
            return
        with self._changed:
            self.recorded += added
            self.left_out += refused
        if added:
            self._on_kept(newest, self.recorded)

    def _warn_of(self, entry: _Entry, error: Exception) -> None:
        refused = "the trainer's report of tokens is not kept for the page"
        if isinstance(entry, PostedGroup):
            refused = f"group {entry.seq} is not kept for the page"
        self._warn(f"{refused}: {fault_of(error)}")

    def _warn(self, text: str) -> None:
        now = time.monotonic()
        if now - self._warned_at > _WARN_SECONDS:
            self._warned_at = now
            logger.warning("%s", text)


def _write_report(archive: Archive, entry: _Report) -> None:
    report = TrainerReport.model_validate(entry.report)
    if report.parity is not None:
        archive.add_parity(report.parity, entry.seqs)
    for number, place, trained in report.trained_tokens():
        group = archive.group_of(entry.seqs[number]) if number < len(entry.seqs) else None
        if group is not None:
            archive.add_trained(group, [(place, trained)])
