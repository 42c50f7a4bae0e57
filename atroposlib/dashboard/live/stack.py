"""The processes of a run as the rollout service sees them, and their faults.

The processes are the service itself, the trainer, the environments and the vLLM servers. A fault is
one sentence with its remedy.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from atroposlib.dashboard.live.signs import SILENCES, Known, RunProcess, signs_of
from atroposlib.service import stats
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import Registration

MAX_INSPECTED_GROUPS = 5000
"""Largest queue that is searched for its oldest version: a longer search would hold up other
requests."""
MAX_ENVIRONMENTS = 200
MAX_LEASES = 50
_SETTINGS = (
    "model", "num_steps", "weight_epoch", "max_staleness", "batch_size", "starting_step", "log_dir",
)  # fmt: skip
"""Fields of a trainer's registration that a stack shows."""
SLOW_SECONDS = 600.0
"""The page reports a trainer that holds a batch and has acknowledged none for this many seconds."""
NEARLY_FULL = 0.95
"""Share of the queue's bounds."""


class TrainerContact(NamedTuple):
    """Times of the trainer's last requests."""

    seconds_since_step: float | None = None
    """Since its last acknowledgement; None if none was seen."""
    seconds_silent: float = 0.0
    """Since its last request of any kind, or since the service began."""
    publishes: bool = False
    """It publishes its servers every few seconds, whatever else it does."""


def mark_of(trainer: Registration | None) -> str | None:
    """Return a mark that differs for every registration; None without a trainer.

    The page does not show the uuid itself, because a client may act as the trainer with it.
    """
    return None if trainer is None else hashlib.sha256(str(trainer.uuid).encode()).hexdigest()[:8]


def stack_of(
    queue: RolloutQueue,
    servers: Sequence[Mapping[str, Any]],
    now: float,
    monotonic: float,
    contact: TrainerContact = TrainerContact(),  # noqa: B008 - a tuple
    processes: Sequence[RunProcess] = (),
    ended: float | None = None,
    store: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the stack as GET /ui/api/stack answers it.

    Args:
        queue: the service's.
        servers: rows of `Server.row`.
        now: Unix seconds.
        monotonic: seconds of the queue's clock.
        contact: times of the trainer's last requests.
        processes: records of the run's folder.
        ended: Unix time of the end of the run, if it is known.
        store: space of the store, as `PostSpace.figures` returns it.
    """
    dropped: Counter[str] = Counter()
    for (reason, _), count in queue.drops.items():
        dropped[reason] += count
    stack: dict[str, Any] = {
        "time": now,
        "live": True,
        "service": {
            "step": queue.current_step,
            "sampling_version": queue.sampling_version(),
            "trainer_version": queue.trainer_version(),
            "waiting_because": queue.waiting,
            "run_ended": queue.ended,
            "silent_after": queue.limits.silent_after,
            "store": store and dict(store),
        },
        "trainer": _trainer_json(queue, contact),
        "queue": stats.backlog(queue, MAX_INSPECTED_GROUPS),
        "leases": stats.leases(queue, MAX_LEASES),
        "dropped": [
            {"reason": reason, "groups": count} for reason, count in sorted(dropped.items())
        ],
        "environments": stats.environments(queue, monotonic, MAX_ENVIRONMENTS),
        "servers": [dict(server) for server in servers],
    }
    stack["signs"] = signs_of(stack, Known(now, ended=ended, processes=processes))
    stack["faults"] = find_faults(stack)
    return stack


def _trainer_json(queue: RolloutQueue, contact: TrainerContact) -> dict[str, Any]:
    """Return the trainer's part of a stack. Without a trainer, its settings are null."""
    trainer = queue.registration
    settings = {name: getattr(trainer, name, None) for name in _SETTINGS}
    return {
        "registered": trainer is not None,
        "step": queue.sampling_version(),
        "of_steps": settings.pop("num_steps"),
        "version": queue.trainer_version(),
        "seconds_since_step": contact.seconds_since_step,
        "seconds_silent": round(contact.seconds_silent, 1),
        "publishes": contact.publishes,
        "batches_skipped": queue.batches_skipped,
        "registration": mark_of(trainer),
        **settings,
    }


def worth_telling(stack: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a stack that counts when two are compared: all but the seconds that pass
    in each anyway.
    """
    shown = {name: value for name, value in stack.items() if name != "time"}
    if (store := stack["service"].get("store")) is not None:
        shown["service"] = stack["service"] | {"store": store | {"free_bytes": None}}
    shown["trainer"] = stack["trainer"] | {"seconds_since_step": None, "seconds_silent": None}
    shown["signs"] = {name: sign | {"seen": None} for name, sign in stack["signs"].items()}
    shown["environments"] = [one | {"seconds_silent": None} for one in stack["environments"]]
    shown["servers"] = [one | {"asked": None, "answered": None} for one in stack["servers"]]
    return shown


# ---- faults ----


def find_faults(stack: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the faults of a stack, first the ones that stop a run."""
    faults = [
        *_faults_of_store(stack),
        *_faults_of_trainer(stack),
        *_faults_of_queue(stack),
        *_faults_of_environments(stack),
    ]
    if not stack["service"]["run_ended"]:  # its servers may stop then
        for server in stack["servers"]:
            faults += _faults_of_server(server)
    # "error" sorts before "warning".
    return sorted(faults, key=lambda fault: str(fault["severity"]))


def _fault(
    part: str,
    severity: Literal["warning", "error"],
    text: str,
    remedy: str,
    since: float | None = None,
) -> dict[str, Any]:
    """Return one thing that is wrong.

    Args:
        part: `service`, `trainer`, `queue`, `environment NAME` or `server URL`.
        severity: of the fault.
        text: the fault, with the figure that shows it.
        remedy: what to do.
        since: Unix time; None if it is not known.
    """
    return {"part": part, "severity": severity, "text": text, "remedy": remedy, "since": since}


def _process(part: str) -> str:
    """Return the remedy for a process that does not answer."""
    return f"See its log (`scripts/logs.sh {part}`). Its process is gone? `scripts/start.sh --resume {part}`."


def _minutes(seconds: float) -> str:
    minutes = int(seconds // 60)
    if minutes > 1:
        return f"{minutes} minutes"
    return "a minute" if minutes else f"{seconds:.0f} s"


def _faults_of_trainer(stack: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    trainer = stack["trainer"]
    if stack["service"]["run_ended"]:
        return
    if not trainer["registered"]:
        if stack["environments"] or stack["queue"]["groups"]:
            remedy = "Start it; its log says what it waits for."
            yield _fault("trainer", "warning", "No trainer has registered.", remedy)
        return
    silent, slow = trainer["seconds_silent"], trainer["seconds_since_step"]
    holds = any(lease["sent"] for lease in stack["leases"])
    limit = stack["service"]["silent_after"]
    severity: Literal["warning", "error"] = "error"
    if not trainer["publishes"]:
        limit, severity = SILENCES * limit, "warning"
    # A trainer that holds a batch may send nothing for as long as it takes. A trainer that
    # publishes its servers never falls silent.
    if silent > limit and (trainer["publishes"] or not holds):
        text = f"Nothing was heard of the trainer for {_minutes(silent)}."
        yield _fault("trainer", severity, text, _process("trainer"))
    elif slow is not None and slow > SLOW_SECONDS and holds:
        text = f"The trainer holds a batch and has acknowledged none for {_minutes(slow)}."
        yield _fault("trainer", "error", text, _process("trainer"))
    if trainer["batches_skipped"]:
        text = f"{trainer['batches_skipped']} batches could not be trained on."
        remedy = "The trainer's log names the reason of each (docs/runs.md)."
        yield _fault("trainer", "warning", text, remedy)


def _faults_of_store(stack: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    store = stack["service"].get("store") or {}
    if store.get("refusing_posts"):
        remedy = "Free space on that disk. Batches still go out, and environments go on by themselves when there is space."
        yield _fault("service", "error", store["refusing_posts"], remedy)
    elif store and not store["reserve_is_whole"]:
        text = f"The reserve of {store['reserve_bytes'] / 1e6:,.0f} MB beside {store['path']} is not there."
        remedy = "Free space on that disk, or raise the quota: it is then built again."
        yield _fault("service", "warning", text, remedy)


def _faults_of_queue(stack: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    queue = stack["queue"]
    for unit in ("groups", "bytes"):
        held, limit = queue[f"held_{unit}"], queue[f"max_{unit}"]
        if held >= NEARLY_FULL * limit:
            text = f"The queue holds {held:,} of {limit:,} {unit}: posts are refused beyond."
            remedy = f"The trainer is slower than the environments: give it time, or start the service with --max-queue-{unit}."
            yield _fault("queue", "warning", text, remedy)
    if queue["waiting_for_reference"] and not queue["groups"]:
        text = f"{queue['waiting_for_reference']} groups wait for reference logprobs, and none is ready."
        remedy = "Start a reference worker, or see why it takes none (GET /reference)."
        yield _fault("queue", "warning", text, remedy)


def _faults_of_environments(stack: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the faults of environments, which count only while the trainer waits for groups."""
    service = stack["service"]
    if (
        not stack["trainer"]["registered"]
        or service["run_ended"]
        or stack["queue"]["groups"]
        or not service["waiting_because"]
    ):
        return
    connected = [one for one in stack["environments"] if one["connected"]]
    if not connected:
        text = "The trainer waits for groups, and no environment is connected."
        yield _fault("service", "warning", text, "Start one.")
    for one in connected:
        name, silent = one["wandb_name"], one["seconds_silent"]
        if silent > SILENCES * service["silent_after"]:
            text = f"{name} has said nothing for {_minutes(silent)}, and the trainer waits."
            yield _fault(f"environment {name}", "error", text, _process("environment"))


def _faults_of_server(server: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    url, detail, since = server["url"], server["detail"], server["standing_since"]
    reason = server["reason"] or detail
    match server["health"], server["standing"]:
        case "silent", _:
            text, since = f"{url} does not answer: {detail}.", server["since"]
            remedy = f"{_process('servers')} The trainer then brings it its weights."
        case "bad", _:
            text, since = f"{url} serves nothing: {detail}.", server["since"]
            remedy = "The trainer mends it with its next update; if it does not, start it again."
        case _, "quarantined":
            text = f"{url} is kept out: {reason or 'its weights were not proven'}."
            remedy = "It comes back with the next whole update; if it does not, start it again."
        case _, "away":
            text = f"The trainer does not reach {url}: {reason or 'no answer'}."
            remedy = "See its log, and whether the trainer's machine can reach that address."
        case _:
            return
    yield _fault(f"server {url}", "error", text, remedy, since)
