"""shared_check.py: with any number of callers, the engine samples one token in some seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.virtual_time import VirtualLoop, virtual_time
from vllm_patching.server import generate
from vllm_patching.server.generate import CHECK_SECONDS, SHARED_SECONDS, SharedCheck


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with virtual_time(generate) as made:
        yield made


class Engine:
    def __init__(self, takes: float = 2.0) -> None:
        self.takes, self.checks = takes, 0

    async def check(self, timeout: float) -> float:
        self.checks += 1
        await asyncio.wait_for(asyncio.sleep(self.takes), timeout)
        return self.takes


def test_a_thousand_callers_share_one_check(loop: VirtualLoop) -> None:
    engine, shared = Engine(), SharedCheck()

    async def ask() -> list[tuple[float, float]]:
        return await asyncio.gather(*(shared.result(engine.check) for _ in range(1000)))

    assert loop.run_until_complete(ask()) == [(2.0, 0.0)] * 1000
    assert engine.checks == 1


def test_callers_without_a_pause_cause_one_check_in_some_seconds(loop: VirtualLoop) -> None:
    engine, shared = Engine(takes=0.1), SharedCheck()

    async def ask_for(seconds: float) -> None:
        end = loop.now + seconds
        while loop.now < end:
            _, age = await shared.result(engine.check)
            assert age < SHARED_SECONDS
            await asyncio.sleep(0.05)

    loop.run_until_complete(ask_for(100.0))
    assert 100 / (SHARED_SECONDS + 0.2) - 1 <= engine.checks <= 100 / SHARED_SECONDS + 1


def test_a_check_has_a_deadline_which_all_callers_learn_of(loop: VirtualLoop) -> None:
    engine, shared = Engine(takes=1e9), SharedCheck()

    async def ask() -> list[object]:
        return await asyncio.gather(
            *(shared.result(engine.check) for _ in range(3)), return_exceptions=True
        )

    began = loop.now
    assert [type(answer) for answer in loop.run_until_complete(ask())] == [TimeoutError] * 3
    assert loop.now - began == pytest.approx(CHECK_SECONDS)
    assert engine.checks == 1


def test_a_caller_that_goes_away_takes_nothing_from_the_others(loop: VirtualLoop) -> None:
    engine, shared = Engine(), SharedCheck()

    async def ask() -> tuple[float, float]:
        first = asyncio.ensure_future(shared.result(engine.check))
        second = asyncio.ensure_future(shared.result(engine.check))
        await asyncio.sleep(1.0)
        first.cancel()
        return await second

    assert loop.run_until_complete(ask()) == (2.0, 0.0)
    assert engine.checks == 1
