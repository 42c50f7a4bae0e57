"""State of a role, and the decision to start its process again.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from example_trainer.async_grpo.actor import Address, NodeNeeds
from example_trainer.async_grpo.cluster import Pending, Seat
from example_trainer.async_grpo.roles import Role

LONGEST_DELAY = 60.0
"""Seconds before a restart at most."""


@dataclass(frozen=True)
class Ended:
    """The end of a process.

    Attributes:
        code: exit status, 128 + n for signal n; None if its node or its actor was lost.
        lived: seconds from its start.
        was_ready: it had answered, or had lived for `proven` seconds in this or an earlier life.
    """

    code: int | None
    lived: float
    was_ready: bool


@dataclass(frozen=True)
class Policy:
    """See Orchestration in settings."""

    proven: float = 60.0
    restarts: int = 6
    delay: float = 1.0
    steady: float = 300.0


@dataclass
class Row:
    """Failures of one role in a row."""

    policy: Policy
    count: int = 0

    def after(self, ended: Ended) -> float | None:
        """Seconds until the next start; None if there shall be none.

        A process that ends by itself with an error before it ever worked would do so again,
        wherever it is started. Examples are an environment's file that cannot be imported, and an
        option that is refused. A process that a signal or a lost node ended is started again at
        once, and with growing delays if it ends again.
        """
        policy = self.policy
        by_itself = ended.code is not None and ended.code <= 128
        if by_itself and not ended.was_ready and ended.lived < policy.proven:
            return None
        if ended.lived >= policy.steady:
            self.count = 0
        self.count += 1
        if self.count > policy.restarts:
            return None
        return min(LONGEST_DELAY, policy.delay * 2.0 ** (self.count - 1))


class State(Enum):
    """State of a role. The values are for people."""

    WAITING = "waits for its turn"
    PLACING = "waits for its place"
    LAUNCHING = "is being started"
    STARTING = "starts"
    UP = "runs"
    ENDING = "ends, to be restarted"
    DONE = "is done"


class Keeper:
    """One role and what has become of it.

    Args:
        role: which.
        policy: of its restarts.
    """

    def __init__(self, role: Role, policy: Policy) -> None:
        self.role, self.row = role, Row(policy)
        self.state, self.since, self.due = State.WAITING, 0.0, 0.0
        self.seat: Seat | None = None
        self.pending: Pending | None = None
        self.asked = 0.0
        self.needs: NodeNeeds | None = None
        self.blocked_since: float | None = None
        self.blocked_told = 0.0
        self.place: Address | None = None
        self.bound: tuple[Address | None, ...] = ()
        self.node = ""
        self.common = True
        self.lives = 0
        self.was_up = False
        self.log_offset = 0
        self.missing = ""
        self.told = 0.0
        self.silent_since: float | None = None

    def enter(self, state: State, now: float) -> None:
        """Go to another state."""
        self.state, self.since, self.told = state, now, now
