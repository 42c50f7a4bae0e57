"""The age of weights when versions go back: which versions count after a trainer restarted. Pure
functions.

A weight version is a number of optimizer steps, so a trainer that dies at 17 and resumes from a
checkpoint at 10 makes 11 to 17 a second time, and they are other weights. Each trainer process has
an epoch from the rollout service, above the epochs of the trainers that it continues. Each sampled
token has the version and the epoch of its weights. Epoch 0 is the checkpoint that the first trainer
began with.

    session 1   0 ── 5 ── 10 ── 14 ── 17 †     sampled at (1, 5):  still in the lineage, counts as 5
    session 2              10 ── 11 ── 12      sampled at (1, 14): counts as 9, below all of session 2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_SESSIONS = 256
"""Sessions of a run that count. Rollouts of older ones are judged by these."""


@dataclass(frozen=True, slots=True)
class TrainerSession:
    """One trainer process of a run."""

    epoch: int
    """Above 0."""
    start: int
    """The weight version that it began with."""


def effective_version(epoch: int, version: int, sessions: Sequence[TrainerSession]) -> int:
    """Return the version that these weights count as in the lineage of the present weights.

    Weights that a later session discarded count as one version older than the start of that
    session. A version below 0 is another run's, since a run begins at 0.

    Args:
        epoch: of the session that made the weights.
        version: their optimizer steps.
        sessions: in the order of their epochs.
    """
    for session in sessions:
        if session.epoch > epoch and version > session.start:
            version = session.start - 1
    return version


def oldest(weights: Iterable[tuple[int, int]], sessions: Sequence[TrainerSession]) -> int:
    """Return the lowest `effective_version` among weights given as (epoch, version)."""
    return min(effective_version(epoch, version, sessions) for epoch, version in weights)


def begin_session(
    sessions: Sequence[TrainerSession], epoch: int, start: int
) -> list[TrainerSession]:
    """Return the sessions after a trainer has registered.

    Args:
        sessions: the earlier ones, in the order of their epochs.
        epoch: the trainer's; 0 if it names none, and then no session counts. The epoch of the
            latest session again is that same session, whose start stays as it was.
        start: the weight version that the trainer has.
    """
    if not epoch:
        return []
    before = [session for session in sessions if session.epoch < epoch]
    starts = [session.start for session in sessions if session.epoch == epoch]
    return [*before, TrainerSession(epoch, min([start, *starts]))][-MAX_SESSIONS:]
