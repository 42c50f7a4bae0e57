"""Batches that end the trainers that train on them: counted, and set aside before they end many. Pure: no I/O, no clock.

The first batch that a trainer holds is the one that it trains on. A trainer that ends with it reports so, with the error if the
batch may be the cause (POST /batch/report). A trainer that was killed reports nothing. Both are counted for the groups of the
batch, so that the count lasts if the batch is taken apart.
"""

from __future__ import annotations

from typing import Any

from atroposlib.service.queue_state import QueueState
from atroposlib.service.records import Group, Lease

ERROR_COUNTS, KILL_COUNTS, LIMIT = 3, 1, 5
"""An error in training on a batch counts for three kills. So a batch is set aside after two errors, or five kills, or an error
and two kills: a person who kills a trainer by hand does so a few times at most, and must not lose the batch by it."""
MOST_SET_ASIDE = 8
"""Batches that are kept for inspection; the oldest are forgotten first."""


class SettingAside(QueueState):
    """The rules by which batches are set aside."""

    def report_end(self, batch_id: int, error: str | None) -> None:
        """A trainer ends with a batch that it has not acknowledged.

        Args:
            batch_id: of the batch that it trained on.
            error: that training on it raised; None if something else ended the trainer.
        """
        lease = self.leases.get(batch_id)
        if lease is None or lease.returned or batch_id in self.failures.reported:
            return
        self.failures.reported.add(batch_id)
        self._state_changed = True
        if error is not None and self._count(lease, ERROR_COUNTS, error):
            self.current_step -= 1  # it counts as never handed out, as an answer that did not arrive

    def _session_ended(self, counts: bool) -> None:
        """A trainer registers: count the batch that the trainer before had in training, if it did not report its end."""
        out = self._out() if counts else []
        if out and out[0].sent and out[0].batch_id not in self.failures.reported:
            self._count(out[0], KILL_COUNTS, "a trainer ended without a report, as by a kill or for want of memory")
        self.failures.reported.clear()

    def _count(self, lease: Lease, weight: int, reason: str) -> bool:
        """Count a failure for each group of a batch. Returns whether that sets the batch aside."""
        counts = self.failures.counts
        for group in lease.groups:
            counts[group.seq] = counts.get(group.seq, 0) + weight
        self._state_changed = True
        if max(counts[group.seq] for group in lease.groups) < LIMIT:
            return False
        self._set_aside(lease, reason)
        return True

    def _set_aside(self, lease: Lease, reason: str) -> None:
        del self.leases[lease.batch_id]
        lease.returned = True
        self._note_lease(lease)
        self.held_groups -= len(lease.groups)
        self.held_bytes -= sum(group.n_bytes for group in lease.groups)
        failures = self.failures
        failures.forget(lease.groups)
        failures.batches[lease.batch_id] = (lease, reason)
        failures.new.append(lease.batch_id)
        failures.total += 1
        while len(failures.batches) > MOST_SET_ASIDE:
            oldest, _ = failures.batches.pop(min(failures.batches))
            self.changes.leases_removed.append(oldest.batch_id)
            self.changes.removed.extend(group.seq for group in oldest.groups)
            self.streams.forget(oldest.groups)

    def take_set_aside(self) -> list[str]:
        """Describe the batches that were set aside since the last call, one line each."""
        new, self.failures.new = self.failures.new, []
        return [self._describe(*self.failures.batches[batch_id]) for batch_id in new if batch_id in self.failures.batches]

    def _describe(self, lease: Lease, reason: str) -> str:
        names = ", ".join(sorted({self._name_of(group) for group in lease.groups}))
        seqs = ", ".join(str(group.seq) for group in lease.groups)
        return (
            f"batch {lease.batch_id} is set aside, because trainers ended while they trained on it; the last time: {reason}. "
            f"Its groups {seqs} of {names} are handed out no more; GET /batch/set-aside?batch_id={lease.batch_id} returns them"
        )

    def _name_of(self, group: Group) -> str:
        return self.registry.by_id[group.line].wandb_name or "clients that did not register"

    def set_aside(self) -> list[dict[str, Any]]:
        """The batches that were set aside, the oldest first."""
        return [
            {
                "batch_id": batch_id,
                "reason": reason,
                "groups": [
                    {"id": group.seq, "environment": self._name_of(group), "sequences": group.size, "longest": group.longest}
                    for group in lease.groups
                ],
            }
            for batch_id, (lease, reason) in sorted(self.failures.batches.items())
        ]
