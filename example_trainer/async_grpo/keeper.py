"""What the driver knows of one role."""

from __future__ import annotations

from enum import Enum

from example_trainer.async_grpo.actor import NodeNeeds
from example_trainer.async_grpo.cluster import Pending, Seat
from example_trainer.async_grpo.launch import Address
from example_trainer.async_grpo.restarts import Policy, Row
from example_trainer.async_grpo.roles import Role


class State(Enum):
    """Of one role. The values are for people."""

    WAITING = "waits for its turn"
    PLACING = "waits for its place"
    LAUNCHING = "is being started"
    STARTING = "starts"
    UP = "runs"
    ENDING = "ends, to be started anew"
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
