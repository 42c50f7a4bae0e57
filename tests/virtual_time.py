"""An event loop whose seconds pass when all tasks wait, so that deadlines cost a test no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from unittest import mock


class _Selector(selectors.SelectSelector):
    """Never waits: the time that it should have waited has passed."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits for somebody else, and no deadline will ever pass")
        self._loop.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time stands still while anything can be done."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


@contextmanager
def virtual_time(*modules: ModuleType) -> Iterator[VirtualLoop]:
    """A loop, by whose time these modules go in the block.

    Tasks that are left at its end are cancelled.
    """
    loop = VirtualLoop()
    clock = SimpleNamespace(monotonic=loop.time)
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "time", clock))
        try:
            yield loop
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.close()
