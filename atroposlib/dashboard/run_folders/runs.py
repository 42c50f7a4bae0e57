"""The runs that the page can show. They are files in folders; a run has figures, evaluations and
events, and a few runs are held in memory.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, FiniteFloat, ValidationError

from atroposlib.dashboard.events import (
    MAX_EVENTS,
    Event,
    event_of_evaluation,
    events_of_row,
    number,
    read_event,
    whole,
)
from atroposlib.dashboard.run_folders.columns import MAX_CELLS, Columns, Series
from atroposlib.utils.jsonl import JsonLinesFollower, NewRows, last_rows, parse_object

METRICS = re.compile(r"metrics(\.\d+)?\.jsonl")
"""The trainer's rows; an earlier run's in the same folder have a number."""
OBSERVED = "observed"
"""Folder of the rollout service's record of a run; NAME.observed beside a store elsewhere."""
DEPTH = 3
"""Depth to which folders below a named one are searched."""
MAX_RUNS = 500
_MAX_ENTRIES = 20_000
_MAX_OBJECT = 1 << 22
MAX_GROUP_BYTES = 64 << 20
_NO_GROUPS = frozenset({"metrics.jsonl", "evaluations.jsonl", "events.jsonl", "servers.jsonl"})
M = TypeVar("M", bound=BaseModel)
_PASSED_OVER = frozenset(
    {
        "checkpoints",
        "tensorboard",
        "wandb",
        "logs",
        "node_modules",
        "__pycache__",
        "env_checkpoints",
    }
)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one run.

    Attributes:
        id: names it in addresses: letters, digits and `._~-`.
        name: for people.
        folder: of the run.
        metrics: the trainer's rows; the file may not exist yet.
        evaluations: the environments' evaluations; the file may not exist yet.
        observed: folder of the rollout service's record; None if there is none.
        groups: files of rollouts that environments wrote.
        environment: rows of an environment's own, over every answer that was sampled; None if there
            are none.
    """

    id: str
    name: str
    folder: Path
    metrics: Path
    evaluations: Path
    observed: Path | None = None
    groups: tuple[Path, ...] = ()
    environment: Path | None = None

    def recorded(self, name: str) -> Path:
        """Return a file of the service's record. It does not exist if there is no record."""
        return (self.observed or self.metrics.with_suffix(".unrecorded")) / name


def find_runs(root: Path) -> list[RunFiles]:
    """Return the runs in a folder and below it, newest first, at most MAX_RUNS. A file of groups
    outside of them is a run of its own.

    A folder that cannot be read is skipped, and no link is followed.

    Args:
        root: the folder; or a file of groups.
    """
    if root.is_file():
        return [_of_groups(root, root.parent)] if holds_groups(root) else []
    observed: dict[Path, Path] = {}
    metrics: list[Path] = []
    groups: list[Path] = []
    for folder, names in _folders(root):
        for name in names:
            if METRICS.fullmatch(name):
                metrics.append(folder / name)
            elif name in ("run.json", "events.jsonl", "rollouts.db") and _is_observed(folder):
                observed[_run_of(folder)] = folder
            elif (
                name.endswith(".jsonl") and not _is_observed(folder) and holds_groups(folder / name)
            ):
                groups.append(folder / name)
    for folder in list(observed.values()):
        if log_dir := registered_log_dir(folder):
            observed[log_dir] = folder
    runs = [
        _of_metrics(path, root, _observed_beside(path.parent, root, observed))
        for path in metrics
        if path.parent.name != "environment"  # the rows of an environment have the same name
    ]
    shown = {run.observed for run in runs}
    runs += [
        _of_observed(folder, root)
        for folder in dict.fromkeys(observed.values())
        if folder not in shown
    ]
    shown_groups = {file for run in runs for file in run.groups}
    runs += [_of_groups(file, root) for file in groups if file not in shown_groups]
    return sorted(runs, key=changed, reverse=True)[:MAX_RUNS]


def holds_groups(path: Path) -> bool:
    """Return whether the first line of a file is a group: an object with scores, and tokens or
    messages.
    """
    try:
        return path.stat().st_size > 0 and _begins_with_group(path, path.stat().st_ino)
    except OSError:
        return False


@lru_cache(4096)
def _begins_with_group(path: Path, inode: int) -> bool:
    with path.open("rb") as file:
        group = parse_object(file.readline(MAX_GROUP_BYTES)) or {}
    return bool(group.get("scores") and (group.get("tokens") or group.get("messages")))


def groups_of(folder: Path) -> tuple[Path, ...]:
    """Return the files of groups of a run."""
    paths = [*sorted(folder.glob("*.jsonl")), *sorted((folder / "environment").glob("*.jsonl"))]
    return tuple(path for path in paths if path.name not in _NO_GROUPS and holds_groups(path))


def registered_log_dir(observed: Path) -> Path | None:
    """Return the folder of figures that a run's trainer registered; None if it is not on this
    machine, or was not registered.
    """
    log_dir = read_object(observed / "run.json").get("log_dir")
    if isinstance(log_dir, str) and log_dir.startswith("/") and Path(log_dir).is_dir():
        return Path(log_dir)
    return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a small file; empty if there is none, or it cannot be read."""
    try:
        with path.open("rb") as file:
            return parse_object(file.read(_MAX_OBJECT)) or {}
    except OSError:
        return {}


def read_model(path: Path, model: type[M]) -> M | None:
    """Return the record in a small file of JSON; None if there is none, or it cannot be read."""
    try:
        return model.model_validate(read_object(path))
    except ValidationError:
        return None


def changed(run: RunFiles) -> float:
    """Return the Unix time of the last change of the run's files; 0 if it has none."""
    paths = [run.metrics, *run.groups, run.recorded("stack.json"), run.recorded("run.json")]
    return max(map(modified, paths))


def modified(path: Path) -> float:
    """Return the Unix time of the last change of a file; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _folders(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Return the folders from `root` down, with the names of their files. No link is followed, and a
    folder that cannot be read is skipped.
    """
    entries = 0
    for path, folders, names in os.walk(root):
        folder = Path(path)
        entries += len(folders) + len(names)
        depth = len(folder.relative_to(root).parts)
        folders[:] = sorted(
            name
            for name in folders
            if depth < DEPTH and name not in _PASSED_OVER and not name.startswith(".")
        )
        yield folder, [name for name in sorted(names) if not (folder / name).is_symlink()]
        if entries > _MAX_ENTRIES:
            return


def _run_of(observed: Path) -> Path:
    """Return the folder of the run that a service's record belongs to."""
    return observed.parent if observed.name == OBSERVED else observed


def _is_observed(folder: Path) -> bool:
    return folder.name == OBSERVED or folder.name.endswith(f".{OBSERVED}")


def environment_rows(folder: Path) -> Path | None:
    """Return the rows of a run's environment, if it writes some beside the trainer's."""
    path = folder / "environment" / "metrics.jsonl"
    return path if path.is_file() else None


def _observed_beside(folder: Path, root: Path, observed: dict[Path, Path]) -> Path | None:
    """Return the service's folder of the run whose metrics are in `folder`: in it, or above it."""
    for place in (folder, *folder.parents):
        if place in observed:
            return observed[place]
        if place == root:
            break
    return None


def _of_metrics(path: Path, root: Path, observed: Path | None) -> RunFiles:
    number = path.name.removeprefix("metrics").removesuffix(".jsonl")
    folder = path.parent
    if folder.name == "trainer":
        folder = folder.parent
    name = _name(folder, root)
    if number:
        name += f" (earlier run {number[1:]})"
    evaluations = path.with_name(f"evaluations{number}.jsonl")
    run = RunFiles(_id(path, name), name, folder, path, evaluations)
    if number:
        return run
    return replace(
        run,
        observed=observed,
        groups=groups_of(folder),
        environment=environment_rows(folder),
    )


def _of_observed(folder: Path, root: Path) -> RunFiles:
    """A run whose trainer wrote elsewhere, or nothing."""
    run = _run_of(folder)
    name = _name(run, root).removesuffix(f".{OBSERVED}")
    figures = registered_log_dir(folder) or run
    return RunFiles(
        _id(folder, name),
        name,
        run,
        figures / "metrics.jsonl",
        figures / "evaluations.jsonl",
        folder,
    )


def _of_groups(file: Path, root: Path) -> RunFiles:
    """A file of rollouts alone."""
    name = _name(file.with_suffix(""), root)
    return RunFiles(
        _id(file, name),
        name,
        file.parent,
        file / "metrics.jsonl",
        file / "evaluations.jsonl",
        groups=(file,),
    )


def _name(folder: Path, root: Path) -> str:
    if folder == root or not folder.is_relative_to(root):
        return folder.resolve().name
    return folder.relative_to(root).as_posix()


def _id(path: Path, name: str) -> str:
    """Return a readable name that differs for every path."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[-40:] or "run"
    return f"{readable}~{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"


COUNTS = ("compared_tokens", "mismatched_tokens", "older_tokens")
"""Figures that are added up over the whole run."""
MAX_EVALUATIONS = 20_000
MAX_UPDATES = 500
"""Newest steps whose weight updates are kept."""
MAX_SENT_ROWS = 50
"""New rows that an open page gets whole. It requests further rows itself."""


_generations = itertools.count(1)


@dataclass(slots=True)
class Change:
    """News of a run since the last reading.

    Attributes:
        rows: of the trainer, with the environment's figures of their steps. The environment's
            figures of an earlier step come later as a row of their own.
        rewritten: everything that was read before is obsolete.
        events, evaluations: new ones.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    rewritten: bool = False
    events: list[Event] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self, run: Run) -> list[tuple[str, Any]]:
        """Return name and data of each server-sent event, for pages that show the run."""
        whole = not self.rewritten and len(self.rows) <= MAX_SENT_ROWS
        messages: list[tuple[str, Any]] = []
        if self.rewritten or self.rows:
            messages.append(("rows", run.extent() | {"new": self.rows if whole else None}))
        messages += [("evaluation", evaluation) for evaluation in self.evaluations]
        return messages + [("event", event.to_json()) for event in self.events]

    def __bool__(self) -> bool:
        return self.rewritten or bool(self.rows or self.events or self.evaluations)


class Run:
    """Reads one run's files. Every method may be called from any thread, and waits for the thread
    that reads.

    Args:
        files: of the run.
    """

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.generation = next(_generations)
        """A number that changes when earlier rows become obsolete; no two runs share one."""
        self._lock = threading.Lock()
        self._metrics = JsonLinesFollower(files.metrics)
        self._evaluations_file = JsonLinesFollower(files.evaluations)
        self._events_file = JsonLinesFollower(files.recorded("events.jsonl"))
        self._environment = files.environment and JsonLinesFollower(files.environment)
        self._columns, self._sampled = Columns(), Columns()
        # Apart from the others: a table of so few columns keeps every row of millions, and a sum
        # wants them all.
        self._counts = Columns()
        self._sampled_last: dict[str, Any] = {}
        self._sampled_new: dict[int, dict[str, Any]] = {}
        """Figures of the environment, by step, that no page has yet."""
        self._updates: deque[dict[str, Any]] = deque(maxlen=MAX_UPDATES)
        self._evaluations: dict[Any, dict[str, Any]] = {}
        self._events: dict[str, dict[str, Event]] = {"rows": {}, "evaluations": {}, "file": {}}
        self._left_out = 0

    def refresh(self) -> Change:
        """Read what is new."""
        with self._lock:
            change = Change()
            for new in self._metrics.new_rows():
                self._take_rows(new, change)
            for new in self._evaluations_file.new_rows():
                self._take_evaluations(new, change)
            if self._environment:
                for new in self._environment.new_rows():
                    self._take_environment(new)
                self._add_sampled(change)
            for new in self._events_file.new_rows():
                # A file that was full is begun again: its events stay.
                self._add("file", filter(None, map(read_event, new.rows)), change)
            if change.rewritten:
                self.generation = next(_generations)
            return change

    def _take_rows(self, new: NewRows, change: Change) -> None:
        if new.rewritten:
            self._columns.clear()
            self._counts.clear()
            self._updates.clear()
            self._events["rows"].clear()
            change.rows.clear()
        rows = new.rows
        cut = self._columns.extend(rows)
        self._counts.extend([{name: row.get(name) for name in ("step", *COUNTS)} for row in rows])
        if cut:
            first = min(step for row in rows if (step := whole(row.get("step"))) is not None)
            kept = [update for update in self._updates if (whole(update["step"]) or 0) < first]
            self._updates = deque(kept, MAX_UPDATES)
            events = self._events["rows"].values()
            self._events["rows"] = {one.id: one for one in events if (one.step or 0) < first}
        change.rewritten |= new.rewritten or cut
        self._updates.extend(map(update_of, rows[-MAX_UPDATES:]))
        change.rows = [*change.rows, *rows][-MAX_SENT_ROWS - 1 :]
        self._add("rows", [event for row in rows for event in events_of_row(row)], change)

    def _take_environment(self, new: NewRows) -> None:
        if new.rewritten:
            self._sampled.clear()
            self._sampled_new.clear()
        merged: list[dict[str, Any]] = []
        for row in new.rows:
            figures = {
                f"environment/{name[6:]}": row[name] for name in row if name.startswith("train/")
            }
            # It writes several rows at one step, and each figure in some of them.
            if self._sampled_last.get("step") != row.get("step"):
                self._sampled_last = {"step": row.get("step")}
            self._sampled_last = self._sampled_last | figures
            merged.append(self._sampled_last)
        self._sampled.extend(merged)
        newest = [*self._sampled_new.values(), *merged][-MAX_SENT_ROWS:]
        self._sampled_new = {
            step: row for row in newest if (step := whole(row["step"])) is not None
        }

    def _add_sampled(self, change: Change) -> None:
        """Add the environment's figures to the trainer's rows of the same steps.

        Either file may be ahead, so figures of an earlier step are a row of their own.
        """
        last = self._columns.last_step
        if last is None:
            return
        due: dict[int | None, dict[str, Any]] = {}
        for step in sorted(self._sampled_new):
            if step <= last:
                due[step] = self._sampled_new.pop(step)
        rows = [row | due.pop(whole(row.get("step")), {}) for row in change.rows]
        change.rows = [*due.values(), *rows]

    def _take_evaluations(self, new: NewRows, change: Change) -> None:
        if new.rewritten:
            self._evaluations.clear()
            self._events["evaluations"].clear()
            change.rewritten = True
        evaluations = [
            read_evaluation(row) for row in new.rows if isinstance(row.get("metrics"), dict)
        ]
        self._evaluations |= {(one["id"], one["time"], one["name"]): one for one in evaluations}
        change.evaluations = [*change.evaluations, *evaluations][-MAX_SENT_ROWS:]
        while len(self._evaluations) > MAX_EVALUATIONS:
            del self._evaluations[next(iter(self._evaluations))]
        self._add("evaluations", map(event_of_evaluation, evaluations), change)

    def _add(self, source: str, new: Iterable[Event], change: Change) -> None:
        events, kept = list(new), self._events[source]
        kept.update((event.id, event) for event in events)
        change.events = [*change.events, *events][-MAX_SENT_ROWS:]
        while len(kept) > MAX_EVENTS:
            del kept[next(iter(kept))]
            self._left_out += 1

    # ---- what the page shows ----

    @property
    def cells(self) -> int:
        """Number of figures in memory. It takes no lock, so it may be a little old."""
        return self._columns.cells + self._sampled.cells + self._counts.cells

    def names(self) -> list[str]:
        """Names of figures."""
        with self._lock:
            return [*self._columns.names, *self._sampled.names]

    def extent(self) -> dict[str, Any]:
        """Return the run's id and generation, its number of rows, and the step of the last one."""
        with self._lock:
            return {
                "run": self.files.id,
                "generation": self.generation,
                "rows": self._columns.rows,
                "last_step": self._columns.last_step,
            }

    def series(
        self, names: Sequence[str], points: int, first: float = -math.inf, last: float = math.inf
    ) -> Series:
        """Return points of figures; see Columns.series."""
        with self._lock:
            more = self._columns.beside(self._sampled, names)
            return self._columns.series(names, points, first, last, more)

    def newest(self, names: Sequence[str]) -> dict[str, float | None]:
        """Return the last known figure of each name: the last point of a chart may stand for several
        rows.
        """
        with self._lock:
            return {
                name: (self._sampled if name in self._sampled.names else self._columns).last(name)
                for name in names
            }

    def counts(self) -> list[float] | None:
        """Return the sums of COUNTS over all rows; None without any, or if rows were removed.

        Rows without older tokens count as rows that have none.
        """
        with self._lock:
            compared = self._counts.totals(COUNTS[:2])
            return compared and compared + (self._counts.totals(COUNTS[2:]) or [0])

    def updates(self) -> list[dict[str, Any]]:
        """Return the weight updates of the newest steps, oldest first; see update_of."""
        with self._lock:
            return list(self._updates)

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the environments' evaluations, oldest first."""
        with self._lock:
            return list(self._evaluations.values())

    def events(self) -> tuple[list[Event], int]:
        """Return the events in order of time, as far as it is known, and the number of older events
        left out.
        """
        with self._lock:
            merged = [event for events in self._events.values() for event in events.values()]
            merged.sort(key=lambda one: (-1 if one.step is None else one.step, one.time or 0.0))
            return merged[-MAX_EVENTS:], self._left_out + max(0, len(merged) - MAX_EVENTS)


def read_evaluation(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of evaluations with the metrics that are numbers."""
    numbers = {str(name)[:200]: number(metric) for name, metric in row["metrics"].items()}
    return {
        "id": whole(row.get("id")), "time": number(row.get("time")), "step": whole(row.get("step")),
        "name": str(row.get("name", "?"))[:200], "weight_version": whole(row.get("weight_version")),
        "weight_epoch": whole(row.get("weight_epoch")),
        "metrics": {name: value for name, value in numbers.items() if value is not None},
    }  # fmt: skip


def update_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's figures of the weight update: `sync` has the seconds of the trainer's phases,
    `server` of the servers' phases.
    """
    return {
        "step": row.get("step"), "checksum": row.get("checksum"), "weights_sha": row.get("weights_sha"),
        "seconds_sync": row.get("seconds_sync"), "bytes_moved": row.get("bytes_moved"),
        **{name: row.get(name) for name in COUNTS},
        **{
            of: {name[len(of) + 1 :]: value for name, value in row.items() if name.startswith(f"{of}/")}
            for of in ("sync", "server")
        },
    }  # fmt: skip


class _RunRecord(BaseModel):
    """Fields of run.json, which a trainer's registration has filled."""

    model: str | None = None
    num_steps: int | None = None
    began: FiniteFloat | None = None
    ended: FiniteFloat | None = None


def glance(files: RunFiles) -> dict[str, Any]:
    """Return a run's row of GET /ui/api/runs, from the ends of its files: there may be hundreds."""
    rows = [row for row in last_rows(files.metrics) if whole(row.get("step")) is not None]
    rewards = [reward for row in rows if (reward := number(row.get("reward_mean"))) is not None]
    run = read_model(files.recorded("run.json"), _RunRecord) or _RunRecord()
    return {
        "model": run.model,
        "of_steps": run.num_steps,
        "began": run.began,
        "ended": run.ended,
        "state": "unknown" if run.ended is None else "ended",
        "updated": changed(files) or None,
        "steps": next((row["step"] for row in reversed(rows)), 0),
        "reward_last": next(reversed(rewards), None),
        "evaluated": bool(last_rows(files.evaluations)),
    }


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
        live: the files of the service's own run, requested each time; None where there is no
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
                f"there is no run {run[:100]!r} in {where}; /ui/history lists the runs"
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
        if is_new:  # an open page knows other rows of it
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
            seconds: after which no more is read. The next call reads the rest.
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
    """The rewards of one run. All of its rows have to be read once.

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
