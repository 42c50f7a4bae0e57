"""Calls that may hang or crash, made in child processes that can be killed.

Code that reads a model's answer (a parser of formulas, a scorer of puzzles) can run for ever or
take its process with it. A thread cannot be stopped. A child process can, and another one takes its
place.

- Each call has a child of its own, so a child that is killed takes no other call with it.
- A call that is slow gives its turn to the next one after `SLOW_SECONDS` and goes on beside it.
- The number of slow calls is bounded, and so is the memory of each child.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import resource
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from atroposlib.utils.processes import end_with_parent

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_SECONDS = 120.0
SLOW_SECONDS = 1.0
MAX_SLOW_CALLS = 6
MAX_CHILD_BYTES = 4 << 30
"""Bound of a child's address space: a call that needs more fails with MemoryError."""


class ChildDied(RuntimeError):
    """A child process died during a call."""


class StartFailed(RuntimeError):
    """No child process could be started."""


class KillableCalls:
    """Makes calls in child processes. Tasks and event loops may share it; close it at the end.

    Args:
        processes: calls that run at the same time, those that have become slow not counted.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
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
            StartFailed: no child process could be started.
        """
        loop = asyncio.get_running_loop()
        turns = self._turns.setdefault(loop, _Turns(self.processes))
        for _ in range(2):
            try:
                async with turns.one(), self._child() as child:
                    await _ready(child, function)
                    async with asyncio.timeout(seconds):
                        return await loop.run_in_executor(child, function, *arguments)
            except BrokenProcessPool:
                logger.warning("the child process of %s died; starting another", function.__name__)
        raise ChildDied(
            f"the child process of {function.__name__} died twice over {arguments!r:.120}"
        )

    @contextlib.asynccontextmanager
    async def _child(self) -> AsyncIterator[ProcessPoolExecutor]:
        """Lend an idle child, or a new one. It is killed unless it has finished its work."""
        with self._lock:
            child = self._idle.pop() if self._idle else _new_child()
            self._busy.add(child)
        finished = False
        try:
            yield child
            finished = True
        except (BrokenProcessPool, StartFailed, TimeoutError):
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

    def close(self) -> None:
        """Stop the child processes."""
        with self._lock:
            children = [*self._idle, *self._busy]
            self._idle.clear()
            self._busy.clear()
        for child in children:
            _kill(child)


class _Turns:
    """Which calls of one event loop may run: so many, and some slow ones beside them."""

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


def _new_child() -> ProcessPoolExecutor:
    # Spawned, not forked: a forked child would hold the parent's connections and locks.
    return ProcessPoolExecutor(
        1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_prepare_child,
        initargs=(MAX_CHILD_BYTES,),
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
            f"no child process for {function.__name__} could be started: {error!r}"
        ) from error


def _prepare_child(limit: int) -> None:
    # a child waits for calls on a queue, and would not notice by itself that its parent was killed
    end_with_parent()
    _limit_memory(limit)


def _limit_memory(most: int) -> None:
    """Bound the memory of this process, so that one call cannot take the machine's."""
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
