"""Measure how many programs a second the sandbox runs, and how long a program waits for it.

    python bench/sandbox.py --output bench/results/sandbox.json

Runs the code environment's held-out problems with their reference solutions, eight hidden calls
each, some at a time. To compare with, an interpreter is started for each program without any
isolation. Needs no GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from atroposlib.sandbox import LocalSandbox, Program
from atroposlib.sandbox.contract import verdict
from bench.measured import Options, command_line, measured
from environments.code_server import CodeProblem, calls_of, held_out_problems


async def sandboxed(problems: list[CodeProblem], count: int, at_once: int) -> dict[str, Any]:
    """Run `count` programs, `at_once` at a time."""
    began = time.perf_counter()
    box = LocalSandbox(at_once=at_once)
    await box.start()
    started = time.perf_counter() - began
    slots = asyncio.Semaphore(at_once)
    seconds: list[float] = []

    async def one(problem: CodeProblem) -> bool:
        calls, expected = calls_of(problem)
        async with slots:
            begun = time.perf_counter()
            outcome = await box.run(Program(problem.reference, problem.function, calls))
            seconds.append(time.perf_counter() - begun)
        return verdict(outcome, expected).kind == "right"

    await one(problems[0])
    seconds.clear()
    began = time.perf_counter()
    right = await asyncio.gather(*(one(problems[i % len(problems)]) for i in range(count)))
    took = time.perf_counter() - began
    await box.close()
    assert all(right), "a reference solution was not right"
    ordered = sorted(seconds)
    return {
        "how": box.mode,
        "at_once": at_once,
        "programs": count,
        "programs_per_second": round(count / took, 1),
        "milliseconds_median": round(1e3 * median(seconds), 2),
        "milliseconds_p99": round(1e3 * ordered[int(0.99 * (count - 1))], 2),
        "start_seconds": round(started, 3),
    }


def without_sandbox(problems: list[CodeProblem], count: int) -> dict[str, Any]:
    """An interpreter for each program, one at a time, which can do whatever this user can."""
    seconds = []
    for number in range(count):
        problem = problems[number % len(problems)]
        code = (
            f"{problem.reference}\nfor call in {calls_of(problem)[0]!r}: {problem.function}(*call)"
        )
        began = time.perf_counter()
        subprocess.run(
            [os.path.realpath(sys.executable), "-I", "-S", "-c", code], check=True, timeout=60
        )
        seconds.append(time.perf_counter() - began)
    return {
        "how": "an interpreter for each program, without isolation",
        "at_once": 1,
        "programs": count,
        "programs_per_second": round(count / sum(seconds), 1),
        "milliseconds_median": round(1e3 * median(seconds), 2),
        "milliseconds_p99": round(1e3 * sorted(seconds)[int(0.99 * (count - 1))], 2),
    }


OPTIONS: Options = {
    "--programs": {"type": int, "default": 400, "help": "for each row (default: 400)"},
    "--output": {"type": Path, "help": "write the results to this JSON file"},
}


def main() -> None:
    arguments = command_line(__doc__, OPTIONS).parse_args()
    problems = held_out_problems(50)
    load = os.getloadavg()[0]
    rows = [asyncio.run(sandboxed(problems, arguments.programs, at_once)) for at_once in (1, 2, 4)]
    rows.append(without_sandbox(problems, arguments.programs // 4))
    machine: dict[str, Any] = {
        "processors": os.cpu_count(),
        "load_before": round(load, 1),
        "kernel": platform.release(),
    }
    result = {
        "rows": [row | {"measured": measured()} for row in rows],
        "machine": machine | {"measured": measured()},
    }
    for row in rows:
        print(json.dumps(row))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
