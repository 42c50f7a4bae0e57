"""Stopped processes (SIGSTOP) of the sandbox: its keeper, a program's watcher, and a program.

Each run ends with a result.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from atroposlib.sandbox import Limits, LocalSandbox, Outcome, Program, Returned
from atroposlib.sandbox import local as local_sandbox
from atroposlib.sandbox.local import processes_below
from example_trainer.child_processes.guard import parents

pytestmark = pytest.mark.nightly

LIMITS = Limits(seconds=10)
ANSWER = Program("def f():\n    return 1", "f", [[]])
SLEEPER = Program("import time\ntime.sleep(1000)")


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sandbox, "GRACE_SECONDS", 4.0)


async def until_gone(*pids: int) -> None:
    async with asyncio.timeout(60):
        while set(pids) & parents().keys():
            await asyncio.sleep(0.02)


async def idle_sandbox(at_once: int | None = None) -> tuple[LocalSandbox, list[int]]:
    """A sandbox without programs, and its keeper's processes: the last one starts programs."""
    box = LocalSandbox(LIMITS, at_once=at_once)
    await box.start()
    assert box._keeper is not None
    async with asyncio.timeout(60):
        while (
            len(found := processes_below(box._keeper.pid)) > 2
        ):  # the trial of the start still ends
            await asyncio.sleep(0.02)
    return box, [box._keeper.pid, *found]


async def start_sleeper(box: LocalSandbox, keepers: int) -> tuple[asyncio.Task[Outcome], int, int]:
    """Start a program that sleeps. Returns its run, its watcher, and its process."""
    assert box._keeper is not None
    running = asyncio.create_task(box.run(SLEEPER))
    async with asyncio.timeout(60):
        while len(found := [box._keeper.pid, *processes_below(box._keeper.pid)]) < keepers + 2:
            await asyncio.sleep(0.02)
    return running, found[-2], found[-1]


def test_a_stopped_keeper_is_replaced_and_every_program_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        box, family = await idle_sandbox()
        os.kill(family[-1], signal.SIGSTOP)
        both = await asyncio.gather(box.run(ANSWER), box.run(ANSWER))
        assert [outcome.results for outcome in both] == [[Returned(1)], [Returned(1)]]
        await until_gone(*family)
        assert box._keeper is not None
        second = box._keeper.pid
        assert (await box.run(ANSWER)).results == [Returned(1)]
        assert box._keeper.pid == second
        await box.close()

    asyncio.run(work())
    assert "its end was not reported within 4 s after its deadline of 10 s" in caplog.text


def test_a_stopped_watcher_ends_with_its_program_which_runs_again() -> None:
    async def work() -> None:
        box, family = await idle_sandbox()
        running, watcher, program = await start_sleeper(box, len(family))
        os.kill(watcher, signal.SIGSTOP)
        assert (await running).end == "deadline"
        await until_gone(watcher, program)
        assert (await box.run(ANSWER)).results == [Returned(1)]
        await box.close()

    asyncio.run(work())


def test_a_stopped_program_ends_at_its_deadline_and_others_run_beside_it() -> None:
    async def work() -> None:
        box, family = await idle_sandbox(at_once=2)
        running, watcher, program = await start_sleeper(box, len(family))
        os.kill(program, signal.SIGSTOP)
        assert (await box.run(ANSWER)).results == [Returned(1)]
        assert (await running).end == "deadline"
        await until_gone(watcher, program)
        assert box._keeper is not None
        assert box._keeper.pid == family[0]
        await box.close()

    asyncio.run(work())


def test_a_sandbox_whose_keeper_has_stopped_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.sandbox.local.END_SECONDS", 1.0)

    async def work() -> None:
        box, family = await idle_sandbox()
        os.kill(family[-1], signal.SIGSTOP)
        await box.close()
        await until_gone(*family)

    asyncio.run(work())
