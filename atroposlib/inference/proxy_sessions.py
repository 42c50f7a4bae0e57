"""The sessions of a managed-server proxy: a bounded number of them, each forgotten when nobody has asked for it for long."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from atroposlib.inference.managed_server import ManagedServer


@dataclass
class SessionState:
    """One session. `created_at` and `last_accessed` are Unix times, for people. `used` is the time of the last use by the clock
    of `Sessions`, `busy` counts the requests under way."""

    uuid: str
    managed_server: ManagedServer
    model_name: str
    base_url: str | None = None
    created_at: float = field(default_factory=time.time)
    last_accessed: float = field(default_factory=time.time)
    used: float = 0.0
    busy: int = 0


class TooManySessions(Exception):
    """No further session can be opened now."""


class UnknownSession(Exception):
    """There is no such session (any more)."""


class Sessions:
    """The open sessions.

    Args:
        most: sessions at once.
        seconds: how long one is kept without a request; one whose request is under way is kept.
        clock: seconds of a clock that does not jump.
    """

    def __init__(self, most: int, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.most, self.seconds, self.clock = most, seconds, clock
        self._open: dict[str, SessionState] = {}

    def all(self) -> list[SessionState]:
        """Those that are open now."""
        self._forget()
        return list(self._open.values())

    def create(self, managed_server: ManagedServer, model_name: str, base_url: str | None) -> SessionState:
        """Open one.

        Raises:
            TooManySessions: there are as many as may be.
        """
        self._forget()
        if len(self._open) >= self.most:
            raise TooManySessions(
                f"{len(self._open)} sessions are open, as many as may be: end some with DELETE /<session>, wait (they expire "
                f"{self.seconds:g} s after their last request), or raise --max-sessions"
            )
        made = SessionState(str(uuid.uuid4()), managed_server, model_name, base_url, used=self.clock())
        self._open[made.uuid] = made
        return made

    @contextmanager
    def used(self, session_uuid: str) -> Iterator[SessionState]:
        """The session, which cannot expire meanwhile.

        Raises:
            UnknownSession: there is none.
        """
        self._forget()
        session = self._open.get(session_uuid)
        if session is None:
            raise self._unknown(session_uuid)
        session.busy += 1
        try:
            yield session
        finally:
            session.busy -= 1
            session.last_accessed, session.used = time.time(), self.clock()

    def delete(self, session_uuid: str) -> None:
        """End one; raises `UnknownSession` where there is none."""
        self._forget()
        if self._open.pop(session_uuid, None) is None:
            raise self._unknown(session_uuid)

    def _unknown(self, session_uuid: str) -> UnknownSession:
        return UnknownSession(
            f"Session {session_uuid[:64]} not found: it was never made, was ended, or expired "
            f"{self.seconds:g} s after its last request (--session-timeout)"
        )

    def _forget(self) -> None:
        oldest = self.clock() - self.seconds
        for session in [entry for entry in self._open.values() if not entry.busy and entry.used < oldest]:
            del self._open[session.uuid]
