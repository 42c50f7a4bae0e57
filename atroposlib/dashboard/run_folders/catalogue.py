"""Every run that the page can show, and the few that are held in memory."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atroposlib.dashboard.run_folders.columns import MAX_CELLS, Columns
from atroposlib.dashboard.run_folders.folder import RunFiles, changed, find_runs
from atroposlib.dashboard.run_folders.run import Change, Run, glance
from atroposlib.utils.jsonl import JsonLinesFollower

LIVE = "live"
"""Names the run of the service that serves the page."""
MAX_OPEN = 8
"""Runs in memory; fewer where they are so long that together they would have more than MAX_CELLS
figures."""
LOOK_SECONDS = 5.0
"""Largest age of the list of runs, in seconds."""
QUIET_SECONDS = 600.0
"""A run with no new row for this many seconds is no longer shown as running."""
SERVED_QUIET_SECONDS = 60.0
"""The same for a run whose service writes stack.json: it does so every ten seconds."""

REWARD = "reward_mean"


class UnknownRunError(Exception):
    """No run has this name."""


class RunCatalogue:
    """Finds runs in folders, and opens the requested ones. Any method may be called from any thread;
    none is quick.

    Args:
        roots: folders of runs.
        live: the files of the service's own run, asked anew each time; None where there is no
            service.
        on_change: called with a run and what is new of it, in whichever thread has read it.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        live: Callable[[], RunFiles | None] = lambda: None,
        on_change: Callable[[Run, Change], None] = lambda run, change: None,
    ) -> None:
        self.roots, self._on_change = roots, on_change
        self._live = live
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, Path, Path | None, Path | None], Run] = OrderedDict()
        self._listed: list[RunFiles] = []
        self._looked = -LOOK_SECONDS
        self._glances: dict[str, _Glance] = {}
        self._rewards: dict[Path, _Rewards] = {}
        self._reading = threading.Lock()

    def list_runs(self) -> list[RunFiles]:
        """Return the runs, the live one first and the others newest first."""
        live = self._live()
        with self._lock:
            if time.monotonic() - self._looked >= LOOK_SECONDS:
                runs = {run.metrics: run for root in self.roots for run in find_runs(root)}
                self._listed = sorted(runs.values(), key=lambda run: -changed(run))
                self._looked = time.monotonic()
            if live is None:
                return list(self._listed)
            return [live, *(run for run in self._listed if run.metrics != live.metrics)]

    def default(self) -> str:
        """Return the run that a page shows by default; empty if there is none."""
        try:
            return self.files("").id
        except UnknownRunError:
            return ""

    def files(self, run: str) -> RunFiles:
        """Return the files of a run.

        Args:
            run: its id; empty for the default one.

        Raises:
            UnknownRunError: there is no such run.
        """
        live = self._live()
        if live is not None and run in ("", live.id):  # it never waits for a look into folders
            return live
        matching = [files for files in self.list_runs() if run in ("", files.id)]
        if not matching:
            where = ", ".join(map(str, self.roots)) or "no folder"
            raise UnknownRunError(
                f"there is no run {run[:100]!r} in {where}; /ui/history lists those that are there"
            )
        return matching[0]

    def get(self, run: str) -> Run:
        """Return a run, up to date.

        Raises:
            UnknownRunError: there is no such run.
        """
        files = self.files(run)
        paths = (files.id, files.metrics, files.observed, files.environment)
        with self._lock:
            is_new = paths not in self._open
            opened = self._open.setdefault(paths, Run(files))
            self._open.move_to_end(paths)
        change = opened.refresh()
        with self._lock:
            while len(self._open) > MAX_OPEN or (len(self._open) > 1 and self._cells() > MAX_CELLS):
                self._open.popitem(last=False)
        if is_new:  # to a page that is open, its rows are others than those that it knows
            change = Change(rewritten=True)
        if change:
            self._on_change(opened, change)
        return opened

    def _cells(self) -> int:
        return sum(run.cells for run in self._open.values())

    def best_rewards(self, seconds: float) -> dict[str, dict[str, Any]]:
        """The best reward of each run by its id: `reward_best`, `best_step`, and whether all of its
        rows were read (`is_read`).

        Args:
            seconds: after which no more is read. What is missing then is read when somebody asks
                again.
        """
        until = time.monotonic() + seconds
        runs = self.list_runs()
        with self._reading:
            self._rewards = {
                files.metrics: self._rewards.get(files.metrics) or _Rewards(files.metrics)
                for files in runs
            }
            return {files.id: self._rewards[files.metrics].best(until) for files in runs}

    def summaries(self) -> list[dict[str, Any]]:
        """Return all runs, for the page of the history."""
        runs = self.list_runs()
        self._glances = {run.id: self._glances.get(run.id) or _Glance() for run in runs}
        listed = []
        for files in runs:
            seen, live = self._glances[files.id], files.id == LIVE
            seen.refresh(files)
            identity = {"id": files.id, "name": files.name, "folder": str(files.folder)}
            row = identity | {"live": live} | seen.summary
            if row["state"] == "unknown" and (live or seen.is_fresh(quiet_seconds(files))):
                row["state"] = "running"
            listed.append(row)
        return listed


def quiet_seconds(files: RunFiles) -> float:
    """Return for how long a run's files may stay unchanged while it runs."""
    if files.recorded("stack.json").exists():
        return SERVED_QUIET_SECONDS
    return QUIET_SECONDS


@dataclass(slots=True)
class _Glance:
    """A run as it was seen last."""

    stamp: float = -1.0
    """When its files changed last, by the clock of the machine that writes them."""
    summary: dict[str, Any] = field(default_factory=dict)
    looked: float = -math.inf
    """When this process looked at them last, in seconds of `time.monotonic`."""
    grew: float | None = None
    """When it saw them change, shortly after a look before; None if it has not."""

    def refresh(self, files: RunFiles) -> None:
        """Read a run that has changed since the last look."""
        stamp, now = changed(files), time.monotonic()
        if stamp != self.stamp:
            self.grew = now if now - self.looked < quiet_seconds(files) else None
            self.stamp, self.summary = stamp, glance(files)
        self.looked = now

    def is_fresh(self, seconds: float) -> bool:
        """Return True if the files changed within so many seconds. Without a change that this
        process saw, the clocks decide."""
        if self.grew is not None:
            return time.monotonic() - self.grew < seconds
        return abs(time.time() - self.stamp) < seconds


class _Rewards:
    """The rewards of one run, of which all rows have to be read once.

    Not for several threads at a time.
    """

    def __init__(self, metrics: Path) -> None:
        self._file, self._columns = JsonLinesFollower(metrics), Columns()
        self._is_read = False

    def best(self, until: float) -> dict[str, Any]:
        """See RunCatalogue.best_rewards.

        Args:
            until: seconds of the monotonic clock at which no more is read.
        """
        if time.monotonic() < until:
            self._is_read = True
            for new in self._file.new_rows():
                if new.rewritten:
                    self._columns.clear()
                self._columns.extend(
                    [{name: row.get(name) for name in ("step", REWARD)} for row in new.rows]
                )
                if time.monotonic() >= until:
                    self._is_read = not new.more
                    break
        value, step = self._columns.peak(REWARD) or (None, None)
        return {"reward_best": value, "best_step": step, "is_read": self._is_read}
