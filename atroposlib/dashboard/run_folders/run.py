"""One run as the page shows it: its figures, evaluations and events, read again for each request."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, FiniteFloat

from atroposlib.dashboard.events import (
    MAX_EVENTS,
    Event,
    event_of_evaluation,
    events_of_row,
    number,
    read_event,
    whole,
)
from atroposlib.dashboard.run_folders.columns import Columns, Series
from atroposlib.dashboard.run_folders.folder import RunFiles, changed, read_model
from atroposlib.utils.jsonl import JsonLinesFollower, NewRows, last_rows

COUNTS = ("compared_tokens", "mismatched_tokens")
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
        """Return the sums of COUNTS over all rows; None without any, or if rows were removed."""
        with self._lock:
            return self._counts.totals(COUNTS)

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
