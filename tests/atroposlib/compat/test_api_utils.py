"""Batch formation on plain lists: whole groups, exact sums, oldest first, nothing lost or doubled."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.compat.api.utils import (
    find_groups_summing_to_target,
    grab_batch_with_minimum_allocations,
    grab_exact_from_heterogeneous_queue,
)
from atroposlib.service.scheduling import choose_exact, choose_multiple

sizes_and_target = st.tuples(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 24))


def queue_of(sizes: list[int], envs: list[int] | None = None) -> list[dict[str, Any]]:
    return [
        {"tokens": [[index]] * size, **({"env_id": envs[index]} if envs else {})}
        for index, size in enumerate(sizes)
    ]


def ids(groups: list[dict[str, Any]] | None) -> list[int] | None:
    return None if groups is None else [group["tokens"][0][0] for group in groups]


def first_by_brute_force(sizes: list[int], target: int) -> list[int] | None:
    """The lexicographically smallest set of positions with that sum."""
    found = [
        list(chosen)
        for count in range(1, len(sizes) + 1)
        for chosen in combinations(range(len(sizes)), count)
        if sum(sizes[position] for position in chosen) == target
    ]
    return min(found, default=None)


@given(sizes_and_target)
def test_choose_exact_is_the_earliest_choice_there_is(case: tuple[list[int], int]) -> None:
    sizes, target = case
    assert choose_exact(sizes, target) == first_by_brute_force(sizes, target)


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(1, 4), st.integers(1, 16))
def test_choose_multiple_takes_the_smallest_multiple(
    sizes: list[int], unit: int, limit: int
) -> None:
    answers = [first_by_brute_force(sizes, target) for target in range(unit, limit + 1, unit)]
    assert choose_multiple(sizes, unit, limit) == next(
        (answer for answer in answers if answer is not None), None
    )


@given(sizes_and_target)
def test_exact_batches_neither_split_nor_lose_nor_double_a_group(
    case: tuple[list[int], int],
) -> None:
    sizes, target = case
    queue = queue_of(sizes)
    batch, rest = grab_exact_from_heterogeneous_queue(queue, target)
    assert sorted((ids(batch) or []) + (ids(rest) or [])) == list(range(len(sizes)))
    assert rest == [group for group in queue if group in rest], "the rest keeps its order"
    if batch is not None:
        assert sum(len(group["tokens"]) for group in batch) == target
        assert ids(batch) == sorted(ids(batch) or []), "oldest first"
    else:
        assert first_by_brute_force(sizes, target) is None, "a batch could have been made"


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), max_size=9),
    st.integers(1, 12),
    st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=3, max_size=3),
)
def test_minimum_allocations_keep_batches_exact(
    entries: list[tuple[int, int]], target: int, shares: list[float | None]
) -> None:
    queue = queue_of([size for size, _ in entries], [env for _, env in entries])
    configs = [
        {"registered_id": index, "min_batch_allocation": share, "connected": True}
        for index, share in enumerate(shares)
    ]
    batch, rest = grab_batch_with_minimum_allocations(queue, target, configs)
    assert sorted((ids(batch) or []) + (ids(rest) or [])) == list(range(len(entries)))
    if batch is None:
        assert rest == queue
        return
    assert sum(len(group["tokens"]) for group in batch) == target
    for env_id, share in enumerate(shares):
        if share and int(target * share):
            assert any(group["env_id"] == env_id for group in batch)


def test_a_reserved_share_goes_first() -> None:
    queue = queue_of([2] * 9, [1, 1, 1, 1, 1, 0, 0, 0, 0])
    configs = [{"registered_id": 0, "min_batch_allocation": 0.5, "connected": True}]
    batch, rest = grab_batch_with_minimum_allocations(queue, 8, configs)
    assert ids(batch) == [5, 6, 0, 1]
    assert ids(rest) == [2, 3, 4, 7, 8]


@pytest.mark.parametrize(
    ("connected", "expected"), [(True, None), (False, [0, 1])], ids=["reserving", "disconnected"]
)
def test_an_environment_without_data_holds_its_share_only_while_connected(
    connected: bool, expected: list[int] | None
) -> None:
    configs = [{"registered_id": 0, "min_batch_allocation": 0.5, "connected": connected}]
    batch, _ = grab_batch_with_minimum_allocations(queue_of([4, 4, 4], [1, 1, 1]), 8, configs)
    assert ids(batch) == expected


def test_find_groups_prefers_the_oldest() -> None:
    assert find_groups_summing_to_target(queue_of([3, 2, 2, 1]), 4) == [0, 3]
    assert find_groups_summing_to_target(queue_of([3]), 4) == []
    assert find_groups_summing_to_target([{"tokens": []}, *queue_of([4])], 4) == [1]


def test_a_share_of_less_than_a_sequence_reserves_nothing() -> None:
    configs = [{"registered_id": e, "min_batch_allocation": 0.1, "connected": True} for e in (0, 1)]
    batch, _ = grab_batch_with_minimum_allocations(queue_of([4, 4], [0, 0]), 8, configs)
    assert batch is not None, (
        "of 8 sequences a tenth is none: environment 1, which has no groups, holds nothing up"
    )
    assert grab_batch_with_minimum_allocations(queue_of([4] * 4, [0] * 4), 16, configs)[0] is None


def test_who_reserves_and_cannot_fill_the_largest_groups_size_holds_the_batch_up() -> None:
    configs = [{"registered_id": 0, "min_batch_allocation": 0.25, "connected": True}]
    assert (
        grab_batch_with_minimum_allocations(queue_of([4, 2, 2], [1, 0, 1]), 8, configs)[0] is None
    )
    batch, _ = grab_batch_with_minimum_allocations(queue_of([4, 2, 2], [1, 0, 0]), 8, configs)
    assert batch is not None
