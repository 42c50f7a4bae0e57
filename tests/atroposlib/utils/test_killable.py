"""Calls in child processes: slow ones beside others, dead and hanging children, bounded memory."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atroposlib.utils import processes
from atroposlib.utils.processes import MAX_SLOW_CALLS, ChildDied, KillableCalls, TooMuchMemory


@pytest.fixture
async def calls() -> AsyncIterator[KillableCalls]:
    made = KillableCalls(1)
    yield made
    made.close()


async def test_a_call_that_waits_does_not_hold_up_the_next_ones(
    calls: KillableCalls, tmp_path: Path
) -> None:
    """The slow call ends only after a later one has done its work, so it would never end if that
    one waited for it.
    """
    mark = tmp_path / "mark"
    slow = asyncio.create_task(calls.call(wait_for, str(mark), seconds=120))
    await asyncio.sleep(0)
    await calls.call(make, str(mark), seconds=120)
    assert await slow == "seen"


async def test_the_number_of_slow_calls_is_bounded(
    calls: KillableCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(processes, "MAX_SLOW_CALLS", 1)
    running, most = 0, 0

    async def counted(child_free: asyncio.Event) -> None:
        nonlocal running, most
        async with turns.one():
            running += 1
            most = max(most, running)
            await child_free.wait()
            running -= 1

    turns = processes._Turns(1)
    events = [asyncio.Event() for _ in range(5)]
    tasks = [asyncio.create_task(counted(event)) for event in events]
    for event in events:
        await asyncio.sleep(0.01)
        event.set()
    await asyncio.gather(*tasks)
    assert most == 2
    assert MAX_SLOW_CALLS > 1


async def test_what_the_function_raises_is_raised_and_the_child_goes_on(
    calls: KillableCalls,
) -> None:
    first = await calls.call(os.getpid, seconds=60)
    with pytest.raises(ZeroDivisionError):
        await calls.call(divmod, 1, 0, seconds=60)
    assert await calls.call(os.getpid, seconds=60) == first


async def test_a_hanging_child_is_killed_alone(calls: KillableCalls, tmp_path: Path) -> None:
    other = asyncio.create_task(calls.call(wait_for, str(tmp_path / "mark"), seconds=120))
    with pytest.raises(TimeoutError):
        await calls.call(time.sleep, 600, seconds=0.1)
    (tmp_path / "mark").touch()
    assert await other == "seen"


async def test_a_child_that_dies_twice_is_named(calls: KillableCalls) -> None:
    with pytest.raises(ChildDied, match="died twice"):
        await calls.call(os._exit, 3, seconds=60)


async def test_memory_is_bounded(calls: KillableCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_CHILD_BYTES", 1 << 30)
    with pytest.raises(MemoryError):
        await calls.call(bytearray, 2 << 30, seconds=60)


async def test_a_child_with_too_much_resident_memory_is_killed() -> None:
    bounded = KillableCalls(memory=256 << 20)
    first = await bounded.call(os.getpid, seconds=60)
    with pytest.raises(TooMuchMemory, match="more than 256 MiB"):
        await bounded.call(fill, 300 << 20, seconds=60)
    assert await bounded.call(os.getpid, seconds=60) != first
    bounded.close()


async def test_a_child_that_died_between_two_calls_is_replaced(calls: KillableCalls) -> None:
    first = await calls.call(os.getpid, seconds=60)
    os.kill(first, signal.SIGKILL)
    (child,) = calls._idle
    (process,) = processes._processes(child)
    process.join()
    assert await calls.call(os.getpid, seconds=60) != first


def fill(size: int) -> None:
    """Take memory, and keep it."""
    data = bytearray(size)
    data[::4096] = b"x" * len(data[::4096])
    time.sleep(600)


def wait_for(path: str) -> str:
    while not Path(path).exists():
        time.sleep(0.01)
    return "seen"


def make(path: str) -> None:
    Path(path).touch()
