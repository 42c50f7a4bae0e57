"""The sessions of a managed-server proxy.

Their number is bounded, and a session without requests expires.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from atroposlib.inference.managed_server import ManagedServer
from atroposlib.web.refusal import HTTPRefusal


@dataclass
class SessionState:
    """One session.

    Attributes:
        created_at: Unix time, for people.
        last_accessed: Unix time of the end of the last request, for people.
        used: time of the end of the last request by the clock of `Sessions`.
        busy: requests under way.
    """

    uuid: str
    managed_server: ManagedServer
    model_name: str
    base_url: str | None = None
    created_at: float = field(default_factory=time.time)
    last_accessed: float = field(default_factory=time.time)
    used: float = 0.0
    busy: int = 0


class TooManySessions(HTTPRefusal):
    """No more sessions can be opened now."""

    def __init__(self, detail: str):
        super().__init__(429, detail)


class UnknownSession(HTTPRefusal):
    """A session that was never made, or that has ended."""

    def __init__(self, detail: str):
        super().__init__(404, detail)


class Sessions:
    """The open sessions.

    Args:
        most: sessions at once.
        seconds: time for which a session without a request is kept.
        clock: seconds of a clock that does not jump.
    """

    def __init__(self, most: int, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.most, self.seconds, self.clock = most, seconds, clock
        self._open: dict[str, SessionState] = {}

    def all(self) -> list[SessionState]:
        """Return the open sessions."""
        self._forget()
        return list(self._open.values())

    def create(
        self, managed_server: ManagedServer, model_name: str, base_url: str | None
    ) -> SessionState:
        """Open a session.

        Raises:
            TooManySessions: as many sessions as allowed are open.
        """
        self._forget()
        if len(self._open) >= self.most:
            raise TooManySessions(
                f"{len(self._open)} sessions are open, as many as may be: end some with DELETE /<session>, wait (they expire "
                f"{self.seconds:g} s after their last request), or raise --max-sessions"
            )
        made = SessionState(
            str(uuid.uuid4()), managed_server, model_name, base_url, used=self.clock()
        )
        self._open[made.uuid] = made
        return made

    @contextmanager
    def used(self, session_uuid: str) -> Iterator[SessionState]:
        """Return a session, which cannot expire in the block.

        Raises:
            UnknownSession: the session does not exist.
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
        """End a session.

        Raises:
            UnknownSession: the session does not exist.
        """
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
        for session in [
            entry for entry in self._open.values() if not entry.busy and entry.used < oldest
        ]:
            del self._open[session.uuid]
