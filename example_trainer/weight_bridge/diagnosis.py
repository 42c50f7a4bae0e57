"""Decide which servers an update goes on without: a pure function of the evidence on each server.

- Facts come first: a process that ended, restarted or belongs to another trainer, a failed step.
- A symptom counts only if no server has a fact against it: the others may wait for that server.
- A server that is merely slow has one timeout, the patience.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto


class Loss(Enum):
    """The way in which an update lost a server, which decides how the trainer treats it."""

    FAILED = auto()
    """It did not do its part: quarantine it."""
    AWAY = auto()
    """It does not answer."""
    RESTARTED = auto()
    """Another process answers at its address."""
    TAKEN_OVER = auto()
    """Another trainer has joined it: only its restart helps."""
    GAVE_UP = auto()
    """It received nothing from this trainer for too long: join it again."""


@dataclass(frozen=True)
class Reason:
    """One sentence about a server, without its address, and what the loss is."""

    text: str
    loss: Loss = Loss.FAILED


@dataclass(frozen=True)
class Evidence:
    """The trainer's knowledge of one server in an update.

    Attributes:
        answers: the server answered the last request for its state.
        broken: its state says why it cannot finish the update.
        failure: its step of the update failed, or the others stopped waiting for it.
        late: the failure is only that its answer did not come in time.
        gave_up: its own report of a version that it gave up.
        absent: it did not come to the cohort.
        rank_errors: errors that its ranks report.
        silent: seconds without an answer from the server or its workers.
        received: bytes at its slowest rank.
        idle: a rank that is to receive does not ask for its next bytes.
        stalled: seconds without a change of `received` or `idle`.
        behind: seconds since another server first had more than `received`.
    """

    answers: bool = True
    broken: Reason | None = None
    failure: Reason | None = None
    late: bool = False
    gave_up: str = ""
    absent: bool = False
    rank_errors: str = ""
    silent: float = 0.0
    received: int = 0
    idle: bool = False
    stalled: float = 0.0
    behind: float = 0.0

    def reason(self, text: str) -> Reason:
        """Return the text as the reason for a server that failed, or that is away."""
        if self.answers:
            return Reason(text)
        return Reason(text, Loss.AWAY)


Servers = Mapping[str, Evidence]


def diagnose(servers: Servers, patience: float, error: str = "") -> dict[str, Reason]:
    """Name the servers to go on without.

    Args:
        servers: the evidence on each, by address.
        patience: seconds for which one server may delay the others.
        error: the error that ended the update; empty while the update runs.

    Returns:
        The reason for each lost server. Empty while the update runs: all may still finish. Empty
        after an error: the evidence fits every server.
    """
    unknown = {}
    if error and len(servers) == 1:
        unknown = {url: server.reason(error) for url, server in servers.items()}
    return (
        _failed(servers)
        or _gave_up(servers)
        or _absent(servers, error)
        or _silent(servers, patience, bool(error))
        or _idle(servers, patience)
        or _behind(servers, patience)
        or unknown
    )


def _failed(servers: Servers) -> dict[str, Reason]:
    # A server without all its bytes cannot answer in time. It is not lost if a server that takes
    # none of its bytes is late, too: the bytes may come through that one.
    blocked = any(server.late and server.idle for server in servers.values())
    reasons = {}
    for url, server in servers.items():
        if server.broken:
            reasons[url] = server.broken
        elif server.failure and not (server.late and blocked and not server.idle):
            reasons[url] = _of_failure(server, server.failure)
    return reasons


def _of_failure(server: Evidence, failure: Reason) -> Reason:
    if failure.loss is Loss.GAVE_UP:
        return Reason(server.gave_up or failure.text, Loss.GAVE_UP)
    return server.reason(failure.text)


def _gave_up(servers: Servers) -> dict[str, Reason]:
    return {
        url: Reason(server.gave_up, Loss.GAVE_UP)
        for url, server in servers.items()
        if server.gave_up
    }


def _absent(servers: Servers, error: str) -> dict[str, Reason]:
    return {
        url: server.reason(f"did not come to the cohort: {server.rank_errors or error}")
        for url, server in servers.items()
        if server.absent
    }


def _silent(servers: Servers, patience: float, ended: bool) -> dict[str, Reason]:
    if ended:
        return {
            url: server.reason("does not answer")
            for url, server in servers.items()
            if not server.answers
        }
    return {
        url: server.reason(f"has not answered for {server.silent:.0f} s")
        for url, server in servers.items()
        if server.silent >= patience
    }


def _idle(servers: Servers, patience: float) -> dict[str, Reason]:
    if all(server.idle for server in servers.values()):
        return {}  # all do something else at the same time, such as a step of the engine
    return {
        url: server.reason(f"takes none of its bytes for {server.stalled:.0f} s")
        for url, server in servers.items()
        if server.idle and server.stalled >= patience
    }


def _behind(servers: Servers, patience: float) -> dict[str, Reason]:
    return {
        url: server.reason(f"is {server.behind:.0f} s behind the others")
        for url, server in servers.items()
        if server.behind >= patience
    }


class Progress:
    """Measures how long servers stand still, and how long they are behind the first of them."""

    def __init__(self) -> None:
        self._first_at: dict[int, float] = {}
        """Time at which the first server had so many bytes."""
        self._unchanged: dict[str, tuple[int, bool, float]] = {}
        """The last `received` and `idle` of each server, and since when."""

    def timed(self, servers: Servers, now: float) -> dict[str, Evidence]:
        """Return the evidence with `stalled` and `behind` set.

        Args:
            now: seconds of any clock that does not go back.
        """
        for url, server in servers.items():
            self._first_at.setdefault(server.received, now)
            if self._unchanged.get(url, ())[:2] != (server.received, server.idle):
                self._unchanged[url] = (server.received, server.idle, now)
        timed = {}
        for url, server in servers.items():
            ahead = [at for received, at in self._first_at.items() if received > server.received]
            timed[url] = replace(
                server,
                stalled=now - self._unchanged[url][2],
                behind=now - min(ahead, default=now),
            )
        return timed
