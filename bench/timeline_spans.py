"""Timelines that processes wrote (see vllm_patching/protocol/timeline.py): read, summed up, made a
Chrome trace of.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROLES = ("trainer", "parameter-server", "reference", "generator")
"""In this order they are shown; others come behind."""
ASIDE = ("update", "pull")
"""Kinds of work that a process has done for it while it is at another."""


@dataclass(frozen=True)
class Span:
    """One activity in a stretch of time; `begin` and `end` are Unix nanoseconds, `facts` the other
    fields of its line.
    """

    what: str
    begin: int
    end: int
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Process:
    """The spans of the processes of one role and name (a restarted one goes on in the same file),
    by begin.
    """

    role: str
    name: str
    spans: tuple[Span, ...]


def read_folder(folder: Path) -> tuple[list[Process], int]:
    """Every timeline of a folder, and how many lines were none: a process that is killed may leave
    half a line.

    Raises:
        ValueError: it holds not a single timeline.
    """
    files = sorted(folder.glob("timeline-*.jsonl"))
    if not files:
        raise ValueError(
            f"no timeline-*.jsonl in {folder}: start the processes with LOCKSTEP_TIMELINE={folder}"
        )
    found: dict[tuple[str, str], list[Span]] = {}
    unreadable = 0
    for path in files:
        spans: list[Span] | None = None
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                content = json.loads(line)
                if "role" in content:
                    spans = found.setdefault((str(content["role"]), str(content["name"])), [])
                elif spans is not None:
                    what, begin, end = (
                        str(content.pop("what")),
                        int(content.pop("begin")),
                        int(content.pop("end")),
                    )
                    spans.append(Span(what, begin, max(begin, end), content))
                else:
                    unreadable += 1
            except (ValueError, KeyError, TypeError):
                unreadable += 1
    processes = [
        Process(role, name, tuple(sorted(spans, key=lambda s: (s.begin, s.end))))
        for (role, name), spans in found.items()
    ]
    return sorted(
        processes,
        key=lambda p: (ROLES.index(p.role) if p.role in ROLES else len(ROLES), p.role, p.name),
    ), unreadable


def extent(processes: Iterable[Process]) -> tuple[int, int]:
    """From the first begin to the last end. Raises ValueError without a span."""
    spans = [span for process in processes for span in process.spans]
    if not spans:
        raise ValueError("the timelines hold no span yet")
    return min(span.begin for span in spans), max(span.end for span in spans)


def within(process: Process, begin: int, end: int) -> Process:
    """Return the spans between two moments, cut off at them."""
    cut = (
        replace(span, begin=max(span.begin, begin), end=min(span.end, end))
        for span in process.spans
        if span.begin < end and begin < span.end
    )
    return replace(process, spans=tuple(cut))


def merged(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """Spans of one kind that touch, or lie no further apart than `gap` nanoseconds, made one; by
    begin.
    """
    last: dict[str, Span] = {}
    done: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.begin, s.end)):
        before = last.get(span.what)
        if before is not None and span.begin - before.end <= gap:
            last[span.what] = replace(before, end=max(before.end, span.end))
        else:
            done += [before] if before is not None else []
            last[span.what] = span
    return sorted([*done, *last.values()], key=lambda s: (s.begin, s.end))


def seconds_by_kind(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of each kind; what lies on top of each other counts once."""
    found: dict[str, float] = {}
    for span in merged(spans):
        found[span.what] = found.get(span.what, 0.0) + (span.end - span.begin) / 1e9
    return found


def shares(process: Process, begin: int, end: int) -> dict[str, float]:
    """Share of the time between two moments that a process was at each kind of work; 0 to 1."""
    seconds = seconds_by_kind(within(process, begin, end).spans)
    return {what: value * 1e9 / (end - begin) for what, value in seconds.items() if end > begin}


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans laid into few lanes, none overlapping another in its lane; what goes on beside the work
    itself comes last.
    """
    work, aside = list[Span](), list[Span]()
    for span in sorted(spans, key=lambda s: (s.begin, s.end)):
        (aside if span.what in ASIDE else work).append(span)
    return [*_laid(work), *_laid(aside)]


def _laid(spans: Sequence[Span]) -> list[list[Span]]:
    """As few lanes as will do; spans come by begin."""
    found: list[list[Span]] = []
    for span in spans:
        free = next((lane for lane in found if lane[-1].end <= span.begin), None)
        if free is None:
            found.append([span])
        else:
            free.append(span)
    return found


def chrome_trace(processes: Sequence[Process]) -> dict[str, Any]:
    """The trace that chrome://tracing and Perfetto open. It has a process for each of ours, and a
    thread for each lane. Each span is a complete event (`ph: X`, microseconds since the first
    span).

    Raises:
        ValueError: the list of spans is empty.
    """
    start, _ = extent(processes)
    events: list[dict[str, Any]] = []
    for pid, process in enumerate(processes, start=1):
        events.append(_metadata("process_name", pid, 0, name=f"{process.role} {process.name}"))
        events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        for tid, lane in enumerate(lanes(process.spans), start=1):
            events.append(
                _metadata(
                    "thread_name",
                    pid,
                    tid,
                    name="works" if tid == 1 else f"at the same time {tid - 1}",
                )
            )
            events += [
                {
                    "name": span.what,
                    "cat": process.role,
                    "ph": "X",
                    "ts": (span.begin - start) / 1e3,
                    "dur": (span.end - span.begin) / 1e3,
                    "pid": pid,
                    "tid": tid,
                    "args": dict(span.facts),
                }
                for span in lane
            ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"begins_unix_ns": str(start)},
    }


def check_trace(trace: Mapping[str, Any]) -> None:
    """Check a trace against the trace event format: viewers need these fields, and report none that
    is missing.

    Raises:
        ValueError: an event lacks a field, has a time that is none, or overlaps another of its
            thread, which a viewer drops.
    """
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise ValueError("traceEvents is not a list")
    ends: dict[tuple[int, int], float] = {}
    for number, event in enumerate(events):
        told = f"event {number}"
        if not isinstance(event.get("name"), str) or not event["name"]:
            raise ValueError(f"{told} has no name")
        if not all(isinstance(event.get(key), int) for key in ("pid", "tid")):
            raise ValueError(f"{told} has no pid and tid")
        if event.get("ph") == "M":
            if (
                not isinstance(event.get("args"), dict)
                or not {"name", "sort_index"} & event["args"].keys()
            ):
                raise ValueError(f"{told} names nothing")
            continue
        if event.get("ph") != "X":
            raise ValueError(
                f"{told} is of the phase {event.get('ph')!r}, which is never written here"
            )
        ts, dur = event.get("ts"), event.get("dur")
        if not all(
            isinstance(value, int | float) and math.isfinite(value) and value >= 0
            for value in (ts, dur)
        ):
            raise ValueError(f"{told} ({event['name']}) has ts {ts!r} and dur {dur!r}")
        thread = (event["pid"], event["tid"])
        if (
            ts < ends.get(thread, 0.0) - 1e-3
        ):  # a nanosecond is what the division may have rounded away
            raise ValueError(
                f"{told} ({event['name']}) begins before the one before it in its thread has ended"
            )
        ends[thread] = ts + dur
    json.dumps(trace, allow_nan=False)


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}
