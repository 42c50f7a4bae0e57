"""In which order groups of a line are used, and how often. Pure functions of what is stored, so that a restart changes nothing.

A group that a trainer has learned from goes back to its line until it was used `max_reuse` times or is too old. While it is out
in a batch it is in no line, so no batch holds it twice, and no two batches hold it at a time.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from atroposlib.api.state import Group

Policy = Literal["fifo", "recent", "uniform"]
_KEY = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Replay:
    """What a trainer wants of the groups that wait."""

    policy: Policy = "fifo"
    max_reuse: int = 1
    """Batches that a group may be learned from in."""
    seed: int = 0
    """Of the policy uniform."""

    @property
    def is_plain(self) -> bool:
        """Each group once, oldest first: lines are in this order already."""
        return self.policy == "fifo" and self.max_reuse == 1

    def ordered(self, line: Iterable[Group], batch_id: int) -> list[Group]:
        """The groups of a line, those that are to be used first in front.

        fifo: those that were used least often, of these the oldest. recent: those of the newest weights, of these the ones that
        were used least often, and of those the ones that came last. uniform: every order is as likely as any other; it follows
        from the seed, the batch and the groups' numbers.

        Args:
            line: groups that wait.
            batch_id: of the batch that they are chosen for.
        """
        if self.policy == "recent":
            return sorted(line, key=lambda group: (-group.version, group.uses, -group.seq))
        if self.policy == "uniform":
            return sorted(line, key=lambda group: (_number(self.seed, batch_id, group.seq), group.seq))
        return sorted(line, key=lambda group: (group.uses, group.seq))


def _number(seed: int, batch_id: int, seq: int) -> bytes:
    """As good as random, and always the same."""
    return hashlib.blake2b(_KEY.pack(seed, batch_id, seq), digest_size=8).digest()
