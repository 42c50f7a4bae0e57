"""Where the time of vLLM's engine core goes: seconds of its main thread by what it does, and those of the thread that sends.

A plugin of vLLM's, which the folder `plugin` beside this file names. It puts a clock around a few functions that are called
once or twice a step, and leaves the sums in a file twice a second. Work and waiting look the same from outside: to wait for a
GPU, PyTorch asks it again and again, so that the process is busy all the time.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = "LOCKSTEP_ENGINE_CLOCK"
"""The variable that names the file; without it nothing is measured."""
PLUGIN_FOLDER = Path(__file__).resolve().parent / "plugin"
SECONDS_BETWEEN_FILES = 0.5
CLOCKS: dict[str, list[tuple[str, str, str]]] = {
    "steps": [("vllm.v1.engine.core", "EngineCore", "step"), ("vllm.v1.engine.core", "EngineCore", "step_with_batch_queue")],
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
"""What is measured, by the name under which it is reported. `steps` holds all others but the last one, which has its own
thread; on a CPU the model itself is in them too. A function that a version of vLLM lacks is left out."""


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


def install() -> None:
    """Put the clocks in; called by vLLM in each of its processes. They tick where the engine core steps: in the process that
    has it, which inherits them if it is forked, for then it does not load plugins again.
    """
    if FILE not in os.environ:
        return
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    if hasattr(core, "lockstep_clock"):
        return
    core.lockstep_clock = clock = Clock(Path(os.environ[FILE]))
    for name, functions in CLOCKS.items():
        for module, kind, function in functions:
            owner = getattr(importlib.import_module(module), kind, None)
            if owner is not None and function in vars(owner):
                setattr(owner, function, clock.around(name, getattr(owner, function)))


def variables(file: Path) -> dict[str, str]:
    """For the environment of a server whose engine core is to be measured."""
    root = PLUGIN_FOLDER.parents[2]
    paths = [str(root), str(PLUGIN_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {FILE: str(file), "PYTHONPATH": os.pathsep.join(paths)}


def spent(before: dict[str, list[float]], after: dict[str, list[float]], tokens: float) -> dict[str, dict[str, float]]:
    """Microseconds for each token between two looks at the file, by what they were spent on.

    Returns:
        for each name `us` by the clock on the wall, and `processor_us`.
    """
    found = {}
    for name, (calls, wall, busy) in after.items():
        calls_before, wall_before, busy_before = before.get(name, [0, 0.0, 0.0])
        if calls > calls_before:
            found[name] = {"us": (wall - wall_before) / tokens * 1e6, "processor_us": (busy - busy_before) / tokens * 1e6}
    return found
