"""End a process when its parent ends, however the parent ends.

A killed parent cannot end its children. A child that has renamed itself, as vLLM's engine core
does, is missed by `pkill -f` as well, and would hold a GPU's memory. Such a child calls
`end_with_parent`.

Standard library only. Linux only: elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

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
