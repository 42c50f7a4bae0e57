"""Supervision of real processes: what was started ends with who started it, and with its own
death's story.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from example_trainer.child_processes.guard import descendants, parents
from example_trainer.child_processes.ports import is_free
from example_trainer.child_processes.processes import (
    ManagedProcess,
    ProcessDied,
    ProcessError,
    Supervisor,
    describe_exit,
    tail,
)
from tests.conftest import ROOT

# Starts a child in the same group and one in a session of its own, writes the three process ids,
# then lives on.
FAMILY = """
import os, signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
near = subprocess.Popen(["sleep", "600"])
far = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("family", os.getpid(), near.pid, far.pid, flush=True)
if "orphan" in sys.argv:
    sys.exit(3)
time.sleep(600)
"""


def eventually(done: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def family(log: Path) -> list[int]:
    """The process ids that FAMILY wrote."""
    told: list[list[str]] = []

    def has_told() -> bool:
        told[:] = re.findall(r"family (\d+) (\d+) (\d+)\n", log.read_text() if log.exists() else "")
        return bool(told)

    assert eventually(has_told), "the family never started"
    return [int(pid) for pid in told[0]]


def living(pids: list[int]) -> list[int]:
    now = parents()
    return [pid for pid in pids if pid in now]


def test_stopping_at_once_needs_no_grace_period(tmp_path: Path) -> None:
    """The command may not even have been started when it is asked to end."""
    for attempt in range(10):
        process = ManagedProcess(
            "sleeper", ["sleep", "600"], tmp_path / f"{attempt}.log", grace=600.0
        )
        assert process.stop() == 128 + signal.SIGTERM


@pytest.mark.parametrize("arguments", [[], ["stubborn"]], ids=["obedient", "ignores SIGTERM"])
def test_stop_ends_the_whole_family(tmp_path: Path, arguments: list[str]) -> None:
    log = tmp_path / "family.log"
    process = ManagedProcess(
        "family", [sys.executable, "-c", FAMILY, *arguments], log, grace=1.0 if arguments else 60.0
    )
    pids = family(log)
    assert len(living(pids)) == 3
    code = process.stop()
    assert living(pids) == []
    assert code == (128 + signal.SIGKILL if arguments else 128 + signal.SIGTERM)


def test_children_of_a_process_that_ended_are_swept_up_and_its_status_kept(tmp_path: Path) -> None:
    log = tmp_path / "family.log"
    process = ManagedProcess("family", [sys.executable, "-c", FAMILY, "orphan"], log)
    pids = family(log)
    assert eventually(lambda: process.poll() is not None)
    assert process.poll() == 3
    assert living(pids) == []
    process.release()


# Ends its first thread. Another one keeps the process and its socket.
HALF_ENDED = """
import ctypes, platform, socket, threading, time
taken = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=time.sleep, args=(600,)).start()
print(taken.getsockname()[1], flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # SYS_exit
"""


def test_a_process_lives_until_its_last_thread_has_ended() -> None:
    """As a killed process does, whose first thread often ends before the others."""
    process = subprocess.Popen([sys.executable, "-c", HALF_ENDED], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        stat = Path(f"/proc/{process.pid}/stat")
        assert eventually(lambda: ") Z " in stat.read_text())
        assert not is_free(port)
        assert living([process.pid])
        process.kill()
        assert eventually(lambda: not living([process.pid]))
        assert is_free(port)
    finally:
        process.kill()
        process.communicate()


STARTER = """
import signal, sys, time
from pathlib import Path
from example_trainer.child_processes.processes import Supervisor
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore it
with Supervisor() as supervisor:
    for number in range(2):
        log = Path(sys.argv[1]) / f"{number}.log"
        supervisor.start("family", [sys.executable, "-c", sys.argv[2]], log, grace=2.0)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_orphan_survives_the_starter(tmp_path: Path, number: signal.Signals) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path), FAMILY], cwd=ROOT)
    try:
        pids = family(tmp_path / "0.log") + family(tmp_path / "1.log")
        below = descendants(starter.pid)
        assert set(pids) < set(below)  # the guards, too
    finally:
        os.kill(starter.pid, number)
        starter.wait(60)
    assert eventually(lambda: living(below) == []), f"still alive: {living(below)}"


def test_the_command_dies_with_its_guard(tmp_path: Path) -> None:
    process = ManagedProcess("sleeper", ["sleep", "600"], tmp_path / "log")
    assert eventually(lambda: len(descendants(process.guard.pid)) == 1)
    pid = process.command_pid()
    process.guard.kill()
    assert eventually(lambda: living([pid]) == [])
    assert process.stop() == 128 + signal.SIGKILL


def test_a_death_is_reported_with_name_status_log_and_last_lines(tmp_path: Path) -> None:
    script = "print('loading'); print(); print('\\x1b[31mno such model\\x00'); raise SystemExit(7)"
    with Supervisor() as supervisor:
        supervisor.start("other", ["sleep", "600"], tmp_path / "other.log")
        supervisor.start("vLLM server", [sys.executable, "-c", script], tmp_path / "vllm.log")

        def died() -> bool:
            try:
                supervisor.check()
            except ProcessDied as error:
                head, *rest = str(error).splitlines()
                assert head.startswith("vLLM server exited with code 7 after ")
                assert head.endswith(f"log: {tmp_path / 'vllm.log'}")
                assert rest == ["    loading", "    [31mno such model"]
                return True
            return False

        assert eventually(died)


def test_the_first_error_of_a_long_log_is_told(tmp_path: Path) -> None:
    """vLLM's processes each repeat a failure, and the last words of the outermost one hold no
    cause.
    """
    script = (
        "print('(Worker pid=7) ERROR 11-21 09:16:34 [multiproc_executor.py:953] Traceback (most recent call last):')\n"
        "print('(Worker pid=7) ERROR 11-21 09:16:34 [multiproc_executor.py:953] RuntimeError: start exceeds size (384).')\n"
        "print('noise\\n' * 100)\n"
        "print('RuntimeError: Engine core initialization failed. See root cause above.')\n"
        "raise SystemExit(1)"
    )
    with Supervisor() as supervisor:
        process = supervisor.start("vLLM server", [sys.executable, "-c", script], tmp_path / "log")
        with pytest.raises(ProcessDied) as died:
            supervisor.finish(process, 120)
    lines = str(died.value).splitlines()
    assert lines[1] == "    first error: RuntimeError: start exceeds size (384)."
    assert lines[-1] == "    RuntimeError: Engine core initialization failed. See root cause above."


def test_waiting_for_one_notices_that_another_died(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        trainer = supervisor.start("trainer", ["sleep", "600"], tmp_path / "trainer.log")
        supervisor.start("service", ["sh", "-c", "kill -9 $$"], tmp_path / "service.log")
        with pytest.raises(ProcessDied, match="service was killed by SIGKILL"):
            supervisor.finish(trainer, 120)


def test_a_deadline_ends_the_process_and_says_so(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        slow = supervisor.start(
            "evaluation", ["sh", "-c", "echo half way; sleep 600"], tmp_path / "log"
        )
        assert eventually(lambda: "half way" in (tmp_path / "log").read_text())
        with pytest.raises(
            ProcessError, match=r"evaluation was not done after 1 s; log: .*\n +half way"
        ):
            supervisor.finish(slow, 1.0)
        assert slow.poll() is not None


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        process = supervisor.start("trainer", ["no-such-program"], tmp_path / "log")
        with pytest.raises(
            ProcessDied, match=r"(?s)trainer exited with code 127.*cannot start no-such-program"
        ):
            supervisor.finish(process, 120)


def test_variables_are_set_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GONE", "1")
    with Supervisor() as supervisor:
        process = supervisor.start("env", ["env"], tmp_path / "log", {"GONE": None, "ADDED": "2"})
        supervisor.finish(process, 120)
    lines = (tmp_path / "log").read_text().splitlines()
    assert "ADDED=2" in lines
    assert not any(line.startswith("GONE=") for line in lines)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (137, "was killed by SIGKILL (out of memory?)"),
        (143, "was killed by SIGTERM"),
        (255, "exited with code 255"),
    ],
)
def test_exit_statuses_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_tail_of_a_long_log_and_of_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == []
    log.write_text("".join(f"line {n}\n\n" for n in range(50_000)) + "x" * 1000)
    assert tail(log, lines=3, columns=20) == ["line 49998", "line 49999", "x" * 20]
