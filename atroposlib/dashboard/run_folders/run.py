"""One run as the page shows it: its figures, evaluations and events, read again for each request."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from atroposlib.dashboard.run_folders.folder import RunFiles, changed, read_object
from atroposlib.utils.jsonl import JsonLinesFollower, last_rows

logger = logging.getLogger(__name__)

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
        self._events_file = (
            JsonLinesFollower(files.observed / "events.jsonl") if files.observed else None
        )
        self._environment = JsonLinesFollower(files.environment) if files.environment else None
        self._columns, self._sampled = Columns(), Columns()
        # Apart from the others: a table of so few columns keeps every row of millions, and a sum
        # wants them all.
        self._counts = Columns()
        self._sampled_last: dict[str, Any] = {}
        self._beside: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._untold: set[int] = set()
        self._updates: deque[dict[str, Any]] = deque(maxlen=MAX_UPDATES)
        self._evaluations: OrderedDict[Any, dict[str, Any]] = OrderedDict()
        self._events: dict[str, OrderedDict[str, Event]] = {
            name: OrderedDict() for name in ("rows", "evaluations", "file")
        }
        self._left_out = 0
        self._complained: set[str] = set()

    def refresh(self) -> Change:
        """Read what is new."""
        with self._lock:
            change = Change()
            self._read(self._metrics, change, self._take_rows)
            self._read(self._evaluations_file, change, self._take_evaluations)
            if self._environment is not None:
                self._read(self._environment, change, self._take_environment)
                self._tell_beside(change)
            if self._events_file is not None:
                self._read(self._events_file, change, self._take_events)
            if change.rewritten:
                self.generation = next(_generations)
            return change

    def _read(self, file: JsonLinesFollower, change: Change, take: Any) -> None:
        more = True
        while more:
            try:
                news = file.read_rows()
            except OSError as error:
                if str(file.path) not in self._complained:
                    self._complained.add(str(file.path))
                    logger.warning(
                        "the page cannot read %s: %s; let this user read it",
                        file.path,
                        error.strerror or error,
                    )
                return
            more = news.more
            take(news.rows, news.rewritten, change)

    def _take_rows(self, rows: list[dict[str, Any]], rewritten: bool, change: Change) -> None:
        if rewritten:
            self._columns.clear()
            self._counts.clear()
            self._updates.clear()
            self._events["rows"].clear()
            change.rows.clear()
        cut = self._columns.extend(rows)
        self._counts.extend([{name: row.get(name) for name in ("step", *COUNTS)} for row in rows])
        if cut:
            first = min(step for row in rows if (step := whole(row.get("step"))) is not None)
            kept = [update for update in self._updates if (whole(update["step"]) or 0) < first]
            self._updates = deque(kept, MAX_UPDATES)
            self._events["rows"] = OrderedDict(
                (event.id, event)
                for event in self._events["rows"].values()
                if (event.step or 0) < first
            )
        change.rewritten |= rewritten or cut
        self._updates.extend(map(update_of, rows[-MAX_UPDATES:]))
        change.rows = [*change.rows, *rows][-MAX_SENT_ROWS - 1 :]
        self._add("rows", [event for row in rows for event in events_of_row(row)], change)

    def _take_environment(
        self, rows: list[dict[str, Any]], rewritten: bool, change: Change
    ) -> None:
        if rewritten:
            self._sampled.clear()
            self._beside.clear()
            self._untold.clear()
        merged: list[dict[str, Any]] = []
        for row in rows:
            figures = {
                f"environment/{name[6:]}": row[name] for name in row if name.startswith("train/")
            }
            # It writes several rows at one step, and each figure in some of them.
            if self._sampled_last.get("step") != row.get("step"):
                self._sampled_last = {}
            self._sampled_last = self._sampled_last | {"step": row.get("step")} | figures
            merged.append(self._sampled_last)
        self._sampled.extend(merged)
        for row in merged:
            if (step := whole(row["step"])) is not None:
                self._beside[step] = row
                self._untold.add(step)
        while len(self._beside) > MAX_SENT_ROWS:
            self._untold.discard(self._beside.popitem(last=False)[0])

    def _tell_beside(self, change: Change) -> None:
        """Add the environment's figures to the trainer's rows of the same steps.

        Either file may be ahead, so figures of an earlier step are a row of their own.
        """
        new = [whole(row.get("step")) for row in change.rows]
        last = self._columns.last_step
        late = [
            step
            for step in sorted(self._untold.difference(new))
            if last is not None and step <= last
        ]
        rows = [
            row | self._beside.get(step or 0, {})
            for step, row in zip(new, change.rows, strict=True)
        ]
        change.rows = [*(self._beside[step] for step in late), *rows]
        self._untold.difference_update(new, late)

    def _take_evaluations(
        self, rows: list[dict[str, Any]], rewritten: bool, change: Change
    ) -> None:
        if rewritten:
            self._evaluations.clear()
            self._events["evaluations"].clear()
            change.rewritten = True
        for row in rows:
            metrics = row.get("metrics")
            if not isinstance(metrics, dict):
                continue
            numbers = {
                str(name)[:200]: value
                for name, metric in metrics.items()
                if (value := number(metric)) is not None
            }
            evaluation = {
                "id": whole(row.get("id")), "time": number(row.get("time")), "step": whole(row.get("step")),
                "name": str(row.get("name", "?"))[:200], "weight_version": whole(row.get("weight_version")),
                "weight_epoch": whole(row.get("weight_epoch")), "metrics": numbers,
            }  # fmt: skip
            self._evaluations[evaluation["id"], evaluation["time"], evaluation["name"]] = evaluation
            change.evaluations = [*change.evaluations, evaluation][-MAX_SENT_ROWS:]
        while len(self._evaluations) > MAX_EVALUATIONS:
            self._evaluations.popitem(last=False)
        self._add(
            "evaluations",
            [event for row in rows if (event := event_of_evaluation(row)) is not None],
            change,
        )

    def _take_events(self, rows: list[dict[str, Any]], rewritten: bool, change: Change) -> None:
        # A file that was full is begun again: its events stay.
        self._add("file", [event for row in rows if (event := read_event(row)) is not None], change)

    def _add(self, source: str, events: Sequence[Event], change: Change) -> None:
        kept = self._events[source]
        kept.update((event.id, event) for event in events)
        change.events = [*change.events, *events][-MAX_SENT_ROWS:]
        while len(kept) > MAX_EVENTS:
            kept.popitem(last=False)
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
        self, names: Sequence[str], points: int, first: int | None = None, last: int | None = None
    ) -> Series:
        """Return points of figures; see Columns.series."""
        with self._lock:
            more = None
            if set(names) & set(self._sampled.names):
                more = self._columns.beside(self._sampled)
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
            merged.sort(
                key=lambda event: (event.step if event.step is not None else -1, event.time or 0.0)
            )
            return merged[-MAX_EVENTS:], self._left_out + max(0, len(merged) - MAX_EVENTS)


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


def glance(files: RunFiles) -> dict[str, Any]:
    """Return a run's row of GET /ui/api/runs, from the ends of its files: there may be hundreds."""
    rows = [row for row in last_rows(files.metrics) if whole(row.get("step")) is not None]
    rewards = [reward for row in rows if (reward := number(row.get("reward_mean"))) is not None]
    run: Mapping[str, Any] = {}
    if files.observed is not None:
        run = read_object(files.observed / "run.json")
    ended, model = number(run.get("ended")), run.get("model")
    return {
        "model": model if isinstance(model, str) else None,
        "of_steps": whole(run.get("num_steps")),
        "began": number(run.get("began")),
        "ended": ended,
        "state": "unknown" if ended is None else "ended",
        "updated": changed(files) or None,
        "steps": rows[-1]["step"] if rows else 0,
        "reward_last": rewards[-1] if rewards else None,
        "evaluated": bool(last_rows(files.evaluations)),
    }
