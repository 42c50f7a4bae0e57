"""How old rollouts are, across the lives of a run's trainers, by the rule that the rollout service
has too. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from atroposlib.wire import TrainerSession, effective_version


def version_on_line(
    version: int, epoch: int | None, present: int, lives: Sequence[TrainerSession]
) -> int:
    """What weights count as on the line of weights that is trained on now. At most `present`.

    Args:
        version, epoch: of the weights; an epoch of None or 0: nobody said, or they are from before
            any trainer.
        present: the trainer's version.
        lives: of the trainer's run, oldest first, the present one last.
    """
    if epoch:
        version = effective_version(epoch, version, lives)
    if (
        version > present
    ):  # of an earlier life that did not say so, or of a trainer that this one has replaced
        version = lives[-1].start - 1 if lives else present
    return min(version, present)


def age(version: int, epoch: int | None, present: int, lives: Sequence[TrainerSession]) -> int:
    """How many weight versions lie between the weights that something was sampled under and the
    trainer's. Never negative.

    Args:
        version, epoch, present, lives: see version_on_line.
    """
    return present - version_on_line(version, epoch, present, lives)
