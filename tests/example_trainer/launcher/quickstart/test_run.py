"""The quick start's course over small real processes: success, every way to fail, and nothing left
running.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from example_trainer.child_processes.guard import descendants, parents
from tests.conftest import ROOT
from tests.forked_commands import run_command, start_unguarded

# early among the others (tests/conftest.py): they take long
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

STACK = Path(__file__).with_name("small_plan.py")


def command(output: Path, steps: int, fault: str) -> list[str]:
    return [sys.executable, str(STACK), str(output), str(steps), *([fault] if fault else [])]


def run_stack(output: Path, steps: int = 3, fault: str = "") -> subprocess.CompletedProcess[str]:
    return run_command(command(output, steps, fault), seconds=240)


@contextmanager
def running_stack(
    output: Path, steps: int = 3, fault: str = "wait"
) -> Iterator[tuple[Any, TextIO]]:
    """A run and its output; it is ended with the block."""
    here, there = os.pipe()
    process = start_unguarded(command(output, steps, fault), there, os.environ, ROOT)
    os.close(there)
    with os.fdopen(here) as said:
        try:
            yield process, said
        finally:
            process.terminate()
            process.wait(120)


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """Return its output at its end, from the line with its own name on."""
    found = re.search(r"^quickstart: .*", done.stdout, re.MULTILINE | re.DOTALL)
    assert found is not None, done.stdout
    return found[0]


def left_over(output: Path) -> list[int]:
    """Living processes of the run with this folder, known by the variable that each of them was
    started with.
    """
    mark = f"SMALL_STACK={output}".encode()
    found = []
    for pid in parents():
        try:
            if mark in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended in between, or belongs to another process
    return found


def test_a_whole_run(tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = run_stack(output)
    assert done.returncode == 0, done.stdout
    summary = json.loads((output / "summary.json").read_text())
    assert (
        summary["eval_before"],
        summary["eval_after"],
        summary["steps"],
        summary["weight_updates"],
    ) == (0.5, 0.9, 3, 3)
    assert (output / "reward.png").stat().st_size > 10_000
    for said in (
        "step 1/3",
        "step 3/3",
        "50.0%",
        "90.0%",
        "What is 2 [plus] 3?",
        r"\boxed{5}",
        str(output / "reward.png"),
    ):
        assert said in done.stdout, said
    assert "\x1b" not in done.stdout
    assert {path.name for path in (output / "logs").glob("*.log")} >= {
        "service.log",
        "vllm.log",
        "trainer.log",
        "environment.log",
    }
    assert left_over(output) == []
    again = run_stack(output)
    assert again.returncode == 0, again.stdout


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("vllm-dies", ["vllm exited with code 9", "vllm.log", "RuntimeError: out of tokens"]),
        ("environment-fails", ["environment exited with code 4", "environment.log"]),
        (
            "trainer-fails",
            [
                "trainer exited with code 1",
                "trainer.log",
                "ERROR the batch holds nothing to train on",
            ],
        ),
        ("trainer-stalls", ["no news from the trainer for 20 s after step 2"]),
        ("short", ["the trainer ended after 1 of 3 steps"]),
        ("not-served", ["answered by weight version 2, and the trainer is at 3", "trainer.log"]),
        (
            "never-ready",
            ["vllm was not ready after 20 s: GET http", "answers 503; log: ", "vllm.log"],
        ),
    ],
)
def test_every_failure_is_told_and_leaves_nothing(
    tmp_path: Path, fault: str, words: list[str]
) -> None:
    output = tmp_path / "out"
    done = run_stack(output, fault=fault)
    assert done.returncode == 1
    assert all(word in complaint(done) for word in words), done.stdout
    assert "Traceback" not in done.stdout
    assert not (output / "summary.json").exists()
    assert left_over(output) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_in_the_middle_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "out"
    with running_stack(output) as (running, told):
        for line in told:
            if line.startswith("step 1/3"):
                break
        deadline = time.monotonic() + 120
        # A guard may be there before its command, and a process before its variables.
        while (
            len(below := descendants(running.pid)) < 8 or len(left_over(output)) < 8
        ) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(below) == len(left_over(output)) == 8, "four processes, each with its guard"
        running.send_signal(number)
        code = running.wait(120)
        said = told.read()
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    assert ("nothing is left running" in said) == (number != signal.SIGKILL)
    deadline = time.monotonic() + 180
    while (alive := [pid for pid in below if pid in parents()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive == []


def test_an_environment_that_is_done_before_the_trainer_is_no_failure(tmp_path: Path) -> None:
    done = run_stack(tmp_path / "out", steps=20, fault="environment-done")
    assert done.returncode == 0, done.stdout


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    outputs = [tmp_path / name for name in ("one", "two")]
    with (
        running_stack(outputs[0], 30, "") as (first, told),
        running_stack(outputs[1], 30, "") as (second, of_second),
    ):
        said = [told.read(), of_second.read()]
        assert [process.wait(240) for process in (first, second)] == [0, 0], said
    assert all(
        json.loads((output / "summary.json").read_text())["steps"] == 30 for output in outputs
    )


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with running_stack(output) as (first, said):
        said.readline()
        second = run_stack(output)
    assert second.returncode == 1
    assert f"in use by another quick start (process {first.pid})" in complaint(second)
