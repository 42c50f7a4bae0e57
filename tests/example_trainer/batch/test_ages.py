"""Ages across the lives of a run's trainers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.wire import TrainerSession
from example_trainer.batch.groups import age

# Killed at 17, resumed at 10; killed again, resumed at 12.
LIVES = [TrainerSession(100, 0), TrainerSession(200, 10), TrainerSession(300, 12)]


@pytest.mark.parametrize(
    ("version", "epoch", "present", "expected"),
    [
        (14, 300, 15, 1),
        (12, 300, 12, 0),
        (11, 200, 15, 4),  # in the line: the third life went on from 12
        (10, 100, 12, 2),  # where the second life took over
        (17, 100, 12, 3),  # thrown away at 10, so older than 10
        (14, 200, 13, 2),  # thrown away at 12
        (0, 0, 12, 12),  # the model as it was at first
        (5, None, 12, 7),  # without an owner: taken for this line's,
        (17, None, 12, 1),  # unless it cannot be
        (17, 0, 12, 1),
        (20, 400, 13, 2),  # of a trainer that has replaced this one
    ],
)
def test_ages_in_a_run_that_went_back_twice(
    version: int, epoch: int | None, present: int, expected: int
) -> None:
    assert age(version, epoch, present, LIVES) == expected


def test_without_lives_versions_alone_count() -> None:
    assert age(3, 100, 5, []) == 2
    assert age(9, 100, 5, []) == 0


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[TrainerSession], int, int, int]:
    """Lives, each resumed from a step that the one before had reached; weights of one; the
    trainer's version.
    """
    lives, reached = [TrainerSession(1, 0)], [draw(st.integers(0, 20))]
    for number in range(draw(st.integers(0, 4))):
        start = draw(st.integers(lives[-1].start, reached[-1]))
        lives.append(TrainerSession(number + 2, start))
        reached.append(start + draw(st.integers(0, 20)))
    which = draw(st.integers(0, len(lives) - 1))
    return (
        lives,
        lives[which].epoch,
        draw(st.integers(lives[which].start, reached[which])),
        reached[-1],
    )


@given(histories())
def test_the_age_is_that_on_the_line_which_is_trained_on(
    history: tuple[list[TrainerSession], int, int, int],
) -> None:
    lives, epoch, version, present = history
    later = [life.start for life in lives if life.epoch > epoch]
    left = [start for start in later if version > start]
    expected = present - (min(left) - 1 if left else version)
    assert age(version, epoch, present, lives) == expected >= 0
    assert all(one.epoch < other.epoch for one, other in pairwise(lives))
