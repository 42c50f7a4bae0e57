"""Progress of vLLM's engine core: its steps, and a mark in shared memory while a step of a new
shape is under way.

The engine core answers questions between two steps alone. A step whose shape never ran before may
compile kernels, which takes minutes, and no message can report it during that time. So the engine
core writes the begin of such a step into a file that the server's API process has mapped, too.
Everything here runs on the engine core's main thread.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from vllm_patching.compat.engine import replica_of

WATCH_STEPS, PROGRESS = "lockstep_watch_steps", "lockstep_progress"
"""Names of the methods that vLLM's engine core gets."""
_SLOT = struct.Struct("=d")
"""For each replica: time.monotonic() in seconds at which its step of a new shape began; 0.0 if none
is under way."""
_NOT_DUE = ("WAITING_FOR_", "FINISHED_")
"""Prefixes of vLLM's names for a request that no step advances: it waits for a grammar or for
remote keys, or has ended."""


class FirstSteps:
    """The mapped file with one slot for each replica."""

    def __init__(self, path: Path, replicas: int) -> None:
        """
        Args:
            path: of the file, which is made longer if it is too short. It may be removed once all
                sides have mapped it.
            replicas: number of slots.
        """
        self._path = path
        with path.open("r+b") as file:
            size = max(_SLOT.size * replicas, os.fstat(file.fileno()).st_size)
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)

    def begin(self, replica: int, moment: float) -> None:
        """Note that a step of a new shape began."""
        _SLOT.pack_into(self._memory, _SLOT.size * replica, moment)

    def end(self, replica: int) -> None:
        """Note that no such step is under way."""
        self.begin(replica, 0.0)

    def under_way(self, replica: int) -> bool:
        """Return whether such a step is under way."""
        return bool(_SLOT.unpack_from(self._memory, _SLOT.size * replica)[0])

    def remove_file(self) -> None:
        """Remove the file's name; the memory stays."""
        self._path.unlink(missing_ok=True)


class StepWatch:
    """Follows one engine core's steps.

    Several batches may be under way at once; their results come in the order in which they were
    begun.
    """

    def __init__(
        self, first_steps: FirstSteps, replica: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.executed = 0
        """Batches with at least one token that were begun."""
        self._first_steps, self._replica, self._clock = first_steps, replica, clock
        self._begun = self._ended = self._last_new = 0
        self._shapes: set[Hashable] = set()

    def begins(self, scheduled: Any) -> None:
        """Note that a batch is handed to the workers.

        Args:
            scheduled: vLLM's SchedulerOutput.
        """
        self._begun += 1
        tokens = int(scheduled.total_num_scheduled_tokens)
        self.executed += tokens > 0
        shape = shape_of(
            tokens, len(scheduled.num_scheduled_tokens), bool(scheduled.scheduled_new_reqs)
        )
        if shape not in self._shapes:
            self._shapes.add(shape)
            self._last_new = self._begun
            self._first_steps.begin(self._replica, self._clock())

    def ended(self) -> None:
        """Note that the results of the oldest batch have come."""
        self._ended = min(self._ended + 1, self._begun)
        if 0 < self._last_new <= self._ended:
            self._last_new = 0
            self._first_steps.end(self._replica)


def shape_of(tokens: int, requests: int, prompts: bool) -> Hashable:
    """Return the class of batches that one compilation serves: both counts up to the next power of
    two.
    """
    return tokens.bit_length(), requests.bit_length(), prompts


def watch_steps(core: Any, path: str, replicas: int) -> None:
    """Begin to follow an engine core. Calling it again changes nothing.

    Args:
        core: vLLM's EngineCore.
        path: of the file for FirstSteps.
        replicas: of the server.
    """
    if core.lockstep_steps is not None:
        return
    watch = core.lockstep_steps = StepWatch(
        FirstSteps(Path(path), replicas), replica_of(core.vllm_config)
    )
    execute = core.model_executor.execute_model

    def note_and_execute(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        watch.begins(scheduled)
        return execute(scheduled, *args, **kwargs)

    core.model_executor.execute_model = note_and_execute


def progress(core: Any) -> dict[str, int]:
    """Return what the API process asks for again and again.

    Returns:
        executed: batches begun since `watch_steps`. due: requests that the next steps should
        advance; 0 in a pause.
    """
    due = sum(
        not request.status.name.startswith(_NOT_DUE)
        for request in list(core.scheduler.requests.values())
    )
    return {
        "executed": core.lockstep_steps.executed,
        "due": 0 if core.is_scheduler_paused() else due,
    }


def install(core_class: Any) -> None:
    """Give vLLM's EngineCore the two methods, and have its steps followed once `watch_steps` was
    called.
    """
    if hasattr(core_class, "lockstep_steps"):
        # plugins are loaded more than once, and a forked process has what its parent installed
        return

    def following(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step_and_note(core: Any) -> Any:
            outputs, executed = step(core)
            if outputs is not None and core.lockstep_steps is not None:
                core.lockstep_steps.ended()
            return outputs, executed

        return step_and_note

    core_class.lockstep_steps = None
    setattr(core_class, WATCH_STEPS, watch_steps)
    setattr(core_class, PROGRESS, progress)
    for name in ("step", "step_with_batch_queue"):
        setattr(core_class, name, following(getattr(core_class, name)))
