"""The processes of a run as the rollout service sees them: itself, the trainer, the environments
and the vLLM servers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.dashboard.live.faults import find_faults
from atroposlib.dashboard.live.signs import Known, signs_of
from atroposlib.dashboard.run_folders.processes import RunProcess
from atroposlib.service import stats
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import Registration

MAX_INSPECTED_GROUPS = 5000
"""For the oldest version in the queue; in a longer one it is not looked for, which would hold up
other requests."""
MAX_ENVIRONMENTS = 200
MAX_LEASES = 50


class TrainerHeard(NamedTuple):
    """When the trainer was heard."""

    seconds_since_step: float | None = None
    """Since its last acknowledgement; None if none was seen."""
    seconds_silent: float = 0.0
    """Since it said anything at all, or since the service began."""
    publishes: bool = False
    """It tells of its servers every few seconds, whatever else it does."""


def mark_of(trainer: Registration | None) -> str | None:
    """Tells one registration from the next, and is not the uuid itself, with which one may speak
    for the trainer.
    """
    return None if trainer is None else hashlib.sha256(str(trainer.uuid).encode()).hexdigest()[:8]


def stack_of(
    queue: RolloutQueue,
    servers: Sequence[Mapping[str, Any]],
    now: float,
    monotonic: float,
    heard: TrainerHeard = TrainerHeard(),  # noqa: B008 - a tuple
    processes: Sequence[RunProcess] = (),
    ended: float | None = None,
    store: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The stack as GET /ui/api/stack tells it.

    Args:
        queue: the service's.
        servers: as ServerWatch tells them.
        now: Unix seconds.
        monotonic: seconds of the queue's clock.
        heard: of the trainer.
        processes: records of the run's folder.
        ended: Unix time of the end of the run, if it is known.
        store: space of the store, as `PostSpace.figures` returns it.
    """
    trainer = queue.registration
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
            "store": None if store is None else dict(store),
        },
        "trainer": {
            "registered": trainer is not None,
            "model": trainer.model if trainer else None,
            "step": queue.sampling_version(),
            "of_steps": trainer.num_steps if trainer else None,
            "version": queue.trainer_version(),
            "weight_epoch": trainer.weight_epoch if trainer else None,
            "max_staleness": trainer.max_staleness if trainer else None,
            "batch_size": trainer.batch_size if trainer else None,
            "seconds_since_step": heard.seconds_since_step,
            "seconds_silent": round(heard.seconds_silent, 1),
            "publishes": heard.publishes,
            "batches_skipped": queue.batches_skipped,
            "starting_step": trainer.starting_step if trainer else None,
            "registration": mark_of(trainer),
            "log_dir": trainer.log_dir if trainer else None,
        },
        "queue": stats.backlog(queue, MAX_INSPECTED_GROUPS),
        "leases": stats.leases(queue, MAX_LEASES),
        "dropped": [
            {"reason": reason, "groups": count} for reason, count in sorted(dropped.items())
        ],
        "environments": stats.environments(queue, monotonic, MAX_ENVIRONMENTS),
        "servers": [dict(server) for server in servers],
    }
    stack["signs"] = signs_of(stack, Known(now, ended=ended, processes=processes))
    stack["faults"] = [fault.to_json() for fault in find_faults(stack)]
    return stack


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
