"""The choice of groups for the next batch, their order of use, and the number of groups that each
environment should sample. Pure functions.

**Order of preference in a batch** (`form_batch`). First come the groups that a
`min_batch_allocation` has reserved. Then, under a staleness bound, come the groups of environments
that send no more than is wanted of them. The oldest weight version goes first, so that none becomes
too old before it was learned from. Then comes start-time fair queueing over the environments
(Goyal, Vin and Cheng, 1996). Each environment has a clock that advances by size / weight when a
group of it is handed out. The lowest clock goes next; within an environment, the oldest group does.
The batch is the first set in that order of all sets of whole groups that fill it exactly. The error
is bounded while two environments both have groups waiting. Their sequences per weight differ by at
most the sum of one group per weight of each. The groups that exact packing had to pass over come on
top.

**Packing** (`choose_exact`): whole groups whose sizes add up to exactly a target. It prefers groups
that come first: the answer is the lexicographically smallest set of positions that works. So the
first group that can be part of any exact choice is always part of the one returned. That is what
"oldest first" and "no group is starved" rest on.

**Replay** (`in_order_of_use`): a group that a trainer has learned from goes back to its line until
it was used `max_reuse` times or is too old. While it is out in a batch it is in no line. So no
batch holds it twice, and no two batches hold it at a time. All of it follows from what is stored,
so that a restart changes nothing.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from atroposlib.service.records import Environment, Group
from atroposlib.service.schemas import ReplayOptions

MIN_WEIGHT = 0.01
"""An environment of weight 0 still gets a turn now and then, as the wire's env_weight requires."""
_KEY = struct.Struct("<QQQ")


def is_plain(options: ReplayOptions) -> bool:
    """Return True if each group is used once, oldest first: lines are in this order already."""
    return options.policy == "fifo" and options.max_reuse == 1


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
        lines: waiting groups by environment, each line in the order in which its groups shall be
            used.
        environments: by id; their clocks and weights set the order.
        reservations: sequences of this batch that are kept for an environment, rounded down to
            whole groups.
        horizon: sequences that can be handed out before what is sampled now is too old; None
            without a staleness bound.
    """
    preferred: list[Group] = []
    for env_id, reserved in reservations.items():
        share = _first_groups(lines[env_id].values(), reserved)
        size = sum(group.size for group in share)
        line_ended = len(share) == len(lines[env_id])
        if line_ended and size + environments[env_id].group_size <= reserved:
            reason = f"{reserved:.0f} sequences are reserved for environment {env_id}"
            return None, f"{reason}, which has {size} waiting"
        preferred += share
    order = preferred + _others(batch_size, lines, environments, preferred, horizon)
    chosen = choose_exact([group.size for group in order], batch_size)
    if chosen is None:
        sizes = dict(sorted(Counter(group.size for group in order).items()))
        reason = f"no choice of whole groups adds up to {batch_size}"
        return None, f"{reason} (waiting, as size: groups that matter: {sizes})"
    return [order[position] for position in chosen], None


def _first_groups(line: Iterable[Group], most: float) -> list[Group]:
    """Return the groups at the beginning of a line that have at most so many sequences together."""
    first: list[Group] = []
    for group in line:
        most -= group.size
        if most < 0:
            break
        first.append(group)
    return first


def _others(
    batch_size: int,
    lines: Mapping[int, Mapping[int, Group]],
    environments: Mapping[int, Environment],
    preferred: list[Group],
    horizon: int | None,
) -> list[Group]:
    """Return the groups beside the preferred ones, in the order in which a batch takes them.

    The clocks of the environments decide. Where an environment's line fits the staleness bound, its
    oldest versions come first.
    """
    first = {group.seq for group in preferred}
    weights = {
        env_id: max(environments[env_id].weight, MIN_WEIGHT)
        for env_id, line in lines.items()
        if line
    }
    most = _most_per_weight(horizon or 0, weights, environments)
    entries: list[tuple[tuple[float, float, int], Group]] = []
    for env_id, weight in weights.items():
        by_version = False
        if horizon is not None:
            waiting = sum(group.size for group in lines[env_id].values() if not group.uses)
            by_version = waiting <= most * weight
        clock = environments[env_id].clock
        for group in _useful(lines[env_id], batch_size):
            if group.seq not in first:
                version = group.version if by_version and not group.uses else math.inf
                entries.append(((version, clock, group.seq), group))
            clock += group.size / weight
    entries.sort(key=lambda entry: entry[0])
    return [group for _, group in entries]


def _most_per_weight(
    horizon: int, weights: Mapping[int, float], environments: Mapping[int, Environment]
) -> float:
    """Return the most sequences that `apportion` can have asked of an environment, per weight.

    Where it stops, let r be the largest ratio of sequences to weight. Every other environment has
    at least r * weight - group_size, or the last group would have been its own. Together they hold
    the horizon and one group at most: r * sum(weights) <= horizon + max(...) + sum(...).
    """
    sizes = [environment.group_size for environment in environments.values()]
    total = horizon + max(sizes, default=0) + sum(sizes)
    return total / (sum(weights.values()) or 1.0)


def _useful(line: Mapping[int, Group], batch_size: int) -> list[Group]:
    """The earliest groups of each size, as many as could fit into one batch; the others cannot
    change what is chosen.
    """
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


def apportion(
    total: int, waiting: Mapping[int, int], environments: Sequence[Environment], most: int
) -> dict[int, int]:
    """Return how many groups each environment should add so that `total` sequences wait in all,
    shared by weight.

    Whole groups go one at a time to the environment that is furthest below its share. So the shares
    of several environments together never fall short of the total by a whole group of each.

    Args:
        total: sequences wanted.
        waiting: sequences that each line already holds, lines of no environment included.
        environments: the ones that sample now.
        most: groups to give out at most, which bounds the work.
    """
    shares = {environment.env_id: 0 for environment in environments}
    have = {environment.env_id: waiting.get(environment.env_id, 0) for environment in environments}
    left = total - sum(waiting.values())
    while left > 0 and environments and most > 0:
        next_up = min(
            environments,
            key=lambda environment: (
                (have[environment.env_id] + environment.group_size)
                / max(environment.weight, MIN_WEIGHT),
                environment.env_id,
            ),
        )
        shares[next_up.env_id] += 1
        have[next_up.env_id] += next_up.group_size
        left -= next_up.group_size
        most -= 1
    return shares


def choose_exact(sizes: Sequence[int], target: int) -> list[int] | None:
    """Return the positions of the earliest sizes that add up to exactly `target`, ascending; None
    if no choice does.

    Subset sum by dynamic programming over a bit set: bit s shows that some of the sizes behind a
    position add up to s. An exact choice never needs more than target // size of one size, and the
    earliest are always as good, so the target bounds the work. The first pass goes from the end to
    the front, and keeps the bits that each size adds. The second pass goes from the front, and
    takes them away again.

    Args:
        sizes: group sizes in sequences, all >= 1, in order of preference.
        target: the sum to reach, >= 1.
    """
    if target < 1:
        return None
    for position, total in enumerate(accumulate(sizes)):
        if total == target:  # the common case, groups of one size: the first ones just fit
            return list(range(position + 1))
        if total > target:
            break
    else:
        return None

    candidates = _candidates(sizes, target)
    all_sums = (1 << (target + 1)) - 1
    reachable = 1
    added: dict[int, tuple[int, int]] = {}
    """By position: the bits that it adds, without the zeros below them, and how many zeros these
    are. Most sizes add one bit or none."""
    for position in reversed(candidates):
        larger = (reachable | reachable << sizes[position]) & all_sums
        if larger != reachable:
            new = larger ^ reachable
            zeros = (new & -new).bit_length() - 1
            added[position] = (new >> zeros, zeros)
            reachable = larger
    if not reachable >> target & 1:
        return None
    chosen, left = [], target
    for position in candidates:
        if position in added:
            new, zeros = added[position]
            reachable ^= new << zeros
        size = sizes[position]
        if size <= left and reachable >> (left - size) & 1:
            chosen.append(position)
            left -= size
    return chosen


def _candidates(sizes: Sequence[int], target: int) -> list[int]:
    """Return the positions that an exact choice may need: the first target // size of each size."""
    counts: Counter[int] = Counter()
    candidates = []
    for position, size in enumerate(sizes):
        if counts[size] < target // size:
            counts[size] += 1
            candidates.append(position)
    return candidates


def choose_multiple(sizes: Sequence[int], unit: int, limit: int) -> list[int] | None:
    """Positions of the earliest sizes that add up to the smallest possible multiple of `unit` up to
    `limit`; None if none.
    """
    for target in range(unit, min(limit, sum(sizes)) + 1, unit):
        chosen = choose_exact(sizes, target)
        if chosen is not None:
            return chosen
    return None


def in_order_of_use(replay: ReplayOptions, line: Iterable[Group], batch_id: int) -> list[Group]:
    """Return the groups of a line in the order of their use.

    `fifo`: the least often used first, and the oldest of them. `recent`: the newest weights first,
    then the least often used, then the last to come. `uniform`: every order is as likely as any
    other. It follows from the seed, the batch and the groups' numbers.

    Args:
        replay: the trainer's options.
        line: groups that wait.
        batch_id: of the batch that they are chosen for.
    """
    if replay.policy == "recent":
        return sorted(line, key=lambda group: (-group.version, group.uses, -group.seq))
    if replay.policy == "uniform":
        return sorted(
            line, key=lambda group: (_number(replay.seed, batch_id, group.seq), group.seq)
        )
    return sorted(line, key=lambda group: (group.uses, group.seq))


def _number(seed: int, batch_id: int, seq: int) -> bytes:
    """As good as random, and always the same."""
    return hashlib.blake2b(_KEY.pack(seed, batch_id, seq), digest_size=8).digest()
