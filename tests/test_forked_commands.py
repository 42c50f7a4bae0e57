"""A forked command is the executed one: its arguments, environment, folder, output, exit status, and how it is stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from example_trainer.child_processes.guard import descendants, parents
from example_trainer.child_processes.processes import ManagedProcess
from tests.conftest import Processes
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
    processes.wait_for_http(f"http://localhost:{port}/", 60)
    assert httpx.get(f"http://localhost:{port}/status", timeout=30).status_code == 401
    assert list(tmp_path.glob("runs/*.db")), "its store is in its folder"
    family = [service.guard.pid, *descendants(service.guard.pid)]
    assert len(family) == 2
    assert processes.stop(service) == 0
    assert not set(family) & parents().keys()
