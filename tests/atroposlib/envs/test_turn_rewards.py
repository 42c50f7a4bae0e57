"""From rewards of turns to advantages of tokens: closed forms, and what must hold of any rewards."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.envs.multi_turn import (
    returns_to_go,
    sampled_runs,
    spread_over_tokens,
    turn_advantages,
)
from example_trainer.algorithm.advantages import group_advantages

REWARDS = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=4), min_size=1, max_size=5)


def test_the_closed_form_of_two_conversations() -> None:
    assert returns_to_go([1.0, 0.0, 2.0], 0.5) == [1.5, 1.0, 2.0]
    # Returns [3, 2] and [1]: means 2 and 2, differences [1, 0] and [-1], their standard deviation
    # sqrt(2/3).
    (first, second), (third,) = turn_advantages([[1.0, 2.0], [1.0]])
    assert (first, second, third) == (
        pytest.approx(math.sqrt(1.5)),
        0.0,
        pytest.approx(-math.sqrt(1.5)),
    )


@given(
    scores=st.lists(st.integers(-9, 9).map(float), min_size=1, max_size=8), turns=st.integers(1, 4)
)
def test_with_one_reward_at_the_end_it_is_the_trainers_own_for_every_turn(
    scores: list[float], turns: int
) -> None:
    rows = turn_advantages([[0.0] * (turns - 1) + [score] for score in scores])
    for row, expected in zip(rows, group_advantages(scores), strict=True):
        assert row == pytest.approx([expected] * turns)


@given(rewards=REWARDS, discount=st.floats(0, 1))
def test_the_advantages_of_a_turn_sum_to_zero_and_all_have_one_scale(
    rewards: list[list[float]], discount: float
) -> None:
    rows = turn_advantages(rewards, discount)
    assert [len(row) for row in rows] == [len(row) for row in rewards]
    for turn in range(max(map(len, rows))):
        assert sum(row[turn] for row in rows if turn < len(row)) == pytest.approx(0.0, abs=1e-4)
    every = [value for row in rows for value in row]
    assert math.sqrt(sum(value * value for value in every) / len(every)) == pytest.approx(
        1.0
    ) or not any(every)


def test_where_nothing_differs_nothing_is_learned() -> None:
    assert turn_advantages([[0.1, 0.2], [0.1, 0.2]]) == [[0.0, 0.0], [0.0, 0.0]]
    assert turn_advantages([]) == []


@given(
    pieces=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=4),
    hidden=st.integers(0, 2),
)
def test_every_token_gets_the_number_of_its_turn(
    pieces: list[tuple[int, int]], hidden: int
) -> None:
    mask = [token for given_, sampled in pieces for token in [-100] * given_ + [7] * sampled] + [
        -100
    ]
    runs = sampled_runs(mask)
    assert [end - begin for begin, end in runs] == [sampled for _, sampled in pieces]
    of_turns = [float(turn) for turn in range(1, hidden + len(pieces) + 1)]
    numbers = spread_over_tokens(mask, of_turns)
    assert [n for n, token in zip(numbers, mask, strict=True) if token == -100] == [
        0.0
    ] * mask.count(-100)
    assert [numbers[begin] for begin, _ in runs] == of_turns[hidden:] or not pieces
