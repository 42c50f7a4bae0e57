"""Processes of this machine, as /proc shows them: one that is still the same, the users of a port or
a file, and a process that ends with its parent.

Standard library only.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """A process: its id, its start (clock ticks since boot, as the kernel counts them), and the
    boot.

    A process id alone is given to another process sooner or later; the three together never are.
    """

    pid: int
    ticks: int
    boot: str

    def is_alive(self) -> bool:
        """Return whether this very process still runs; a zombie does not."""
        return identify(self.pid) == self


def boot_id() -> str:
    """Return the id of the machine's present boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Identity | None:
    """Return the process that has this id now; None if there is none, or only a zombie."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command's name in brackets and may itself hold spaces and brackets.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return None
    return Identity(pid, int(fields[19]), boot_id())


def port_user(port: int, proc: Path = Path("/proc")) -> str:
    """Return the process that listens on a TCP port, as "python (pid 123)", or "another process" if
    /proc does not show it.
    """
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for pid in _users(lambda link: os.readlink(link) in inodes, proc):
        return f"{(proc / str(pid) / 'comm').read_text().strip()} (pid {pid})"
    return "another process"


def file_users(file: os.stat_result, proc: Path = Path("/proc")) -> list[int]:
    """Return the ids of the processes that have a file open, as far as this user may see them."""
    return sorted(_users(lambda link: os.path.samestat(link.stat(), file), proc))


def _users(is_of: Callable[[Path], bool], proc: Path) -> Iterator[int]:
    """Yield the processes with a descriptor for which `is_of` returns True."""
    for process in proc.glob("[0-9]*"):
        try:
            if any(is_of(link) for link in (process / "fd").iterdir()):
                yield int(process.name)
        except OSError:  # The process belongs to another user, or has just ended.
            continue


# ---- end with the parent ----

# A killed parent cannot end its children. A child that has renamed itself, as vLLM's engine core
# does, is missed by `pkill -f` as well, and would hold a GPU's memory. Such a child calls
# `end_with_parent`. Linux only: elsewhere nothing happens.

PR_SET_PDEATHSIG = 1
WATCH_SECONDS = 0.5
"""Seconds between two checks of the parent's process id."""


def end_with_parent(parent: int | None = None) -> None:
    """Kill this process with SIGKILL once its parent has ended.

    Args:
        parent: the process id that the parent must have; the present parent's if not given. With it
            a parent that ended before this call is noticed as well.

    The kernel sends the signal at once (prctl(2), PR_SET_PDEATHSIG), but it does so when the thread
    ends that created the
    process. Therefore the signal is requested only if that was the parent's main thread. A thread
    checks the parent every
    WATCH_SECONDS in any case. A process that `multiprocessing` started also notices a parent that
    ended before this call.
    """
    _end_with(parent or os.getppid(), forked=False)


def end_forked_with_parent() -> None:
    """Have every process that is forked from this one end with its parent, and those that are
    forked from it.
    """
    forking: list[int] = []

    def before() -> None:
        forking[:] = [os.getpid()]

    os.register_at_fork(before=before, after_in_child=lambda: _end_with(forking[0], forked=True))


def _end_with(parent: int, forked: bool) -> None:
    if sys.platform != "linux":
        return
    if _created_by_main_thread(parent):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _kill_unless_child_of(parent)  # it may have ended before the line above
    threading.Thread(target=_watch, args=(parent, forked), name="ParentWatch", daemon=True).start()


def _created_by_main_thread(parent: int) -> bool:
    """Return whether the main thread of `parent` created this process; False if the kernel does not
    list children by thread.
    """
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    except OSError:
        return False
    return str(os.getpid()) in children.split()


def _watch(parent: int, forked: bool) -> None:
    while True:
        _kill_unless_child_of(parent)
        # A process that was started anew by `multiprocessing` learns who started it, some time
        # after the start. A forked one inherits the answer that was true for its parent.
        starter = None if forked else multiprocessing.parent_process()
        if starter is not None and starter.pid is not None:
            _kill_unless_child_of(starter.pid)
        time.sleep(WATCH_SECONDS)


def _kill_unless_child_of(parent: int) -> None:
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
