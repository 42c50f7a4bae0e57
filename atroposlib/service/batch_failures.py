"""Batches that end the trainers that train on them: counted, and set aside before they end many.
Pure: no I/O, no clock.

The first batch that a trainer holds is the one that it trains on. A trainer that ends with it
reports so (POST /batch/report), with the error if the batch may be the cause. A killed trainer
reports nothing. Both are counted for the groups of the batch, so that the count lasts if the batch
is dissolved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atroposlib.service.records import Group, Lease

ERROR_COUNTS, KILL_COUNTS, LIMIT = 3, 1, 5
"""An error in training on a batch counts for three kills. So a batch is set aside after two errors,
or five kills, or an error and two kills. A person who kills a trainer by hand does so a few times
at most, and must not lose the batch by it."""
MAX_SET_ASIDE = 8
"""Batches that are kept for inspection; the oldest are forgotten first."""


@dataclass
class BatchFailures:
    """The counts of one service, and the batches that were set aside."""

    counts: dict[int, int] = field(default_factory=dict)
    """By the sequence number of a group."""
    reported: set[int] = field(default_factory=set)
    """Batches with which their trainer has reported its end."""
    batches: dict[int, tuple[Lease, str]] = field(default_factory=dict)
    """The batches that were set aside, with the reason, by number."""
    total: int = 0
    """Batches that were ever set aside."""
    new: list[int] = field(default_factory=list)
    """Batches that were set aside since the log named some last."""

    def stored(self) -> dict[str, Any]:
        """The state to be stored, as JSON. The store keeps the leases and their groups."""
        return {
            "counts": list(self.counts.items()),
            "reported": sorted(self.reported),
            "reasons": [[batch_id, reason] for batch_id, (_, reason) in self.batches.items()],
            "total": self.total,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], leases: dict[int, Lease]) -> BatchFailures:
        """Restore what `stored` returned, and take the batches that were set aside out of `leases`."""
        counts = {seq: count for seq, count in state.get("counts", [])}
        batches = {
            batch_id: (leases.pop(batch_id), reason)
            for batch_id, reason in state.get("reasons", [])
            if batch_id in leases
        }
        return cls(counts, set(state.get("reported", [])), batches, state.get("total", 0))

    def count(self, lease: Lease, weight: int) -> bool:
        """Count a failure for each group of a batch.

        Return True if the batch has reached the limit.
        """
        for group in lease.groups:
            self.counts[group.seq] = self.counts.get(group.seq, 0) + weight
        return max(self.counts[group.seq] for group in lease.groups) >= LIMIT

    def set_aside(self, lease: Lease, reason: str) -> list[Lease]:
        """Keep a batch that has reached the limit. Return the batches that are forgotten for it."""
        self.forget(lease.groups)
        self.batches[lease.batch_id] = (lease, reason)
        self.new.append(lease.batch_id)
        self.total += 1
        forgotten = []
        while len(self.batches) > MAX_SET_ASIDE:
            forgotten.append(self.batches.pop(min(self.batches))[0])
        return forgotten

    def forget(self, groups: Iterable[Group]) -> None:
        """Forget the counts of groups that are gone, or that were learned from."""
        for group in groups:
            self.counts.pop(group.seq, None)

    def groups(self) -> list[Group]:
        """The groups of all batches that were set aside."""
        return [group for lease, _ in self.batches.values() for group in lease.groups]
