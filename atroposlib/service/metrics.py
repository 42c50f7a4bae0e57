"""Counters and gauges of the rollout service, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import NOBODY, Lease, Receipt, ValidatedGroup
from atroposlib.service.store import PostSpace

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that are counted by name; each further label is a row that is kept for ever."""


class Metrics:
    """One registry per service.

    Args:
        queue: returns the current queue, whose totals are read when Prometheus asks.
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
        self.registry.register(_QueueState(queue))
        self.registry.register(_StoreSpace(post_space))
        self._queue = queue

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


class _QueueState(Collector):
    """Reads the queue when Prometheus asks."""

    def __init__(self, queue: Callable[[], RolloutQueue]) -> None:
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        """Totals of the queue as they are now."""
        queue = self._queue()
        gauges = {
            "rollout_queue_groups": ("Groups ready for a batch", queue.lines.groups),
            "rollout_queue_sequences": (
                "Sequences ready for a batch",
                queue.lines.total_sequences(),
            ),
            "rollout_buffered_groups": (
                "Groups that wait to be recombined",
                sum(len(b) for b in queue.buffers.values()),
            ),
            "rollout_used_groups_waiting": (
                "Groups that may be learned from again",
                queue.lines.used_groups,
            ),
            "rollout_reference_waiting_groups": (
                "Groups that wait for ref_logprobs",
                len(queue.reference.waiting),
            ),
            "rollout_reference_leased_groups": (
                "Groups at reference workers, overdue ones too",
                len(queue.reference.loans),
            ),
            "rollout_leased_batches": ("Batches not yet acknowledged", len(queue.leases)),
            "rollout_held_groups": ("Groups held in all", queue.held_groups),
            "rollout_held_bytes": ("Bytes held in all", queue.held_bytes),
            "rollout_batches_skipped": (
                "Batches that the trainer could not learn from",
                queue.batches_skipped,
            ),
            "rollout_batches_set_aside": (
                "Batches that ended trainers and are handed out no more",
                queue.failures.total,
            ),
            "rollout_current_step": ("Batches handed out", queue.current_step),
            "rollout_trainer_version": (
                "Weight version of the next batch",
                queue.trainer_version(),
            ),
            "rollout_environments": (
                "Connected environments",
                sum(e.connected for e in queue.registry.by_id.values() if e.env_id != NOBODY),
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value)
        counted = {
            "rollout_group_uses": (
                "Groups in batches that were learned from, each time",
                queue.uses,
            ),
            "rollout_groups_used": ("Groups that were learned from at all", queue.groups_used),
            "rollout_references_answered": (
                "Groups that got their ref_logprobs from workers",
                queue.reference.answered,
            ),
            "rollout_references_unusable": (
                "Groups for which workers could compute none",
                queue.reference.unusable,
            ),
            "rollout_reference_leases_expired": (
                "Groups that a worker kept for too long",
                queue.reference.expired,
            ),
        }
        for name, (text, value) in counted.items():
            yield CounterMetricFamily(name, text, value)
        drops = CounterMetricFamily(
            "rollout_groups_dropped", "Groups dropped", labels=["reason", "longest_up_to"]
        )
        for (reason, bucket), count in sorted(queue.drops.items()):
            drops.add_metric([reason, str(bucket)], count)
        yield drops


class _StoreSpace(Collector):
    """Space of the store's disk, as it was last measured; nothing for a store in memory."""

    def __init__(self, post_space: PostSpace) -> None:
        self._post_space = post_space

    def collect(self) -> Iterator[Metric]:
        """The space, and whether posts are refused for want of it."""
        figures = self._post_space.figures()
        if figures is None:
            return
        yield GaugeMetricFamily(
            "rollout_store_free_bytes", "Free bytes of the store's disk", figures["free_bytes"]
        )
        refusing = figures["refusing_posts"] is not None
        yield GaugeMetricFamily(
            "rollout_store_refusing_posts",
            "1 while posts are refused for want of disk space",
            refusing,
        )
        whole = figures["reserve_is_whole"]
        yield GaugeMetricFamily(
            "rollout_store_reserve_is_whole", "1 if the reserve for batches is there", whole
        )
