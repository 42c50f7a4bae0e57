"""Figures of the rollout service: backlog, leases and environments for /stats and the page, counters and
gauges for Prometheus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import NOBODY, Lease, Receipt, ValidatedGroup
from atroposlib.service.store import PostSpace


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


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that are counted by name; each further label is a row that is kept for ever."""


GAUGES: dict[str, tuple[str, Callable[[RolloutQueue], float]]] = {
    "rollout_queue_groups": ("Groups ready for a batch", lambda queue: queue.lines.groups),
    "rollout_queue_sequences": (
        "Sequences ready for a batch",
        lambda queue: queue.lines.total_sequences(),
    ),
    "rollout_buffered_groups": (
        "Groups that wait to be recombined",
        lambda queue: sum(map(len, queue.buffers.values())),
    ),
    "rollout_used_groups_waiting": (
        "Groups that may be learned from again",
        lambda queue: queue.lines.used_groups,
    ),
    "rollout_reference_waiting_groups": (
        "Groups that wait for ref_logprobs",
        lambda queue: len(queue.reference.waiting),
    ),
    "rollout_reference_leased_groups": (
        "Groups at reference workers, overdue ones too",
        lambda queue: len(queue.reference.loans),
    ),
    "rollout_leased_batches": ("Batches not yet acknowledged", lambda queue: len(queue.leases)),
    "rollout_held_groups": ("Groups held in all", lambda queue: queue.held_groups),
    "rollout_held_bytes": ("Bytes held in all", lambda queue: queue.held_bytes),
    "rollout_batches_skipped": (
        "Batches that the trainer could not learn from",
        lambda queue: queue.batches_skipped,
    ),
    "rollout_batches_set_aside": (
        "Batches that ended trainers and are handed out no more",
        lambda queue: queue.failures.total,
    ),
    "rollout_current_step": ("Batches handed out", lambda queue: queue.current_step),
    "rollout_trainer_version": (
        "Weight version of the next batch",
        lambda queue: queue.trainer_version(),
    ),
    "rollout_environments": (
        "Connected environments",
        lambda queue: sum(
            one.connected for one in queue.registry.by_id.values() if one.env_id != NOBODY
        ),
    ),
}
"""Name -> help text and value."""
COUNTERS: dict[str, tuple[str, Callable[[RolloutQueue], float]]] = {
    "rollout_group_uses": (
        "Groups in batches that were learned from, each time",
        lambda queue: queue.uses,
    ),
    "rollout_groups_used": (
        "Groups that were learned from at all",
        lambda queue: queue.groups_used,
    ),
    "rollout_references_answered": (
        "Groups that got their ref_logprobs from workers",
        lambda queue: queue.reference.answered,
    ),
    "rollout_references_unusable": (
        "Groups for which workers could compute none",
        lambda queue: queue.reference.unusable,
    ),
    "rollout_reference_leases_expired": (
        "Groups that a worker kept for too long",
        lambda queue: queue.reference.expired,
    ),
}
SPACE_GAUGES: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "rollout_store_free_bytes": (
        "Free bytes of the store's disk",
        lambda space: space["free_bytes"],
    ),
    "rollout_store_refusing_posts": (
        "1 while posts are refused for want of disk space",
        lambda space: space["refusing_posts"] is not None,
    ),
    "rollout_store_reserve_is_whole": (
        "1 if the reserve for batches is there",
        lambda space: space["reserve_is_whole"],
    ),
}
"""For a store on a disk; see `PostSpace.figures`."""


class Metrics(Collector):
    """One registry per service. The totals of the queue, and the space of the store's disk as it was
    last measured, are read when Prometheus asks.

    Args:
        queue: returns the current queue.
        post_space: knows the space of the store's disk.
    """

    def __init__(self, queue: Callable[[], RolloutQueue], post_space: PostSpace) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "rollout_requests",
            "Requests answered",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "rollout_request_seconds",
            "Seconds to answer a request",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.commit_seconds = Histogram(
            "rollout_commit_seconds",
            "Seconds until a change was stored",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.groups = Counter(
            "rollout_groups_posted", "Groups by answer", ["status"], registry=self.registry
        )
        self.sequences = Counter(
            "rollout_sequences_posted", "Sequences accepted", registry=self.registry
        )
        self.bytes = Counter(
            "rollout_bytes_posted", "Bytes of JSON accepted", registry=self.registry
        )
        self.batches = Counter(
            "rollout_batches_handed_out", "Batches, repeated ones included", registry=self.registry
        )
        self.age = Histogram(
            "rollout_group_age_versions",
            "Weight versions between sampling and handing out",
            buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64),
            registry=self.registry,
        )
        self._queue, self._post_space = queue, post_space
        self.registry.register(self)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        self.requests.labels(method if method in METHODS else "other", route, str(status)).inc()
        self.request_seconds.labels(route).observe(seconds)

    def posted(self, group: ValidatedGroup, receipt: Receipt) -> None:
        """Count one posted group."""
        self.groups.labels(receipt.status).inc()
        self.sequences.inc(group.size)
        self.bytes.inc(len(group.body))

    def handed_out(self, lease: Lease) -> None:
        """Count one batch."""
        self.batches.inc()
        trained_at = self._queue().trainer_version() - 1
        for group in lease.groups:
            self.age.observe(max(0, trained_at - group.version))

    def text(self) -> bytes:
        """The exposition format of Prometheus."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the totals as they are now. A store in memory has no disk."""
        queue, space = self._queue(), self._post_space.figures()
        for name, (text, value_of) in GAUGES.items():
            yield GaugeMetricFamily(name, text, value_of(queue))
        for name, (text, value_of) in COUNTERS.items():
            yield CounterMetricFamily(name, text, value_of(queue))
        drops = CounterMetricFamily(
            "rollout_groups_dropped", "Groups dropped", labels=["reason", "longest_up_to"]
        )
        for (reason, bucket), count in sorted(queue.drops.items()):
            drops.add_metric([reason, str(bucket)], count)
        yield drops
        if space is not None:
            for name, (text, value_in) in SPACE_GAUGES.items():
                yield GaugeMetricFamily(name, text, value_in(space))
