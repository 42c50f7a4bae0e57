"""Events of a run, from the rollout service's file and from the trainer's rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "error"]
SEVERITIES = ("info", "warning", "error")
MAX_EVENTS = 5000
"""The newest, that are kept and shown."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a person wants to see on the axis of the steps.

    Attributes:
        id: the same whenever the same files are read.
        kind: a word of the list in docs/ui.md.
        text: one sentence.
        time: Unix seconds; None where only the step is known.
        step: of the trainer; None where only the time is known.
        version: of the weights; None if it does not matter.
        remedy: what to do about it; None if nothing.
    """

    id: str
    kind: str
    text: str
    time: float | None = None
    step: int | None = None
    version: int | None = None
    severity: Severity = "info"
    remedy: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For the page."""
        return asdict(self)


def make_event(
    kind: str,
    text: str,
    time: float | None = None,
    step: int | None = None,
    version: int | None = None,
    severity: Severity = "info",
    remedy: str | None = None,
) -> Event:
    """An event with the id that belongs to it."""
    digest = hashlib.sha256(repr((kind, text, time, step, version)).encode()).hexdigest()[:12]
    return Event(digest, kind, text, time, step, version, severity, remedy)


def read_event(row: Mapping[str, Any]) -> Event | None:
    """An event of a file; None if the row is none. What is not understood of it is left out."""
    kind, text, severity = row.get("kind"), row.get("text"), row.get("severity", "info")
    if not isinstance(kind, str) or not isinstance(text, str):
        return None
    remedy = row.get("remedy")
    return make_event(
        kind[:64],
        text[:2000],
        number(row.get("time")),
        whole(row.get("step")),
        whole(row.get("version")),
        severity if severity in SEVERITIES else "info",
        remedy[:2000] if isinstance(remedy, str) else None,
    )


def events_of_row(row: Mapping[str, Any]) -> Iterable[Event]:
    """Return the events in a trainer's row: skipped batches and updates, and tokens that differ."""
    step = whole(row.get("step"))
    if skipped := number(row.get("batches_skipped")):
        text = f"{skipped:g} batch{'es' * (skipped > 1)} could not be trained on before step {step}"
        remedy = "the trainer's log says why; --max-skipped-batches and --skip-nonfinite say how many in a row are borne"
        yield make_event("skipped_batch", text, step=step, severity="warning", remedy=remedy)
    if skipped := number(row.get("updates_skipped")):
        text = f"{skipped:g} update{'s' * (skipped > 1)} of step {step} could not be taken"
        yield make_event(
            "skipped_batch",
            text,
            step=step,
            severity="warning",
            remedy="the trainer's log says why",
        )
    if mismatched := number(row.get("mismatched_tokens")):
        compared = number(row.get("compared_tokens")) or 0
        text = f"{mismatched:g} of {compared:g} tokens differ between sampler and trainer at step {step}"
        remedy = (
            "the Weights page shows the first one; docs/determinism.md lists what makes them differ"
        )
        yield make_event("mismatch", text, step=step, severity="error", remedy=remedy)


def event_of_evaluation(row: Mapping[str, Any]) -> Event | None:
    """An evaluation as an event; None if the row is none."""
    metrics = row.get("metrics")
    if not isinstance(metrics, dict):
        return None
    known = {
        str(name): value
        for name, metric in metrics.items()
        if (value := number(metric)) is not None
    }
    listed = ", ".join(
        f"{name.removeprefix('eval/')} {value:.4g}" for name, value in sorted(known.items())[:6]
    )
    text = f"{str(row.get('name', '?'))[:100]}: {listed or 'no numbers'}"
    version = whole(row.get("weight_version"))
    return make_event("evaluation", text, number(row.get("time")), whole(row.get("step")), version)


def number(value: Any) -> float | None:
    """A finite number; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 2**1000 and math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """A whole number that every JSON reader keeps; None for all else."""
    return value if type(value) is int and abs(value) < 2**53 else None
