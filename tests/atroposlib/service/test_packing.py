"""Exact packing, against the plainest way to do it, and what it needs of memory."""

from __future__ import annotations

import itertools
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from atroposlib.service.scheduling import choose_exact, choose_multiple


@given(st.lists(st.integers(1, 12), max_size=11), st.integers(1, 40))
def test_the_choice_is_the_first_of_all_that_add_up(sizes: list[int], target: int) -> None:
    every = itertools.chain.from_iterable(
        itertools.combinations(range(len(sizes)), n) for n in range(1, len(sizes) + 1)
    )
    fitting = [
        list(choice) for choice in every if sum(sizes[position] for position in choice) == target
    ]
    assert choose_exact(sizes, target) == (min(fitting) if fitting else None)


@given(st.lists(st.integers(1, 9), min_size=40, max_size=400), st.integers(1, 1200))
def test_long_queues_add_up_exactly(sizes: list[int], target: int) -> None:
    chosen = choose_exact(sizes, target)
    if chosen is None:
        assert sum(sizes) < target or not any(size == 1 for size in sizes)
        return
    assert chosen == sorted(set(chosen))
    assert sum(sizes[position] for position in chosen) == target


def test_memory_is_bounded_for_many_candidates() -> None:
    """Fifty thousand candidates for a batch of 100,000 sequences: with a set for each it would be
    600 MB.
    """
    target = 100_001
    sizes = [3] + [4] * 25_000 + [6] * 20_000 + [5]
    tracemalloc.start()
    try:
        chosen = choose_exact(sizes, target)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert chosen is not None
    assert sum(sizes[position] for position in chosen) == target
    assert peak < 30 << 20


def test_a_multiple() -> None:
    assert choose_multiple([3, 3, 2], 4, 16) == [0, 1, 2]
    assert choose_multiple([3, 3], 4, 16) is None
