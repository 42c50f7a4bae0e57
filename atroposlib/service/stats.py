"""Queue statistics for /stats, the page and Prometheus: backlog, leases and environments."""

from __future__ import annotations

import math
from typing import Any

from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import NOBODY


def backlog(queue: RolloutQueue, max_inspected: float = math.inf) -> dict[str, Any]:
    """Return the waiting groups, and the bounds of the queue.

    Args:
        max_inspected: groups; a longer queue is not searched for its oldest version, which is None
            then.
    """
    oldest = None
    if queue.lines.groups <= max_inspected:
        oldest = min((group.version for group in queue.lines), default=None)
    return {
        "groups": queue.lines.groups,
        "sequences": queue.lines.total_sequences(),
        "buffered_groups": sum(len(buffer) for buffer in queue.buffers.values()),
        "waiting_for_reference": len(queue.reference.waiting),
        "held_groups": queue.held_groups,
        "held_bytes": queue.held_bytes,
        "max_groups": queue.limits.max_groups,
        "max_bytes": queue.limits.max_bytes,
        "oldest_version": oldest,
    }


def leases(queue: RolloutQueue, most: int = 0) -> list[dict[str, Any]]:
    """Return the batches that are handed out, or the newest ones of them."""
    listed = list(queue.leases.values())
    return [
        {
            "batch_id": lease.batch_id,
            "groups": len(lease.groups),
            "sent": lease.sent,
            "returned": lease.returned,
        }
        for lease in listed[-most:]
    ]


def environments(queue: RolloutQueue, now: float, most: int = 0) -> list[dict[str, Any]]:
    """Return the environments of the present run, or the ones that registered last.

    An environment of an earlier run is listed only if it has posted since the present trainer
    registered.

    Args:
        queue: of the service.
        now: seconds of the queue's clock.
        most: environments listed; 0 for all.
    """
    first, posted = 0 if queue.ended else queue.first_env_of_run, queue.registry.posted
    listed = [
        one
        for one in queue.registry.by_id.values()
        if one.env_id != NOBODY and (one.env_id >= first or one.env_id in posted)
    ]
    unfillable = queue.unfillable()
    return [
        {
            "env_id": one.env_id,
            "wandb_name": one.wandb_name,
            "process": queue.registry.processes.get(one.env_id),
            "connected": one.connected,
            "weight": one.weight,
            "groups_accepted": one.accepted,
            "groups_queued": len(queue.lines.by_line[one.env_id]),
            "groups_buffered": len(queue.buffers.get(one.env_id, [])),
            "groups_unfillable": sum(unfillable.sizes(one.env_id).values()),
            "seconds_silent": round(now - queue.registry.last_seen[one.env_id], 1),
        }
        for one in listed[-most:]
    ]
