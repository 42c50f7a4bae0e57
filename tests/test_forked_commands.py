"""A forked command is the executed one: its arguments, environment, folder, output, exit status, and how it is stopped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from example_trainer.child_processes.guard import descendants, parents
from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.child_processes.readiness import wait_until
from tests.conftest import ROOT, Processes
from tests.forked_commands import Command, Forked

RUN_API = [sys.executable, "-m", "atroposlib.cli.run_api"]


def test_only_known_python_commands_are_forked() -> None:
    kinds = [Command.of(words) for words in (RUN_API, [sys.executable, "-c", "0"], [sys.executable, "-u", "x.py"], ["true"])]
    assert [command and command.kind for command in kinds] == ["light", None, None, None]


def test_it_is_the_executed_one(processes: Processes, tmp_path: Path) -> None:
    forked = processes.start("forked", [*RUN_API, "--port", "nine"], directory=tmp_path)
    assert isinstance(forked.guard, Forked)
    executed = ManagedProcess("executed", [*RUN_API, "--port", "nine"], tmp_path / "executed.log", directory=tmp_path)
    for process in (forked, executed):
        process.guard.wait(120)
    assert forked.poll() == executed.poll() == 2
    assert forked.log_path.read_text() == executed.log_path.read_text() != ""
    processes.supervisor.processes.remove(forked)


def test_it_has_its_own_environment_and_folder_and_ends_as_it_is_told(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port = free_port()
    service = processes.start("service", [*RUN_API, "--port", str(port)], {"ROLLOUT_API_KEY": "k" * 32}, tmp_path)
    assert isinstance(service.guard, Forked)
    processes.wait_for_http(f"http://localhost:{port}/", 180)
    assert httpx.get(f"http://localhost:{port}/status", timeout=30).status_code == 401
    assert list(tmp_path.glob("runs/*.db")), "its store is in its folder"
    family = [service.guard.pid, *descendants(service.guard.pid)]
    assert len(family) == 2
    assert processes.stop(service) == 0
    assert not set(family) & parents().keys()


STARTER = """
import os, pathlib, sys, time
from tests.forked_commands import Forked, start_unguarded
words = [sys.executable, "-m", "atroposlib.cli.run_api", "--store", "memory", "--port", sys.argv[1]]
process = start_unguarded(words, 2, os.environ, pathlib.Path.cwd())
assert isinstance(process, Forked)
print(process.pid, flush=True)
time.sleep(600)
"""


def test_without_a_guard_too_it_ends_with_who_started_it(free_port: Callable[[], int]) -> None:
    words = [sys.executable, "-c", STARTER, str(free_port())]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert pid in parents()
        starter.kill()
    wait_until("its end", lambda: None if pid not in parents() else f"process {pid} lives on", 180)
