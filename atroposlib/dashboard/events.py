"""Events of a run: read from the rollout service's file and from the trainer's rows, or found in the
difference of two stacks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, FiniteFloat, ValidationError

Severity = Literal["info", "warning", "error"]
MAX_EVENTS = 5000
"""The newest, that are kept and shown."""
DROPS_SECONDS = 20.0
"""Drops of one reason are one event, at most once in this many seconds."""
MAX_TEXT = 2000
Stack = Mapping[str, Any]
Text = Annotated[str, AfterValidator(lambda text: text[:MAX_TEXT])]


class Event(BaseModel, frozen=True):
    """Something that a person wants to see on the axis of the steps.

    Attributes:
        kind: a word of the list in docs/ui.md.
        text: one sentence.
        time: Unix seconds; None where only the step is known.
        step: of the trainer; None where only the time is known.
        version: of the weights; None if it does not matter.
        remedy: what to do about it; None if nothing.
    """

    kind: Text
    text: Text
    time: FiniteFloat | None = None
    step: int | None = None
    version: int | None = None
    severity: Severity = "info"
    remedy: Text | None = None

    @property
    def id(self) -> str:
        """Return a mark that is the same whenever the same files are read."""
        content = repr((self.kind, self.text, self.time, self.step, self.version))
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        """For the page."""
        return {"id": self.id} | self.model_dump()


def read_event(row: Mapping[str, Any]) -> Event | None:
    """Return an event of a file; None if the row is not one."""
    try:
        return Event.model_validate(row)
    except ValidationError:
        return None


def events_of_row(row: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events in a trainer's row: skipped batches and updates, and tokens that differ."""
    step = whole(row.get("step"))
    if skipped := number(row.get("batches_skipped")):
        text = f"{skipped:g} batch{'es' * (skipped > 1)} could not be trained on before step {step}"
        remedy = (
            "the trainer's log has the reason; --max-skipped-batches and --skip-nonfinite "
            "limit how many in a row are borne"
        )
        yield Event(kind="skipped_batch", text=text, step=step, severity="warning", remedy=remedy)
    if skipped := number(row.get("updates_skipped")):
        text = f"{skipped:g} update{'s' * (skipped > 1)} of step {step} could not be taken"
        remedy = "the trainer's log has the reason"
        yield Event(kind="skipped_batch", text=text, step=step, severity="warning", remedy=remedy)
    if mismatched := number(row.get("mismatched_tokens")):
        compared = number(row.get("compared_tokens")) or 0
        text = f"{mismatched:g} of {compared:g} tokens differ between sampler and trainer at step {step}"
        remedy = (
            "the Weights page shows the first one; docs/determinism.md lists what makes them differ"
        )
        yield Event(kind="mismatch", text=text, step=step, severity="error", remedy=remedy)


def event_of_evaluation(evaluation: Mapping[str, Any]) -> Event:
    """Return an evaluation, as `Run.evaluations` lists it, as an event."""
    listed = ", ".join(
        f"{name.removeprefix('eval/')} {value:.4g}"
        for name, value in sorted(evaluation["metrics"].items())[:6]
    )
    return Event(
        kind="evaluation",
        text=f"{evaluation['name'][:100]}: {listed or 'no numbers'}",
        time=evaluation["time"],
        step=evaluation["step"],
        version=evaluation["weight_version"],
    )


def number(value: Any) -> float | None:
    """Return a finite number; None for another value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 2**1000 and math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """Return a whole number that every JSON reader keeps; None for another value."""
    return value if type(value) is int and abs(value) < 2**53 else None


# ---- from two stacks ----


def events_between(
    before: Stack | None, after: Stack, servers: Mapping[str, Mapping[str, Any]]
) -> list[Event]:
    """Return the events between two stacks.

    Args:
        before: None for the first stack, which shows nothing new of trainer and environments.
        after: the present one.
        servers: the rows of servers before, by address.
    """
    changes = [
        change
        for row in after["servers"]
        if row["url"] in servers
        for change in _of_server(servers[row["url"]], row, after["service"]["run_ended"])
    ]
    if before is not None:
        changes += [*_of_trainer(before, after), *_of_environments(before, after)]
    return [_event_at(after, **change) for change in changes]


def restarted(earlier: Stack, stack: Stack) -> list[Event]:
    """Return the event of a service that goes on with a run.

    Args:
        earlier: the last stack that an earlier process wrote down; empty if there was none.
        stack: the first one of this process.
    """
    at = number(earlier.get("time"))
    if at is None:
        return []
    seconds = max(0.0, stack["time"] - at)
    text = f"the rollout service was restarted and goes on with the run; its last look was {seconds:.0f} s before"
    return [_event_at(stack, **_change("service_restarted", text, "warning"))]


def _event_at(stack: Stack, **change: Any) -> Event:
    version = stack["service"]["sampling_version"]
    return Event(time=stack["time"], step=version, version=version, **change)


def _change(
    kind: str, text: str, severity: Severity = "info", remedy: str | None = None
) -> dict[str, Any]:
    return {"kind": kind, "text": text, "severity": severity, "remedy": remedy}


def _of_server(
    before: Mapping[str, Any], after: Mapping[str, Any], run_ended: bool
) -> Iterator[dict[str, Any]]:
    """Yield the changes of one server, from its row before and its row now."""
    url, detail = after["url"], after["detail"]
    match before["health"], after["health"]:
        case earlier, "silent" if earlier != "silent" and run_ended:
            yield _change("server_lost", f"{url} has stopped after the end of the run")
        case earlier, "silent" if earlier != "silent":
            remedy = "see its log; scripts/start.sh --resume starts it again"
            yield _change("server_lost", f"{url} does not answer: {detail}", "error", remedy)
        case "silent", "good" | "bad":
            yield _change("server_back", f"{url} answers again")
        case "good", "bad":
            yield _change("quarantine", f"{url} serves nothing: {detail}", "error")
    if before["instance"] and after["instance"] and before["instance"] != after["instance"]:
        yield _change("server_restarted", f"{url} was restarted", "warning")
    elif (after["failures"] or 0) > (before["failures"] or 0):
        text = f"{url} refused an update: {after['last_error'] or 'it gives no reason'}"
        yield _change("refused_update", text, "error", "the trainer sends it again; see its log")
    if after["standing"] == "quarantined" != before["standing"]:
        text, remedy = (
            f"{url} is kept out: {after['reason']}",
            "it comes back with the next whole update",
        )
        yield _change("quarantine", text, "error", remedy)


def _of_trainer(before: Stack, after: Stack) -> Iterator[dict[str, Any]]:
    old, new = before["trainer"], after["trainer"]
    if new["registration"] != old["registration"] and new["registered"]:
        start, model = new["starting_step"], _name_of(new["model"] or "a model without a name")
        if start:
            yield _change("resumed", f"the trainer went on from step {start} with {model}")
        else:
            text = f"a trainer has registered: {model}, {new['of_steps']} steps"
            yield _change("trainer_registered", text)
    if after["service"]["run_ended"] and not before["service"]["run_ended"]:
        yield _change("run_ended", f"the trainer has ended the run at version {new['step']}")
    skipped = new["batches_skipped"] - old["batches_skipped"]
    if skipped > 0:
        text = f"the trainer skipped {skipped} batch{'es' * (skipped > 1)}"
        yield _change("skipped_batch", text, "warning", "its log has the reason")


def _name_of(model: str) -> str:
    """Return the name of a model's folder without the path, which does not describe the model."""
    return model.rstrip("/").rpartition("/")[2] if model.startswith("/") else model


def _of_environments(before: Stack, after: Stack) -> Iterator[dict[str, Any]]:
    limit, run_ended = after["service"]["silent_after"], after["service"]["run_ended"]
    earlier = {one["env_id"]: one for one in before["environments"]}
    for one in after["environments"]:
        name, old = one["wandb_name"], earlier.get(one["env_id"])
        if old is None:
            yield _change("environment_joined", f"{name} has registered")
        elif old["connected"] and not one["connected"]:
            severity: Severity = "info" if run_ended else "warning"
            yield _change("environment_left", f"{name} has disconnected", severity)
        elif one["connected"] and not run_ended:
            was_silent, is_silent = (row["seconds_silent"] > limit for row in (old, one))
            if is_silent and not was_silent:
                text, remedy = (
                    f"{name} has sent nothing for {limit:g} s",
                    "see its log; start it again if its process is gone",
                )
                yield _change("environment_silent", text, "warning", remedy)
            elif was_silent and not is_silent:
                yield _change("environment_back", f"{name} sends again")


class Drops:
    """Dropped groups, several of a reason in one event."""

    def __init__(self) -> None:
        self._reported: dict[str, int] | None = None
        self._at: dict[str, float] = {}

    def events(self, stack: Stack) -> list[Event]:
        """Return the events to publish now."""
        counts = {one["reason"]: one["groups"] for one in stack["dropped"]}
        if self._reported is None or any(
            counts.get(reason, 0) < earlier for reason, earlier in self._reported.items()
        ):
            self._reported = counts  # the first look, or the service was reset
            return []
        events = []
        for reason, count in counts.items():
            new = count - self._reported.get(reason, 0)
            if new and stack["time"] - self._at.get(reason, 0.0) >= DROPS_SECONDS:
                self._reported[reason], self._at[reason] = count, stack["time"]
                text = f"{new} group{'s' * (new > 1)} dropped: {reason.replace('_', ' ')}"
                change = _change("dropped_groups", text, "warning", REMEDIES.get(reason))
                events.append(_event_at(stack, **change))
        return events


REMEDIES = {
    "fills_no_batch": "no whole groups add up to a batch with them: let group_size divide the trainer's batch_size",
    "stale": "they were older than --max-staleness when their turn came: fewer groups ahead, or a higher bound",
    "another_run": "weights of an earlier trainer sampled them: see that the servers have this run's",
    "damaged": "the disk of the service's store has lost them: look at it",
    "rewound": "the run was resumed, and their items are done again",
}
"""Reason of a drop -> what to do about it."""
