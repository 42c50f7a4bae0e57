"""The age of weights when versions go back: the lives of the trainers that made them. Pure
functions.

A weight version is a number of optimizer steps, so a trainer that dies at 17 and resumes from a
checkpoint at 10 makes 11 to 17 a second time, and they are other weights. Each trainer process has
an epoch, which the rollout service gives: it is above the epochs of the trainers that it continues.
Each sampled token has the version and the epoch of its weights. Epoch 0 is the checkpoint that the
first trainer began with.

    life 1   0 ── 5 ── 10 ── 14 ── 17 †     sampled at (life 1, 5):  still on the line, counts as 5
    life 2              10 ── 11 ── 12      sampled at (life 1, 14): counts as 9, older than all that life 2 makes
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_LIVES = 256
"""Lives that are remembered; what is sampled by older ones is judged by these."""


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a trainer: from its start to its end, whatever it was that ended it."""

    epoch: int
    """Above 0."""
    start: int
    """The weight version that it began with."""


def line_version(epoch: int, version: int, lives: Sequence[Life]) -> int:
    """The version that these weights count as, on the line of weights that is trained on now.

    Weights that a later life threw away count as one older than what that life began with: they are
    of no line that is trained on. Below 0 they are another run's, since a run begins at 0.

    Args:
        epoch: of the life that made the weights.
        version: optimizer steps behind them.
        lives: in the order of their epochs.
    """
    for life in lives:
        if life.epoch > epoch and version > life.start:
            version = life.start - 1
    return version


def oldest(weights: Iterable[tuple[int, int]], lives: Sequence[Life]) -> int:
    """The lowest `line_version` among weights given as (epoch, version)."""
    return min(line_version(epoch, version, lives) for epoch, version in weights)


def begin_life(lives: Sequence[Life], epoch: int, start: int) -> list[Life]:
    """The lives when a trainer registers.

    Args:
        lives: those known so far, in the order of their epochs.
        epoch: the trainer's; 0 if it does not say, and then there is nothing to tell lives apart
            by. The epoch of the latest life again is that same life, whose beginning stays where it
            was.
        start: the weight version that the trainer has.
    """
    if not epoch:
        return []
    before = [life for life in lives if life.epoch < epoch]
    start = min([start, *(life.start for life in lives if life.epoch == epoch)])
    return [*before, Life(epoch, start)][-MOST_LIVES:]
