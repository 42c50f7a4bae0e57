"""The rule by which an engine that makes no progress is unhealthy. Pure: no I/O and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_STEP_FACTOR = 10
"""A step of a shape that never ran before may compile kernels. It has so many times the limit."""
REMEDY = "it serves again when the engine goes on; if it does not, restart the server"


@dataclass(slots=True)
class _Replica:
    """One engine core.

    Attributes:
        silent: seconds without progress, outside first steps.
        in_first_step: seconds of a step of a new shape.
        idle: whether it answered since the last progress, so that it runs without making steps.
        executed: batches that it had begun at its last answer; None before the first.
    """

    silent: float = 0.0
    in_first_step: float = 0.0
    idle: bool = False
    executed: int | None = None


class EngineProgress:
    """Counts how long each replica of an engine has made no progress.

    A replica makes progress if it answers and either has begun another batch since its last answer,
    or has no request that a step would advance. An engine in a pause has none.
    """

    def __init__(self, limit: float, replicas: int = 1) -> None:
        """
        Args:
            limit: seconds without progress after which there is trouble.
        """
        self._limit = limit
        self._replicas = [_Replica() for _ in range(replicas)]

    def passed(self, seconds: float, first_steps: Sequence[bool]) -> None:
        """Count time that has passed.

        Args:
            first_steps: for each replica, whether a step of a new shape is under way.
        """
        for replica, first in zip(self._replicas, first_steps, strict=True):
            if first:
                replica.in_first_step += seconds
            else:
                replica.silent += seconds

    def excused(self) -> None:
        """Begin to count again: the engine stands still because it was told to."""
        for replica in self._replicas:
            self._progressed(replica)

    def answered(self, number: int, executed: int, due: int) -> None:
        """Take in an answer of one replica.

        Args:
            executed: batches that it has begun.
            due: requests that its next steps should advance.
        """
        replica = self._replicas[number]
        if due == 0 or executed != replica.executed:
            self._progressed(replica)
        else:
            replica.idle = True
        replica.executed = executed

    @property
    def trouble(self) -> str:
        """Why nothing can be sampled; empty if all replicas make progress.

        The text stays the same while it lasts.
        """
        for number, replica in enumerate(self._replicas):
            name = f"vLLM's engine core {number}" if len(self._replicas) > 1 else "vLLM's engine"
            if replica.silent > self._limit:
                done = "answers, but has made no step" if replica.idle else "has not answered"
                return f"{name} {done} for {self._limit:g} s (--engine-timeout): {REMEDY}"
            if replica.in_first_step > FIRST_STEP_FACTOR * self._limit:
                longest = f"{FIRST_STEP_FACTOR * self._limit:g} s ({FIRST_STEP_FACTOR} times --engine-timeout)"
                return f"{name} has been in its first step of a new shape for {longest}: {REMEDY}"
        return ""

    @staticmethod
    def _progressed(replica: _Replica) -> None:
        replica.silent = replica.in_first_step = 0.0
        replica.idle = False
