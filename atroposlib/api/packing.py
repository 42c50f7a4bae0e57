"""Choosing whole groups whose sizes add up to exactly a target. Pure functions, no I/O.

Both functions prefer what comes first: the answer is the lexicographically smallest set of positions that works, so the
first group that can be part of any exact choice is always part of the one returned. That is what "oldest first" and "no
group is starved" rest on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def choose_exact(sizes: Sequence[int], target: int) -> list[int] | None:
    """Positions of the earliest sizes that add up to exactly `target`, ascending; None if no choice does.

    Subset sum by dynamic programming over bit sets: bit s of the set at i says that some of sizes[i:] add up to s. Of
    equal sizes an exact choice never needs more than target // size, and the earliest are always as good, so the work is
    bounded by the target and not by how many sizes there are. The sets are made from the end and read from the front; of n
    only every sqrt(n)-th is kept, and those between two are made a second time when they are needed, so that memory is
    about 2 * sqrt(n) * target / 8 bytes.

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

    def with_one_more(reachable: int, position: int) -> int:
        return (reachable | (reachable << sizes[position])) & everything

    step = math.isqrt(len(candidates)) + 1
    kept: dict[int, int] = {}
    """Sets by the index in `candidates` behind which they look."""
    reachable = 1
    for index in range(len(candidates), 0, -1):
        if index == len(candidates) or index % step == 0:
            kept[index] = reachable
        reachable = with_one_more(reachable, candidates[index - 1])
    if not reachable >> target & 1:
        return None
    chosen, left = [], target
    for start in range(0, len(candidates), step):
        end = min(start + step, len(candidates))
        behind = [kept.pop(end)]
        for index in range(end - 1, start, -1):
            behind.append(with_one_more(behind[-1], candidates[index]))
        for index, after in zip(range(start, end), reversed(behind), strict=True):
            size = sizes[candidates[index]]
            if size <= left and after >> (left - size) & 1:
                chosen.append(candidates[index])
                left -= size
    return chosen


def choose_multiple(sizes: Sequence[int], unit: int, limit: int) -> list[int] | None:
    """Positions of the earliest sizes that add up to the smallest possible multiple of `unit` up to `limit`; None if none."""
    for target in range(unit, min(limit, sum(sizes)) + 1, unit):
        chosen = choose_exact(sizes, target)
        if chosen is not None:
            return chosen
    return None
