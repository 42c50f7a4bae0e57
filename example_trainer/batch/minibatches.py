"""Which rollouts of a batch are learned from together, in one optimizer update.

Pure: no I/O, no state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise


def divide(rollouts: Sequence[tuple[int, bytes]], count: int) -> list[list[int]]:
    """Divide a batch into minibatches of about as many rollouts each.

    Groups stay together where there are as many of them as minibatches: their members have their
    advantages from each other. Where there are fewer, each minibatch has rollouts that stand next
    to each other, group by group. The same rollouts come into the same minibatch in whatever order
    they arrived: content decides.

    Args:
        rollouts: group and digest of the content of each.
        count: of minibatches. With fewer rollouts there are as many minibatches as rollouts: none
            is empty.

    Returns:
        For each minibatch the numbers of its rollouts, ascending.
    """
    count = min(count, len(rollouts))
    if count <= 1:
        return [list(range(len(rollouts)))]
    members: dict[int, list[int]] = {}
    for number, (name, _) in enumerate(rollouts):
        members.setdefault(name, []).append(number)
    # What is alike in all of its content may change places. The number comes last, and settles only
    # that.
    groups = [
        sorted(group, key=lambda number: (rollouts[number][1], number))
        for group in members.values()
    ]
    groups.sort(
        key=lambda group: (
            -len(group),
            hashlib.sha256(b"".join(rollouts[number][1] for number in group)).digest(),
            group,
        )
    )
    if len(groups) < count:
        row = [number for group in groups for number in group]
        bounds = [len(row) * part // count for part in range(count + 1)]
        return [sorted(row[begin:end]) for begin, end in pairwise(bounds)]
    found: list[list[int]] = [[] for _ in range(count)]
    for group in groups:  # the largest first, to where there are fewest
        min(found, key=len).extend(group)
    return [sorted(numbers) for numbers in found]
