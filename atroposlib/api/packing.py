"""Choosing whole groups whose sizes add up to exactly a target. Pure functions, no I/O.

Both functions prefer what comes first: the answer is the lexicographically smallest set of positions that works, so the
first group that can be part of any exact choice is always part of the one returned. That is what "oldest first" and "no
group is starved" rest on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def choose_exact(sizes: Sequence[int], target: int) -> list[int] | None:
    """Positions of the earliest sizes that add up to exactly `target`, ascending; None if no choice does.

    Subset sum by dynamic programming over bit sets: bit s of `reachable[i]` says that some of sizes[i:] add up to s. Of
    equal sizes an exact choice never needs more than target // size, and the earliest are always as good, so the work is
    bounded by the target and not by how many sizes there are.

    Args:
        sizes: group sizes in sequences, all >= 1, in order of preference.
        target: the sum to reach, >= 1.
    """
    if target < 1:
        return None
    total = 0
    for position, size in enumerate(sizes):  # the common case, groups of one size: the first ones just fit
        total += size
        if total == target:
            return list(range(position + 1))
        if total > target:
            break
    else:
        return None

    used: Counter[int] = Counter()
    candidates = []
    for position, size in enumerate(sizes):
        if size <= target and used[size] < target // size:
            used[size] += 1
            candidates.append(position)
    everything = (1 << (target + 1)) - 1
    reachable = [1]
    for position in reversed(candidates):
        reachable.append((reachable[-1] | (reachable[-1] << sizes[position])) & everything)
    reachable.reverse()
    if not reachable[0] >> target & 1:
        return None
    chosen, left = [], target
    for index, position in enumerate(candidates):
        if sizes[position] <= left and reachable[index + 1] >> (left - sizes[position]) & 1:
            chosen.append(position)
            left -= sizes[position]
    return chosen


def choose_multiple(sizes: Sequence[int], unit: int, limit: int) -> list[int] | None:
    """Positions of the earliest sizes that add up to the smallest possible multiple of `unit` up to `limit`; None if none."""
    for target in range(unit, min(limit, sum(sizes)) + 1, unit):
        chosen = choose_exact(sizes, target)
        if chosen is not None:
            return chosen
    return None
