"""Events of a run: read from the rollout service's file and from the trainer's rows, or found in the
difference of two stacks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "error"]
SEVERITIES = ("info", "warning", "error")
MAX_EVENTS = 5000
"""The newest, that are kept and shown."""
DROPS_SECONDS = 20.0
"""Drops of one reason are one event, at most once in this many seconds."""
Stack = Mapping[str, Any]


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


# ---- from two stacks ----


def stack_events(before: Stack | None, after: Stack) -> list[Event]:
    """Return the events between two stacks.

    Args:
        before: None at the first look: what is there then has not just happened.
        after: the present one.
    """
    if before is None:
        return []
    now, version = after["time"], after["service"]["sampling_version"]
    events = [*_of_trainer(before, after), *_of_environments(before, after)]
    return [make_event(kind, text, now, version, version, **more) for kind, text, more in events]


def restarted(earlier: Stack, stack: Stack) -> list[Event]:
    """The event of a service that goes on with a run.

    Args:
        earlier: the last stack that an earlier process wrote down; empty if there was none.
        stack: the first one of this process.
    """
    at = earlier.get("time")
    if not isinstance(at, int | float):
        return []
    now, version = stack["time"], stack["service"]["sampling_version"]
    text = f"the rollout service was started anew and goes on with the run; it last looked {max(0.0, now - at):.0f} s before"
    return [make_event("service_restarted", text, now, version, version, "warning")]


def server_events(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    now: float,
    version: int,
    run_ended: bool = False,
) -> Iterator[Event]:
    """The events of one server.

    Args:
        before, after: rows of a Server.
        version: of the trainer's weights, where the event stands on the axis.
        run_ended: a server that stops then is no fault.
    """
    url = after["url"]
    was, is_ = before["health"], after["health"]
    if is_ == "silent" and was != "silent" and run_ended:
        yield make_event(
            "server_lost", f"{url} has stopped after the end of the run", now, version, version
        )
    elif is_ == "silent" and was != "silent":
        text, remedy = (
            f"{url} does not answer: {after['detail']}",
            "see its log; scripts/start.sh --resume starts it again",
        )
        yield make_event("server_lost", text, now, version, version, "error", remedy)
    elif was == "silent" and is_ in ("good", "bad"):
        yield make_event("server_back", f"{url} answers again", now, version, version)
    elif is_ == "bad" and was == "good":
        yield make_event(
            "quarantine", f"{url} serves nothing: {after['detail']}", now, version, version, "error"
        )
    if before["instance"] and after["instance"] and before["instance"] != after["instance"]:
        yield make_event(
            "server_restarted", f"{url} was started anew", now, version, version, "warning"
        )
    elif (after["failures"] or 0) > (before["failures"] or 0):
        text = f"{url} refused an update: {after['last_error'] or 'it does not say why'}"
        yield make_event(
            "refused_update",
            text,
            now,
            version,
            version,
            "error",
            "the trainer sends it again; see its log",
        )
    if after["standing"] == "quarantined" != before["standing"]:
        remedy = "it comes back with the next whole update"
        yield make_event(
            "quarantine",
            f"{url} is kept out: {after['reason']}",
            now,
            version,
            version,
            "error",
            remedy,
        )


def _of_trainer(before: Stack, after: Stack) -> Iterator[tuple[str, str, dict[str, Any]]]:
    old, new = before["trainer"], after["trainer"]
    if new["registration"] != old["registration"] and new["registered"]:
        start, model = (
            new["starting_step"],
            _name_of(new["model"] or "a model that it does not name"),
        )
        if start:
            yield "resumed", f"the trainer went on from step {start} with {model}", {}
        else:
            yield (
                "trainer_registered",
                f"a trainer has registered: {model}, {new['of_steps']} steps",
                {},
            )
    if after["service"]["run_ended"] and not before["service"]["run_ended"]:
        yield "run_ended", f"the trainer says that the run is over, at version {new['step']}", {}
    skipped = new["batches_skipped"] - old["batches_skipped"]
    if skipped > 0:
        text, remedy = (
            f"the trainer skipped {skipped} batch{'es' * (skipped > 1)}",
            "its log says why",
        )
        yield "skipped_batch", text, {"severity": "warning", "remedy": remedy}


def _name_of(model: str) -> str:
    """Return the name of a model's folder without the path, which does not describe the model."""
    return model.rstrip("/").rpartition("/")[2] if model.startswith("/") else model


def _of_environments(before: Stack, after: Stack) -> Iterator[tuple[str, str, dict[str, Any]]]:
    limit = after["service"]["silent_after"]
    known = {one["env_id"]: one for one in before["environments"]}
    for one in after["environments"]:
        name, old = one["wandb_name"], known.get(one["env_id"])
        if old is None:
            yield "environment_joined", f"{name} has registered", {}
        elif old["connected"] and not one["connected"]:
            severity = "info" if after["service"]["run_ended"] else "warning"
            yield "environment_left", f"{name} has said goodbye", {"severity": severity}
        elif one["connected"] and not after["service"]["run_ended"]:
            was, is_ = (
                seconds > limit for seconds in (old["seconds_silent"], one["seconds_silent"])
            )
            if is_ and not was:
                more = {
                    "severity": "warning",
                    "remedy": "see its log; start it again if its process is gone",
                }
                yield "environment_silent", f"{name} has said nothing for {limit:g} s", more
            elif was and not is_:
                yield "environment_back", f"{name} is heard again", {}


class Drops:
    """Groups that were dropped, told together."""

    def __init__(self) -> None:
        self._told: dict[str, int] | None = None
        self._at: dict[str, float] = {}

    def events(self, stack: Stack) -> list[Event]:
        """Return the events to publish now."""
        counts = {one["reason"]: one["groups"] for one in stack["dropped"]}
        if self._told is None or any(
            counts.get(reason, 0) < earlier_count for reason, earlier_count in self._told.items()
        ):
            self._told = counts  # the first look, or the service was reset
            return []
        now, version = stack["time"], stack["service"]["sampling_version"]
        events = []
        for reason, count in counts.items():
            new = count - self._told.get(reason, 0)
            if new and now - self._at.get(reason, 0.0) >= DROPS_SECONDS:
                self._told[reason], self._at[reason] = count, now
                text = f"{new} group{'s' * (new > 1)} dropped: {reason.replace('_', ' ')}"
                events.append(
                    make_event(
                        "dropped_groups",
                        text,
                        now,
                        version,
                        version,
                        "warning",
                        REMEDIES.get(reason),
                    )
                )
        return events


REMEDIES = {
    "fills_no_batch": "no whole groups add up to a batch with them: let group_size divide the trainer's batch_size",
    "stale": "they were older than --max-staleness when their turn came: fewer groups ahead, or a higher bound",
    "another_run": "weights of an earlier trainer sampled them: see that the servers have this run's",
    "damaged": "the disk of the service's store has lost them: look at it",
    "rewound": "the run was resumed, and their items are done again",
}
"""Reason of a drop -> what to do about it."""
