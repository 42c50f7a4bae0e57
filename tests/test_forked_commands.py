"""A forked command is the executed one: its arguments, environment, folder, output, exit status,
and how it is stopped.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from example_trainer.child_processes.guard import descendants, parents
from example_trainer.child_processes.processes import ManagedProcess, wait_until
from tests.conftest import ROOT, Processes
from tests.forked_commands import FOLDER, Command, Forked, ForkServer, start_unguarded

RUN_API = [sys.executable, "-m", "atroposlib.cli.run_api"]


def test_only_known_python_commands_are_forked() -> None:
    kinds = [
        Command.of(words)
        for words in (
            RUN_API,
            [sys.executable, "-c", "0"],
            [sys.executable, "-u", "x.py"],
            ["true"],
        )
    ]
    assert [command and command.kind for command in kinds] == ["light", None, None, None]


def test_it_is_the_executed_one(processes: Processes, tmp_path: Path) -> None:
    forked = processes.start("forked", [*RUN_API, "--port", "nine"], directory=tmp_path)
    assert isinstance(forked.guard, Forked)
    executed = ManagedProcess(
        "executed", [*RUN_API, "--port", "nine"], tmp_path / "executed.log", directory=tmp_path
    )
    for process in (forked, executed):
        process.guard.wait(120)
    assert forked.poll() == executed.poll() == 2
    assert forked.log_path.read_text() == executed.log_path.read_text() != ""
    processes.supervisor.processes.remove(forked)


def test_it_has_its_own_environment_and_folder_and_ends_as_it_is_told(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port = free_port()
    service = processes.start(
        "service", [*RUN_API, "--port", str(port)], {"ROLLOUT_API_KEY": "k" * 32}, tmp_path
    )
    assert isinstance(service.guard, Forked)
    processes.wait_for_http(f"http://localhost:{port}/", 180)
    assert httpx.get(f"http://localhost:{port}/status", timeout=120).status_code == 401
    assert list(tmp_path.glob("runs/*.db")), "its store is in its folder"
    family = [service.guard.pid, *descendants(service.guard.pid)]
    assert len(family) == 2
    assert processes.stop(service) == 0
    assert not set(family) & parents().keys()


def test_threads_that_start_commands_at_once_get_their_own(tmp_path: Path) -> None:
    ready = threading.Barrier(8)

    def start(number: int) -> tuple[int, str]:
        log = tmp_path / f"{number}.log"
        with log.open("wb") as output:
            ready.wait(60)
            words = [sys.executable, "-c", "import os; print(os.getpid())"]
            process = start_unguarded(words, output.fileno(), os.environ, tmp_path, program="light")
        assert process.wait(120) == 0
        return process.pid, log.read_text()

    with ThreadPoolExecutor(8) as threads:
        for pid, printed in threads.map(start, range(40)):
            assert printed == f"{pid}\n"


WORKER = """
import sys
print(sys.stdin.readline().strip(), "torch" in sys.modules, sys.argv, flush=True)
sys.stdin.readline()
sys.exit(3)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_worker_of_the_tests_is_talked_to_as_python_is_and_dies_with_what_stands_for_it(
    killed: bool,
) -> None:
    words = [
        sys.executable,
        ROOT / "tests/forked_python.py",
        "-u",
        "-c",
        f"import os; print(os.getpid())\n{WORKER}",
    ]
    with subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        worker.stdin.write("one line\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "one line True ['-c']\n", (
            "what tests import is there already"
        )
        worker.kill() if killed else worker.stdin.write("another\n")
        worker.stdin.close()
        assert worker.stdout.read() == "", "it has ended"
        assert worker.wait(60) == (-9 if killed else 3)
        wait_until("its end", lambda: f"{pid} runs" if pid in parents() else None, 60)


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
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert pid in parents()
        starter.kill()
    wait_until("its end", lambda: None if pid not in parents() else f"process {pid} lives on", 180)


SERVER = """
import socket, sys
from tests.fork_server import Become, serve
from tests.forked_commands import end
command = None
try:
    serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
except Become as told:
    command = told.command
if command is not None:
    end(command.run)
"""


def test_a_client_that_dies_before_it_reads_its_answer_ends_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        (tmp_path / "log").open("wb") as log,
    ):
        listener.bind(f"{folder}/light")
        listener.listen()
        lifeline, there = socket.socketpair()
        numbers = (there.fileno(), listener.fileno())
        words = [sys.executable, "-c", SERVER, *map(str, numbers)]
        with subprocess.Popen(words, cwd=ROOT, pass_fds=numbers) as server, there, lifeline:
            monkeypatch.setenv(FOLDER, folder)
            dying, living = ForkServer("light"), ForkServer("light")
            command = Command("-c", False, ["print(6 * 7)"], False)
            told = {"command": vars(command), "environment": dict(os.environ), "directory": folder}
            os.close(dying._ask({**told, "grace": 0.0, "talks": False}, log.fileno()))
            assert select.select([dying._connection], [], [], 120)[0], "the answer has come"
            dying._connection.close()
            forked = living.fork(command, os.environ, tmp_path, log.fileno())
            assert forked.wait(120) == 0
            lifeline.close()
            assert server.wait(120) == 0
            living._connection.close()
    assert "42\n" in (tmp_path / "log").read_text()
