"""Events from the difference of two snapshots of a stack. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from atroposlib.dashboard.run_folders.events import Event, make_event

DROPS_SECONDS = 20.0
"""Drops of one reason are told together, so often at most."""
Stack = Mapping[str, Any]


def happenings(before: Stack | None, after: Stack) -> list[Event]:
    """The events between two stacks.

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
