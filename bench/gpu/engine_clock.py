"""Time of vLLM's engine core: seconds of its main thread by kind of work, and of the thread that
sends.

A plugin of vLLM's, which the folder `plugin` beside this file names. It puts a clock around a few
functions that are called once or twice a step. It leaves the sums in a file twice a second. Work
and waiting look the same from outside. To wait for a GPU, PyTorch asks it again and again, so that
the process is busy all the time. On request it also notes each step: when it was scheduled, and how
many tokens of how many requests it computes.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.summary import windows_of

FILE = "LOCKSTEP_ENGINE_CLOCK"
"""The variable that names the file; without it no clock ticks."""
STEPS_FILE = "LOCKSTEP_ENGINE_STEPS"
"""The variable that names the file of the steps; without it none is noted."""
PLUGIN_FOLDER = Path(__file__).resolve().parent / "plugin"
SECONDS_BETWEEN_FILES = 0.5
MANY = 4
"""Tokens for each request of a step that is not of answers alone: a new one's prompt, now and then,
makes fewer."""
CLOCKS: dict[str, list[tuple[str, str, str]]] = {
    "steps": [
        ("vllm.v1.engine.core", "EngineCore", "step"),
        ("vllm.v1.engine.core", "EngineCore", "step_with_batch_queue"),
    ],
    "schedule": [("vllm.v1.core.sched.scheduler", "Scheduler", "schedule")],
    "begin the model": [
        ("vllm.v1.executor.uniproc_executor", "UniProcExecutor", "execute_model"),
        ("vllm.v1.executor.uniproc_executor", "UniProcExecutor", "sample_tokens"),
        ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor", "execute_model"),
        ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor", "sample_tokens"),
    ],
    "wait for the model": [
        ("vllm.v1.executor.uniproc_executor", "AsyncOutputFuture", "result"),
        ("vllm.v1.executor.multiproc_executor", "FutureWrapper", "result"),
    ],
    "take its answers in": [("vllm.v1.core.sched.scheduler", "Scheduler", "update_from_output")],
    "gather outputs": [("vllm_patching.engine_core.gathered_outputs", "GatheredOutputs", "step")],
    "encode outputs": [("vllm.v1.serial_utils", "MsgpackEncoder", "encode_into")],
}
"""The functions that are timed, by the name in the report. `steps` holds all others but the last
one, which has its own thread; on a CPU the model itself is in them too. A function that a version
of vLLM lacks is left out.
"""


class Clock:
    """Calls and seconds of some functions, added up."""

    def __init__(self, file: Path) -> None:
        self._file, self._written = file, 0.0
        self._sums: dict[str, list[float]] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose calls are counted under `name`."""
        sums = self._sums.setdefault(name, [0, 0.0, 0.0])

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, busy = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                sums[0] += 1
                sums[1] += time.perf_counter() - wall
                sums[2] += time.thread_time() - busy
                if name == "steps" and time.monotonic() - self._written > SECONDS_BETWEEN_FILES:
                    self.write()

        return timed

    def write(self) -> None:
        """Leave the sums so far: for each name [calls, seconds, seconds of processor time]."""
        self._written = time.monotonic()
        part = self._file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        part.write_text(json.dumps(self._sums), encoding="utf-8")
        part.replace(self._file)


def noting(schedule: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """The same function, vLLM's Scheduler.schedule, each of whose steps becomes a line:
    `time tokens requests`.
    """

    @functools.wraps(schedule)
    def noted(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        if step.total_num_scheduled_tokens:
            with file.open("a", encoding="utf-8") as opened:
                opened.write(
                    f"{time.monotonic():.6f} {step.total_num_scheduled_tokens} {len(step.num_scheduled_tokens)}\n"
                )
        return step

    return noted


def install() -> None:
    """Put the clocks in; called by vLLM in each of its processes. They tick where the engine core
    steps: in the process that has it. A forked process inherits them, for it does not load plugins
    again.
    """
    if not {FILE, STEPS_FILE} & os.environ.keys():
        return
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    if hasattr(core, "lockstep_clock"):
        return
    core.lockstep_clock = True
    if STEPS_FILE in os.environ:
        scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
        scheduler.schedule = noting(scheduler.schedule, Path(os.environ[STEPS_FILE]))
    if FILE not in os.environ:
        return
    clock = Clock(Path(os.environ[FILE]))
    for name, functions in CLOCKS.items():
        for module, kind, function in functions:
            owner = getattr(importlib.import_module(module), kind, None)
            if owner is not None and function in vars(owner):
                setattr(owner, function, clock.around(name, getattr(owner, function)))


def variables(value: Path | str, what: str = FILE) -> dict[str, str]:
    """For the environment of a server that loads a plugin of this folder.

    Args:
        value: of the plugin's variable, such as the file of a clock.
        what: the variable.
    """
    root = PLUGIN_FOLDER.parents[2]
    paths = [str(root), str(PLUGIN_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {what: str(value), "PYTHONPATH": os.pathsep.join(paths)}


Step = tuple[float, int, int]
"""When it was scheduled (monotonic clock), tokens, requests."""


def read_steps(file: Path) -> list[Step]:
    """The whole lines of a file of steps."""
    text = file.read_text(encoding="utf-8")
    rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [(float(at), int(tokens), int(requests)) for at, tokens, requests in rows]


def computed_anew(
    steps: Sequence[Step], updates: Sequence[tuple[float, float]], after: float = 0.5
) -> list[dict[str, float]]:
    """Find the work that an engine did again after each update, before it went on as usual.

    A step of answers that go on has a token of each; one with many times as many computes prompts
    and what was thrown away.

    Args:
        updates: when each began and ended (monotonic clock).
        after: seconds after an update's end that still belong to it; half the way to the next
            update at most.

    Returns:
        for each update `tokens`, in how many `steps`, and `seconds` from the first of these to the
        step behind the last.
    """
    found = []
    for begin, limit in windows_of(updates, after):
        mine = [
            n
            for n, (at, tokens, requests) in enumerate(steps)
            if begin <= at <= limit and tokens > MANY * requests
        ]
        if not mine or mine[-1] + 1 == len(steps):
            found.append({"tokens": 0.0, "steps": 0.0, "seconds": 0.0})
            continue
        first, last = mine[0], mine[-1]
        tokens = sum(steps[n][1] - steps[n][2] for n in mine)
        found.append(
            {
                "tokens": float(tokens),
                "steps": float(len(mine)),
                "seconds": steps[last + 1][0] - steps[first][0],
            }
        )
    return found


def spent(
    before: dict[str, list[float]], after: dict[str, list[float]], tokens: float
) -> dict[str, dict[str, float]]:
    """Microseconds for each token between two looks at the file, by what they were spent on.

    Returns:
        for each name `us` by the clock on the wall, and `processor_us`.
    """
    found = {}
    for name, (calls, wall, busy) in after.items():
        calls_before, wall_before, busy_before = before.get(name, [0, 0.0, 0.0])
        if calls > calls_before:
            found[name] = {
                "us": (wall - wall_before) / tokens * 1e6,
                "processor_us": (busy - busy_before) / tokens * 1e6,
            }
    return found
