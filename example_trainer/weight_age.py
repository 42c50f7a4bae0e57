"""How old rollouts are, across the lives of a run's trainers. Pure.

A trainer that resumes counts its weight versions from its checkpoint on, so a number alone does not name weights: version 17 of
the trainer that was killed is not version 17 of the one that went on from 10. What tells them apart is the *epoch* of the
trainer that made them: Unix milliseconds of its start, greater than the epoch of the trainer that it resumes from. 0 means that
nobody said, or weights from before any trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Life:
    """One trainer process of a run.

    Attributes:
        epoch: of the weights that it makes.
        start: the version that it started from.
    """

    epoch: int
    start: int


def age(version: int, epoch: int | None, present: int, lives: Sequence[Life]) -> int:
    """How many weight versions lie between the weights that something was sampled under and the trainer's.

    What a life made after the version at which the next one took over belongs to no line that is trained on. Its weights were
    served before the takeover, so they count as one version older than that. Never negative.

    Args:
        version, epoch: of the sampling weights.
        present: the trainer's version.
        lives: of the trainer's run, oldest first, the present one last.
    """
    if epoch:
        for life in lives:
            if life.epoch > epoch and version > life.start:
                version = life.start - 1
    if version > present:  # of an earlier life that did not say so, or of a trainer that this one has replaced
        version = lives[-1].start - 1 if lives else present
    return present - version
