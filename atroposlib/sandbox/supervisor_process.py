"""The keeper's process as its owner sees it: how it is started, and how it is ended when it does
nothing any more.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

KEEPER = Path(__file__).with_name("inside") / "__main__.py"
END_SECONDS = 10.0
"""Time for a keeper to end by itself after its owner has closed its socket."""


def keeper_process(control: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a keeper that listens on that descriptor."""
    # Not the virtual environment's Python, which is a link from where programs may not look.
    python = os.path.realpath(sys.executable)
    return subprocess.Popen(
        [python, "-s", "-P", "-S", "-B", str(KEEPER), str(control)],
        # The only variables that it has: two threads need no arenas of 64 MiB each, and sets have
        # the same order in every run.
        env={"MALLOC_ARENA_MAX": "2", "PYTHONHASHSEED": "0"},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=(control,),
        start_new_session=True,
    )


def await_end(keeper: subprocess.Popen[bytes]) -> None:
    """Wait for a keeper whose socket was closed, and kill it with its programs if it does not end
    in time.
    """
    try:
        keeper.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        kill_all(keeper)


def kill_all(keeper: subprocess.Popen[bytes]) -> None:
    """Kill a keeper and every process below it, stopped ones included.

    Without namespaces a program outlives its killed watcher. So all processes are listed before the
    first one is killed.
    """
    if keeper.poll() is not None:
        return
    for pid in [keeper.pid, *processes_below(keeper.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # the kernel ended it with one of those before it
    keeper.wait()


def processes_below(pid: int) -> list[int]:
    """Return the processes that descend from a process, parents before their children."""
    pids = [pid]
    for one in pids:
        try:
            pids += [
                int(child)
                for child in Path(f"/proc/{one}/task/{one}/children")
                .read_text(encoding="ascii")
                .split()
            ]
        except OSError:
            continue  # it ended in the meantime
    return pids[1:]
