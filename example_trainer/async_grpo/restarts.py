"""What to do when a process of a role has ended. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_DELAY = 60.0
"""Seconds before a restart at most."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

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

        A process that ends by itself with an error before it ever worked would do so again, wherever it is started: an
        environment's file that cannot be imported, an option that is refused. What a signal or a lost node ended is started
        again at once, and with growing delays if it goes on.
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
