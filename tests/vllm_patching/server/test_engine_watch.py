"""engine_watch.py by virtual time: an engine that hangs, is slow, is paused, compiles, or whose
server was stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.virtual_time import VirtualLoop, virtual_time
from vllm_patching.engine_core.progress import PROGRESS, WATCH_STEPS, FirstSteps
from vllm_patching.protocol.messages import BridgeRefusal
from vllm_patching.server import engine_calls, engine_watch
from vllm_patching.server.engine_watch import EngineWatch

LIMIT = 30.0


class Engine:
    """An engine core that makes a step each second while it has requests, and answers between two
    steps.
    """

    def __init__(self) -> None:
        self.errored = False
        self.engine_core = SimpleNamespace(call_utility_async=self._call)
        self.due = 1
        self.executed = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.steps: FirstSteps | None = None
        self.questions = 0

    async def _call(self, method: str, *args: Any) -> Any:
        if method == WATCH_STEPS:
            await self.goes_on.wait()
            path, replicas = args
            self.steps = FirstSteps(Path(path), replicas)
            return None
        assert method == PROGRESS
        self.questions += 1
        await self.goes_on.wait()
        return {"executed": self.executed, "due": self.due}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self.goes_on.wait()
            self.executed += self.due > 0


class World:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.ended, self.held = loop, list[str](), False
        loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self.engine = Engine()
        self.watch = EngineWatch(self.engine, LIMIT, lambda: self.held, self._end)
        await self.watch.start(5.0)
        self.task = asyncio.ensure_future(self.engine.run())

    async def _end(self, reason: str) -> None:
        self.ended.append(reason)

    def run(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))


@pytest.fixture
def world() -> Iterator[World]:
    with virtual_time(engine_watch, engine_calls) as loop:
        yield World(loop)


def test_an_engine_that_steps_is_well_for_ever_and_is_seldom_asked(world: World) -> None:
    world.run(3600)
    assert world.watch.trouble == ""
    assert world.ended == []
    assert world.engine.questions <= 3600 / (LIMIT / engine_watch.QUESTIONS) + 1


def test_an_engine_that_hangs_is_in_trouble_within_the_limit_and_heals_by_itself(
    world: World,
) -> None:
    world.run(100)
    world.engine.goes_on.clear()
    world.run(LIMIT - 5)
    assert world.watch.trouble == ""
    world.run(6)
    assert "has not answered for 30 s" in world.watch.trouble
    world.run(600)
    assert len(world.ended) == 1, "requests are ended once"
    world.engine.goes_on.set()
    world.run(2)
    assert world.watch.trouble == ""
    world.engine.goes_on.clear()
    world.run(LIMIT + 1)
    assert len(world.ended) == 2


def test_an_idle_engine_that_does_not_answer_is_in_trouble_too(world: World) -> None:
    world.engine.due = 0
    world.run(100)
    world.engine.goes_on.clear()
    world.run(LIMIT + 1)
    assert world.watch.trouble


def test_an_engine_that_answers_without_steps_is_in_trouble(world: World) -> None:
    world.task.cancel()
    world.run(LIMIT + 5)
    assert "answers, but has made no step" in world.watch.trouble


def test_the_time_in_which_it_was_told_to_stand_still_does_not_count(world: World) -> None:
    world.held = True
    world.engine.goes_on.clear()
    world.run(600)
    assert world.watch.trouble == ""
    world.held = False
    world.run(LIMIT - 1)
    assert world.watch.trouble == ""
    world.run(2)
    assert world.watch.trouble


def test_a_step_that_compiles_has_ten_times_the_limit(world: World) -> None:
    assert world.engine.steps is not None
    world.engine.goes_on.clear()
    world.engine.steps.begin(0, world.loop.now)
    world.run(9 * LIMIT)
    assert world.watch.trouble == ""
    world.engine.steps.end(0)
    world.engine.goes_on.set()
    world.run(600)
    assert world.watch.trouble == ""


def test_time_in_which_the_api_process_was_stopped_is_not_held_against_the_engine(
    world: World,
) -> None:
    world.run(10)
    world.loop.now += 3600  # SIGSTOP, or a machine that slept
    world.run(5)
    assert world.watch.trouble == ""


def test_a_dead_engine_is_left_to_those_who_say_so(world: World) -> None:
    world.engine.errored = True
    world.engine.goes_on.clear()
    world.run(600)
    assert world.watch.trouble == ""


def test_an_engine_that_does_not_answer_at_the_start_is_an_error() -> None:
    with virtual_time(engine_watch, engine_calls) as loop:

        async def start() -> None:
            engine = Engine()
            engine.goes_on.clear()
            await EngineWatch(engine, LIMIT, lambda: False, World._end).start(5.0)  # type: ignore[arg-type]

        with pytest.raises(BridgeRefusal, match="did not answer lockstep_watch_steps within 5 s"):
            loop.run_until_complete(start())
