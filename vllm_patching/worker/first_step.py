"""When a worker goes on after the engine stood still, noted by the worker itself."""

from __future__ import annotations

import time
from typing import Any


class FirstStep:
    """The moment at which a vLLM worker begins its next step.

    The front end learns that the engine goes on from an answer which competes with that very step
    for the interpreter, so by its clock the engine stands still for longer than it does. All of it
    is called on the worker's main thread.
    """

    def __init__(self, worker: Any) -> None:
        """
        Args:
            worker: has a method `execute_model`, looked up on it for each step.
        """
        self._worker = worker
        self.began: float | None = None
        """time.monotonic() in seconds, None as long as there has been no step since `watch`.
        Comparable within one host."""

    def watch(self) -> None:
        """Note the next step. Later steps cost nothing."""
        self.began = None
        self._worker.execute_model = self._note_and_execute

    def _note_and_execute(self, *args: Any, **kwargs: Any) -> Any:
        self.began = time.monotonic()
        del self._worker.execute_model  # uncovers the method of its class
        return self._worker.execute_model(*args, **kwargs)
