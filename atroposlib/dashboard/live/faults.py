"""Faults of a stack, each in a sentence with its remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from atroposlib.dashboard.live.signs import SILENCES

SLOW_SECONDS = 600.0
"""A trainer that holds a batch and has acknowledged none for so long is named."""
NEARLY_FULL = 0.95
"""Share of the queue's bounds."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        part: `service`, `trainer`, `queue`, `environment NAME` or `server URL`.
        text: what is wrong, with the figure that shows it.
        remedy: what to do.
        since: Unix time; None if it is not known.
    """

    part: str
    severity: Literal["warning", "error"]
    text: str
    remedy: str
    since: float | None = None

    def to_json(self) -> dict[str, Any]:
        """For the page."""
        return asdict(self)


def find_faults(stack: Mapping[str, Any]) -> list[Fault]:
    """The faults of a stack, those that stop a run first."""
    faults = [*_of_store(stack), *_of_trainer(stack), *_of_queue(stack), *_of_environments(stack)]
    if not stack["service"]["run_ended"]:  # its servers may stop then
        for server in stack["servers"]:
            faults += _of_server(server)
    return sorted(faults, key=lambda fault: fault.severity != "error")


def _process(part: str) -> str:
    """Return the remedy for a process that does not answer."""
    return f"See its log (`scripts/logs.sh {part}`). Its process is gone? `scripts/start.sh --resume {part}`."


def _minutes(seconds: float) -> str:
    minutes = int(seconds // 60)
    if not minutes:
        return f"{seconds:.0f} s"
    return f"{minutes} minutes" if minutes > 1 else "a minute"


def _of_trainer(stack: Mapping[str, Any]) -> Iterator[Fault]:
    trainer, leases = stack["trainer"], stack["leases"]
    if stack["service"]["run_ended"]:
        return
    if not trainer["registered"]:
        if stack["environments"] or stack["queue"]["groups"]:
            yield Fault(
                "trainer",
                "warning",
                "No trainer has registered.",
                "Start it; its log says what it waits for.",
            )
        return
    silent, slow, holds = (
        trainer["seconds_silent"],
        trainer["seconds_since_step"],
        any(lease["sent"] for lease in leases),
    )
    patience = stack["service"]["silent_after"] * (1.0 if trainer["publishes"] else SILENCES)
    if silent > patience and (trainer["publishes"] or not holds):
        # One that holds a batch may say nothing for as long as it takes; one that tells of its
        # servers never falls silent.
        severity: Literal["warning", "error"] = "error" if trainer["publishes"] else "warning"
        text = f"Nothing was heard of the trainer for {_minutes(silent)}."
        yield Fault("trainer", severity, text, _process("trainer"))
    elif slow is not None and slow > SLOW_SECONDS and holds:
        text = f"The trainer holds a batch and has acknowledged none for {_minutes(slow)}."
        yield Fault("trainer", "error", text, _process("trainer"))
    if trainer["batches_skipped"]:
        text = f"{trainer['batches_skipped']} batches could not be trained on."
        yield Fault(
            "trainer", "warning", text, "The trainer's log names the reason of each (docs/runs.md)."
        )


def _of_store(stack: Mapping[str, Any]) -> Iterator[Fault]:
    store = stack["service"].get("store") or {}
    if store.get("refusing_posts"):
        remedy = "Free space on that disk. Batches still go out, and environments go on by themselves when there is space."
        yield Fault("service", "error", store["refusing_posts"], remedy)
    elif store and not store["reserve_is_whole"]:
        text = f"The reserve of {store['reserve_bytes'] / 1e6:,.0f} MB beside {store['path']} is not there."
        yield Fault(
            "service",
            "warning",
            text,
            "Free space on that disk, or raise the quota: it is then built again.",
        )


def _of_queue(stack: Mapping[str, Any]) -> Iterator[Fault]:
    queue = stack["queue"]
    for held, most, what in (
        ("held_groups", "max_groups", "groups"),
        ("held_bytes", "max_bytes", "bytes"),
    ):
        if queue[held] >= NEARLY_FULL * queue[most]:
            text = f"The queue holds {queue[held]:,} of {queue[most]:,} {what}: posts are refused beyond."
            remedy = f"The trainer is slower than the environments: give it time, or start the service with --max-queue-{what}."
            yield Fault("queue", "warning", text, remedy)
    if queue["waiting_for_reference"] and not queue["groups"]:
        text = f"{queue['waiting_for_reference']} groups wait for reference logprobs, and none is ready."
        yield Fault(
            "queue",
            "warning",
            text,
            "Start a reference worker, or see why it takes none (GET /reference).",
        )


def _of_environments(stack: Mapping[str, Any]) -> Iterator[Fault]:
    trainer = stack["trainer"]["registered"] and not stack["service"]["run_ended"]
    starving = (
        trainer and not stack["queue"]["groups"] and bool(stack["service"]["waiting_because"])
    )
    connected = [one for one in stack["environments"] if one["connected"]]
    if starving and not connected:
        yield Fault(
            "service",
            "warning",
            "The trainer waits for groups, and no environment is connected.",
            "Start one.",
        )
    for one in connected:
        if starving and one["seconds_silent"] > SILENCES * stack["service"]["silent_after"]:
            text = f"{one['wandb_name']} has said nothing for {_minutes(one['seconds_silent'])}, and the trainer waits."
            yield Fault(f"environment {one['wandb_name']}", "error", text, _process("environment"))


def _of_server(server: Mapping[str, Any]) -> Iterator[Fault]:
    part, url, since = f"server {server['url']}", server["url"], server["since"]
    standing, reason, kept_out = (
        server["standing"],
        server["reason"] or server["detail"],
        server["standing_since"],
    )
    if server["health"] == "silent":
        text = f"{url} does not answer: {server['detail']}."
        yield Fault(
            part,
            "error",
            text,
            f"{_process('servers')} The trainer then brings it its weights.",
            since,
        )
    elif server["health"] == "bad":
        text = f"{url} serves nothing: {server['detail']}."
        yield Fault(
            part,
            "error",
            text,
            "The trainer mends it with its next update; if it does not, start it again.",
            since,
        )
    elif standing == "quarantined":
        text = f"{url} is kept out: {reason or 'its weights were not proven'}."
        yield Fault(
            part,
            "error",
            text,
            "It comes back with the next whole update; if it does not, start it again.",
            kept_out,
        )
    elif standing == "away":
        text = f"The trainer does not reach {url}: {reason or 'no answer'}."
        yield Fault(
            part,
            "error",
            text,
            "See its log, and whether the trainer's machine can reach that address.",
            kept_out,
        )
