"""Processes that end with their parent: spawned, forked, of a pool, and those whose creating thread
ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from example_trainer.child_processes.guard import parents
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's signal and /proc are Linux's"
)

START = f"""
import multiprocessing, os, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from atroposlib.utils import processes
from atroposlib.utils.processes import end_forked_with_parent, end_with_parent

def report(name):
    os.write(1, f"{{name}} {{os.getpid()}}\\n".encode())  # one write, so two processes cannot mix

def wait(name="child"):
    report(name)
    time.sleep(600)
"""

PROGRAMS = {
    "spawned": """
if __name__ == "__mp_main__":
    end_with_parent()
if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=wait).start()
    time.sleep(600)
""",
    "forked, and forked again": """
def fork_again():
    multiprocessing.get_context("fork").Process(target=wait, args=("grandchild",)).start()
    wait()

if __name__ == "__main__":
    end_forked_with_parent()
    multiprocessing.get_context("fork").Process(target=fork_again).start()
    time.sleep(600)
""",
    "only watched": """
if __name__ == "__main__":
    processes._created_by_main_thread = lambda parent: False  # as with a kernel that does not list children by thread
    end_forked_with_parent()
    multiprocessing.get_context("fork").Process(target=wait).start()
    time.sleep(600)
""",
    "of a pool": """
from atroposlib.utils.processes import KillableCalls

if __name__ == "__main__":
    import asyncio
    calls = KillableCalls()
    print("child", asyncio.run(calls.call(os.getpid, seconds=60)), flush=True)
    time.sleep(600)
""",
}


@contextmanager
def running(
    program: str, folder: Path
) -> Iterator[tuple[subprocess.Popen[str], Iterator[tuple[str, int]]]]:
    """Run a program as a script; yields it and the names and process ids that it and its children
    print.
    """
    script = folder / "program.py"
    script.write_text(START + program)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, ((name, int(pid)) for name, pid in map(str.split, process.stdout))
        finally:
            os.killpg(
                process.pid, signal.SIGKILL
            )  # a child that fails to end is in this process group as well


def wait_until_gone(pids: set[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := pids & parents().keys():
        assert time.monotonic() < deadline, f"{left} outlived their parent"
        time.sleep(0.02)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_it_ends_when_its_parent_is_killed(kind: str, tmp_path: Path) -> None:
    with running(PROGRAMS[kind], tmp_path) as (process, reports):
        pids = {next(reports)[1] for _ in range(2 if "again" in kind else 1)}
        assert pids <= parents().keys()
        process.kill()
        wait_until_gone(pids, seconds=60)


def test_it_outlives_the_thread_that_created_it(tmp_path: Path) -> None:
    program = """
if __name__ == "__main__":
    end_forked_with_parent()
    start = multiprocessing.get_context("fork").Process(target=wait).start
    creator = threading.Thread(target=start)
    creator.start()
    creator.join()
    time.sleep(3 * processes.WATCH_SECONDS)  # several checks of the parent, which still runs
    report("parent")
    time.sleep(600)
"""
    with running(program, tmp_path) as (process, reports):
        found = dict(next(reports) for _ in range(2))
        assert found.keys() == {"child", "parent"}
        assert set(found.values()) <= parents().keys()
        process.kill()
        wait_until_gone(set(found.values()), seconds=60)


def test_it_ends_if_its_parent_ended_before_it_asked(tmp_path: Path) -> None:
    program = """
if __name__ == "__mp_main__":
    report("child")
    while os.getppid() == int(os.environ["STARTER"]):
        time.sleep(0.01)
    end_with_parent()
if __name__ == "__main__":
    os.environ["STARTER"] = str(os.getpid())
    multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)).start()
    time.sleep(600)
"""
    with running(program, tmp_path) as (process, reports):
        _, child = next(reports)
        process.kill()
        wait_until_gone({child}, seconds=60)
