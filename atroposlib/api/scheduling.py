"""Which groups make the next batch, and how many each environment should sample. Pure functions.

Order of preference in a batch: first what a `min_batch_allocation` has reserved; then, under a staleness bound, the
groups of environments that keep to what is wanted of them, oldest weight version first, so that none becomes too old before
it was learned from;
then start-time fair queueing over the environments (Goyal, Vin and Cheng, 1996): each environment has a clock that
advances by size / weight when a group of it is handed out, and the lowest clock goes next; within an environment, oldest
first. Of all sets of whole groups that fill the batch exactly, the one that comes first in that order is taken.

The error: while two environments both have groups waiting, their sequences per weight differ by at most the sum of one
group per weight of each, plus what exact packing had to pass over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from atroposlib.api.packing import choose_exact
from atroposlib.api.state import Environment, Group

LEAST_WEIGHT = 0.01
"""An environment of weight 0 still gets a turn now and then, as the wire's env_weight says."""


def form_batch(
    batch_size: int,
    lines: Mapping[int, Mapping[int, Group]],
    environments: Mapping[int, Environment],
    reservations: Mapping[int, float],
    horizon: int | None = None,
) -> tuple[list[Group] | None, str | None]:
    """The groups of the next batch, or None and the reason why there is none yet.

    Args:
        batch_size: sequences in a batch, to be met exactly.
        lines: waiting groups by environment, each line in the order in which its groups shall be used.
        environments: by id; their clocks and weights set the order.
        reservations: sequences of this batch that are kept for an environment, rounded down to whole groups.
        horizon: sequences that can be handed out before what is sampled now is too old; None without a staleness bound.
    """
    preferred: list[Group] = []
    for env_id, reserved in reservations.items():
        have = 0
        for group in lines[env_id].values():
            if have + group.size > reserved:
                break
            preferred.append(group)
            have += group.size
        else:  # the line ended before the share was full
            if have + environments[env_id].group_size <= reserved:
                return None, f"{reserved:.0f} sequences are reserved for environment {env_id}, which has {have} waiting"

    first = {group.seq for group in preferred}
    weights = {env_id: max(environments[env_id].weight, LEAST_WEIGHT) for env_id, line in lines.items() if line}
    others: list[tuple[tuple[float, float, int], Group]] = []
    group_sizes = [environment.group_size for environment in environments.values()]
    # The most that `apportion` can have asked of an environment, per weight. Where it stops, let r be the largest ratio of
    # sequences to weight: every other environment has at least r * weight - group_size, or the last group would have been
    # its own, and together they hold the horizon and one group at most: r * sum(weights) <= horizon + max(...) + sum(...).
    most = ((horizon or 0) + max(group_sizes, default=0) + sum(group_sizes)) / (sum(weights.values()) or 1.0)
    for env_id, weight in weights.items():
        useful = _useful(lines[env_id], batch_size)
        waits = sum(group.size for group in lines[env_id].values() if not group.uses) if horizon is not None else 0
        by_version = horizon is not None and waits <= most * weight
        clock = environments[env_id].clock
        for group in useful:
            if group.seq not in first:
                others.append(((group.version if by_version and not group.uses else math.inf, clock, group.seq), group))
            clock += group.size / weight
    others.sort(key=lambda entry: entry[0])
    order = preferred + [group for _, group in others]
    chosen = choose_exact([group.size for group in order], batch_size)
    if chosen is None:
        sizes = dict(sorted(Counter(group.size for group in order).items()))
        return None, f"no choice of whole groups adds up to {batch_size} (waiting, as size: groups that matter: {sizes})"
    return [order[position] for position in chosen], None


def _useful(line: Mapping[int, Group], batch_size: int) -> list[Group]:
    """The earliest groups of each size, as many as could fit into one batch; the others cannot change what is chosen."""
    left = Counter(group.size for group in line.values())
    used: Counter[int] = Counter()
    useful = []
    for group in line.values():
        if group.size in left:
            useful.append(group)
            used[group.size] += 1
            if used[group.size] >= batch_size // group.size:
                del left[group.size]
                if not left:
                    break
    return useful


def apportion(total: int, waiting: Mapping[int, int], environments: Sequence[Environment], most: int) -> dict[int, int]:
    """How many groups each environment should add so that `total` sequences wait in all, shared by weight.

    Whole groups are given one at a time to whoever is furthest below its share, so that the shares of several
    environments together never fall short of the total by a whole group of each.

    Args:
        total: sequences wanted.
        waiting: sequences that each line already holds, lines of no environment included.
        environments: those that sample now.
        most: groups to give out at most, which bounds the work.
    """
    wanted = {environment.env_id: 0 for environment in environments}
    have = {environment.env_id: waiting.get(environment.env_id, 0) for environment in environments}
    left = total - sum(waiting.values())
    while left > 0 and environments and most > 0:
        next_up = min(
            environments,
            key=lambda environment: (
                (have[environment.env_id] + environment.group_size) / max(environment.weight, LEAST_WEIGHT),
                environment.env_id,
            ),
        )
        wanted[next_up.env_id] += 1
        have[next_up.env_id] += next_up.group_size
        left -= next_up.group_size
        most -= 1
    return wanted
