"""Calls that may hang or crash, made in a child process that can be killed.

Code that reads what a model wrote (a parser of formulas, a scorer of puzzles) can run for ever or take its process with it.
A thread cannot be stopped; a child process can, and another takes its place.
"""

import asyncio
import logging
import multiprocessing
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_SECONDS = 120.0


class KillableCalls:
    """Makes calls in child processes. Safe to use from several tasks at once; close it at the end."""

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
        self._pool: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    async def call(self, function: Callable[..., T], *arguments: object, seconds: float) -> T:
        """What `function(*arguments)` returns; it and all that passes must be known to pickle. What it raises is raised here.

        Raises:
            TimeoutError: it took longer than this, from when a child was free. The child is killed.
            RuntimeError: the child died twice over these arguments.
        """
        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(self.processes))
        for _ in range(2):
            try:
                # What waits for a child must not spend its time behind another call that hangs.
                async with slots:
                    pool = self._running_pool()
                    async with asyncio.timeout(START_SECONDS):  # nor while a child starts and imports, on a busy machine
                        await loop.run_in_executor(pool, callable, function)
                    async with asyncio.timeout(seconds):
                        return await loop.run_in_executor(pool, function, *arguments)
            except TimeoutError:
                self._kill(pool)
                raise
            except BrokenProcessPool:
                logger.warning("the child process of %s died; starting another", function.__name__)
                self._kill(pool)
        raise RuntimeError(f"the child process of {function.__name__} died twice over {arguments!r:.120}")

    def _running_pool(self) -> ProcessPoolExecutor:
        with self._lock:
            if self._pool is None:
                # Spawned, not forked: a forked child would hold the parent's connections and locks.
                self._pool = ProcessPoolExecutor(self.processes, mp_context=multiprocessing.get_context("spawn"))
            return self._pool

    def _kill(self, pool: ProcessPoolExecutor) -> None:
        with self._lock:
            if self._pool is pool:
                self._pool = None
        for child in list((getattr(pool, "_processes", None) or {}).values()):
            child.kill()
        pool.shutdown(wait=False)  # not cancelling: who waits hears of a broken pool and asks again

    def close(self) -> None:
        """Stop the child processes."""
        if self._pool is not None:
            self._kill(self._pool)
