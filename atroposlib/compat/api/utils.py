"""Batch formation on plain lists of groups, for code that keeps its own queue.

A group is a dict whose "tokens" holds one list of token ids per sequence; its size is the number of
sequences. The names and call signatures are Atropos's. The service itself uses
`queue.rollout_queue`, on the same packing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.service.scheduling import choose_exact

Group = dict[str, Any]


def group_size(group: Mapping[str, Any]) -> int:
    """Return the number of sequences of a group."""
    return len(group["tokens"])


def find_groups_summing_to_target(buffer: list[Group], target_size: int) -> list[int]:
    """Indices of the earliest groups whose sizes add up to exactly `target_size`; empty if no
    choice does.

    Args:
        buffer: groups in order of arrival.
        target_size: the number of sequences wanted.
    """
    # An empty group adds nothing to a sum and would only be handed out as a hole in a batch: it is
    # never chosen.
    present = [index for index, group in enumerate(buffer) if group_size(group) > 0]
    chosen = choose_exact([group_size(buffer[index]) for index in present], target_size)
    return [present[position] for position in chosen or []]


def _split(queue: Sequence[Group], chosen: list[int]) -> tuple[list[Group] | None, list[Group]]:
    if not chosen:
        return None, list(queue)
    taken = set(chosen)
    return [queue[i] for i in chosen], [group for i, group in enumerate(queue) if i not in taken]


def grab_exact_from_heterogeneous_queue(
    queue: list[Group], batch_size: int
) -> tuple[list[Group] | None, list[Group]]:
    """Take whole groups of exactly `batch_size` sequences from the queue, oldest first.

    Returns:
        The batch, or None if no choice of whole groups adds up exactly; and what remains, in its
        old order.
    """
    return _split(queue, find_groups_summing_to_target(queue, batch_size))


def grab_batch_with_minimum_allocations(
    queue: list[Group], batch_size: int, env_configs: list[dict[str, Any]]
) -> tuple[list[Group] | None, list[Group]]:
    """Take a batch in which every environment with a `min_batch_allocation` has at least its share.

    Args:
        queue: groups in order of arrival, each with an "env_id" (or without: it belongs to no
            environment).
        batch_size: sequences in a batch.
        env_configs: dicts with "registered_id", "min_batch_allocation" (fraction of a batch, or
            None) and "connected" (a missing id counts as the dict's index). Shares above 1 in sum
            are scaled down to 1. An environment that is not connected reserves nothing.

    Returns:
        The batch, reserved groups first, and the groups that remain. None and the whole queue if no
        choice adds up exactly. The same holds if an environment that reserves sequences has no
        groups of one size that fill the largest group's size.
    """
    shares: dict[Any, float] = {}
    for index, config in enumerate(env_configs):
        share = config.get("min_batch_allocation")
        if share and int(batch_size * share) and config.get("connected", False):
            shares[config.get("registered_id", index)] = float(share)
    scale = max(1.0, sum(shares.values()))

    reserved: list[int] = []
    if not all(has_a_pack(queue, env_id) for env_id in shares):
        return None, list(queue)
    for env_id, share in shares.items():
        target = share / scale * batch_size
        have = 0
        for index, group in enumerate(queue):
            if have >= target:
                break
            # Rounding up to whole groups must not push the shares of all environments together over
            # the batch.
            if group.get("env_id") == env_id and have + group_size(group) <= max(
                target, group_size(group)
            ):
                reserved.append(index)
                have += group_size(group)
        if have == 0:
            return None, list(queue)

    first = set(reserved)
    order = reserved + [
        index for index in range(len(queue)) if index not in first and group_size(queue[index]) > 0
    ]
    chosen = choose_exact([group_size(queue[index]) for index in order], batch_size)
    if chosen is None:
        return None, list(queue)
    picked = [order[position] for position in chosen]
    for env_id in shares:
        if not any(queue[index].get("env_id") == env_id for index in picked):
            return None, list(queue)
    return _split(queue, picked)


def has_a_pack(queue: Sequence[Group], env_id: Any) -> bool:
    """Return whether an environment's groups of one size add up to the size of the largest group."""
    largest = max(map(group_size, queue), default=0)
    sizes = Counter(group_size(group) for group in queue if group.get("env_id") == env_id)
    return any(
        size and largest % size == 0 and count * size >= largest for size, count in sizes.items()
    )
