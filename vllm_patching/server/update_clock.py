"""How long the steps of an update take, and when the one that is under way must have ended."""

from __future__ import annotations

import time

FIRST_STEP_SECONDS = 10.0
"""How long after an update it is asked when the engine went on: the requests that waited for it may
have been given up."""


class UpdateClock:
    """The times of one update after the other. Moments are time.monotonic(), in seconds."""

    def __init__(self, timeout: float) -> None:
        """
        Args:
            timeout: seconds for each step.
        """
        self.timeout = timeout
        self.began = 0.0
        """When the last one began."""
        self._entered = 0.0
        self._paused_at = 0.0
        self._first_step_until = 0.0
        self.seconds: dict[str, float] = {}
        """`to_<mark>`: since the mark before it (paused, transferred, committed, verified,
        serving); `halted`: from the pause to the answer that the engine goes on; `resume`: how long
        that answer took; `stalled`: from the pause to the engine's next step, once it is known."""

    def begin(self) -> None:
        """An update begins."""
        self.seconds = {}
        self._first_step_until = 0.0
        self.began = self._entered = time.monotonic()

    def reach(self, mark: str) -> None:
        """The update has come to `mark`; from here on the trainer, or the next step, has `timeout`
        seconds again.
        """
        now = time.monotonic()
        self.seconds[f"to_{mark}"] = now - self._entered
        if mark == "paused":
            self._paused_at = now
        self._entered = now

    @property
    def deadline(self) -> float:
        """When the next mark must have been reached."""
        return self._entered + self.timeout

    @property
    def is_late(self) -> bool:
        """Whether the next mark has not been reached in time."""
        return time.monotonic() > self.deadline

    def resumed(self, asked: float, in_flight: bool) -> None:
        """The engine has answered that it goes on, as it was asked to at the moment `asked`.

        Args:
            in_flight: requests waited for that. Without any, the next step is of a request that
                comes later, and says nothing.
        """
        now = time.monotonic()
        self.seconds |= {"halted": now - self._paused_at, "resume": now - asked}
        self._first_step_until = now + FIRST_STEP_SECONDS if in_flight else 0.0

    @property
    def wants_first_step(self) -> bool:
        """Whether it is not known yet when the engine took its next step, and it may still be
        asked.
        """
        return time.monotonic() < self._first_step_until

    def stepped(self, began: float | None) -> None:
        """What the engine says: the moment at which its next step began; None if there was none, or
        it does not say.
        """
        if began is not None:
            self.seconds["stalled"] = began - self._paused_at
            self._first_step_until = 0.0

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in self.seconds.items())
