"""Counts of the trainers that ended while they trained on a batch. The rules are in `set_aside`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atroposlib.service.records import Group, Lease


@dataclass
class Failures:
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
    def restored(cls, state: Mapping[str, Any], leases: dict[int, Lease]) -> Failures:
        """Restore what `stored` returned, and take the batches that were set aside out of `leases`."""
        counts = {seq: count for seq, count in state.get("counts", [])}
        batches = {
            batch_id: (leases.pop(batch_id), reason) for batch_id, reason in state.get("reasons", []) if batch_id in leases
        }
        return cls(counts, set(state.get("reported", [])), batches, state.get("total", 0))

    def forget(self, groups: Iterable[Group]) -> None:
        """Forget the counts of groups that are gone, or that were learned from."""
        for group in groups:
            self.counts.pop(group.seq, None)

    def groups(self) -> list[Group]:
        """The groups of all batches that were set aside."""
        return [group for lease, _ in self.batches.values() for group in lease.groups]
