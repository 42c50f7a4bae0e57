"""Processes of this machine, as /proc shows them: one that is still the same, and the users of a
port or a file. Processes that end with their parent, and calls in child processes that can be
killed.

Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar


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


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped a process. A debugger does not count."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def started_at(pid: int) -> float | None:
    """Return the Unix time at which a process was started; None if it has ended."""
    process = identify(pid)
    if process is None:
        return None
    boot = next(
        float(line.split()[1])
        for line in Path("/proc/stat").read_text().splitlines()
        if line.startswith("btime ")
    )
    return boot + process.ticks / os.sysconf("SC_CLK_TCK")


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


def resident_bytes(pid: int | None) -> int:
    """Return the memory that a process has now; 0 if it has ended, or if the system does not show
    it.
    """
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * resource.getpagesize()


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
    """Have every process that is forked from this one end with its parent, and in turn every
    process that is forked from such a process.
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
        # A process that `multiprocessing` spawned learns which process started it, some time after
        # the start. A forked one inherits the answer that was true for its parent.
        starter = None if forked else multiprocessing.parent_process()
        if starter is not None and starter.pid is not None:
            _kill_unless_child_of(starter.pid)
        time.sleep(WATCH_SECONDS)


def _kill_unless_child_of(parent: int) -> None:
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


logger = logging.getLogger(__name__)

T = TypeVar("T")

# ---- calls that may hang or crash, made in child processes that can be killed ----

# Code that reads a model's answer (a parser of formulas, a scorer of puzzles) can run for ever or
# take its process with it. A thread cannot be stopped. A child process can, and another one takes its
# place.
#
# - Each call has a child of its own, so a child that is killed takes no other call with it.
# - A call that is slow gives its turn to the next one after `SLOW_SECONDS` and goes on beside it.
# - The number of slow calls is bounded, and so is the memory of each child.

START_SECONDS = 120.0
SLOW_SECONDS = 1.0
MAX_SLOW_CALLS = 6
MAX_CHILD_BYTES = 4 << 30
"""Bytes by which a child's address space may grow: a call that needs more fails with MemoryError."""
LOOK_SECONDS = 0.05
"""Time between two looks at a child's resident memory, if that has a bound."""


class ChildDied(RuntimeError):
    """A child process died during a call."""


class StartFailed(RuntimeError):
    """No child process could be started."""


class TooMuchMemory(RuntimeError):
    """A call needed more memory than its child may have."""


class KillableCalls:
    """Makes calls in child processes. Tasks and event loops may share it; close it at the end.

    Args:
        processes: calls that run at the same time; slow ones do not count.
        memory: bytes of a child's resident memory, in place of MAX_CHILD_BYTES: for functions that
            do not end when the system refuses memory.
    """

    def __init__(self, processes: int = 1, memory: int | None = None) -> None:
        self.processes, self.memory = processes, memory
        self._lock = threading.Lock()
        self._idle: list[ProcessPoolExecutor] = []
        self._busy: set[ProcessPoolExecutor] = set()
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = (
            weakref.WeakKeyDictionary()
        )

    async def call(self, function: Callable[..., T], *arguments: object, seconds: float) -> T:
        """Return `function(*arguments)`, and raise its exceptions. All of them must be picklable.

        Args:
            seconds: time limit, counted from the moment at which the child is ready.

        Raises:
            TimeoutError: the call took longer. Its child is killed.
            ChildDied: the child died twice during this call.
            TooMuchMemory: the child exceeded `memory`, and was killed.
            StartFailed: no child process could be started.
        """
        loop = asyncio.get_running_loop()
        turns = self._turns.setdefault(loop, _Turns(self.processes))
        for is_last in (False, True):
            try:
                async with turns.one(), self._child() as child:
                    await _ready(child, function)
                    async with asyncio.timeout(seconds):
                        work = loop.run_in_executor(child, function, *arguments)
                        return await self._result(work, child)
            except BrokenProcessPool:
                logger.warning("the child process of %s died; starting another", function.__name__)
            except StartFailed as error:
                # An idle child that was killed a moment ago can still seem alive.
                if is_last or not isinstance(error.__cause__, BrokenProcessPool):
                    raise
                logger.warning("the child process of %s died; starting another", function.__name__)
        raise ChildDied(
            f"the child process of {function.__name__} died twice over {arguments!r:.120}"
        )

    async def _result(self, work: asyncio.Future[T], child: ProcessPoolExecutor) -> T:
        """Return the result of a call, unless its child takes too much memory."""
        most = self.memory
        if most is None:
            return await work
        try:
            while not work.done():
                await asyncio.wait([work], timeout=LOOK_SECONDS)
                if any(resident_bytes(process.pid) > most for process in _processes(child)):
                    raise TooMuchMemory(f"a call took more than {most >> 20} MiB of memory")
            return work.result()
        finally:
            work.cancel()

    @contextlib.asynccontextmanager
    async def _child(self) -> AsyncIterator[ProcessPoolExecutor]:
        """Lend an idle child, or a new one. It is killed unless it has finished its work."""
        with self._lock:
            # Address space that is reserved is not yet memory.
            child = self._idle_child() or _new_child(2 * (self.memory or 0) or MAX_CHILD_BYTES)
            self._busy.add(child)
        finished = False
        try:
            yield child
            finished = True
        except (BrokenProcessPool, StartFailed, TimeoutError, TooMuchMemory):
            raise
        except Exception:
            finished = True  # the function raised it, and the child waits for its next call
            raise
        finally:
            with self._lock:
                self._busy.discard(child)
                keep = finished and len(self._idle) < self.processes
                if keep:
                    self._idle.append(child)
            if not keep:
                _kill(child)

    def _idle_child(self) -> ProcessPoolExecutor | None:
        """Take a child that waits for a call, and drop dead children."""
        while self._idle:
            child = self._idle.pop()
            if any(process.is_alive() for process in _processes(child)):
                return child
            _kill(child)
        return None

    def close(self) -> None:
        """Stop the child processes."""
        with self._lock:
            children = [*self._idle, *self._busy]
            self._idle.clear()
            self._busy.clear()
        for child in children:
            _kill(child)


class _Turns:
    """The calls of one event loop that may run: a number of them, and some slow ones besides."""

    def __init__(self, processes: int) -> None:
        self._quick = asyncio.Semaphore(processes)
        self._all = asyncio.Semaphore(processes + MAX_SLOW_CALLS)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a turn, and give it to the next call when this one ends or becomes slow."""
        await self._quick.acquire()
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._quick.release()

        try:
            async with self._all:
                slow = asyncio.get_running_loop().call_later(SLOW_SECONDS, release)
                try:
                    yield
                finally:
                    slow.cancel()
        finally:
            release()


def _new_child(memory: int) -> ProcessPoolExecutor:
    # Spawned, not forked: a forked child would hold the parent's connections and locks.
    return ProcessPoolExecutor(
        1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_prepare_child,
        initargs=(memory,),
    )


async def _ready(child: ProcessPoolExecutor, function: Callable[..., object]) -> None:
    """Wait until a child has started and imported the function, which takes long on a busy machine.

    Raises:
        StartFailed: it ended before, or took longer than START_SECONDS.
    """
    try:
        async with asyncio.timeout(START_SECONDS):
            await asyncio.get_running_loop().run_in_executor(child, callable, function)
    except (BrokenProcessPool, TimeoutError) as error:
        raise StartFailed(
            f"no child process for {function.__name__} could be started ({error!r}). A child imports "
            'the script that was started: guard its commands by if __name__ == "__main__":'
        ) from error


def _prepare_child(memory: int) -> None:
    # a child waits for calls on a queue, and would not notice by itself that its parent was killed
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the parent, which ends the child
        signal.signal(number, signal.SIG_IGN)
    _limit_memory(memory)


def _limit_memory(growth: int) -> None:
    """Bound the memory of this process, so that one call cannot take the machine's."""
    most = growth
    with contextlib.suppress(OSError):  # without /proc, the bound includes the present size
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most += pages * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _processes(child: ProcessPoolExecutor) -> list[multiprocessing.process.BaseProcess]:
    return list((getattr(child, "_processes", None) or {}).values())


def _kill(child: ProcessPoolExecutor) -> None:
    for process in _processes(child):
        process.kill()
    child.shutdown(wait=False)
