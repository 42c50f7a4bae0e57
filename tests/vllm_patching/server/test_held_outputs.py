"""Outputs wait while the engine is halted, for no longer than they must, and in their order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_patching.compat.outputs import HeldOutputs
from vllm_patching.compat.versions import UnsupportedVllm


def engine_with(*outputs: Any) -> Any:
    waiting = list(outputs)

    async def fetch() -> Any:
        found = waiting.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    return SimpleNamespace(engine_core=SimpleNamespace(get_output_async=fetch))


async def fetched(engine: Any, within: float) -> Any:
    return await asyncio.wait_for(engine.engine_core.get_output_async(), within)


def test_they_wait_until_they_are_released() -> None:
    async def run() -> None:
        engine = engine_with(1, 2, 3)
        held = HeldOutputs(engine)
        assert await fetched(engine, 60) == 1
        held.hold(60)
        task = asyncio.create_task(fetched(engine, 60))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        held.release()
        assert await task == 2
        assert await fetched(engine, 60) == 3

    asyncio.run(run())


def test_they_wait_no_longer_than_was_said() -> None:
    async def run() -> None:
        engine = engine_with(1)
        HeldOutputs(engine).hold(0.05)
        assert await fetched(engine, 60) == 1

    asyncio.run(run())


def test_an_earlier_hold_does_not_end_a_later_one() -> None:
    async def run() -> None:
        engine = engine_with(1)
        held = HeldOutputs(engine)
        held.hold(0.05)
        held.hold(60)
        await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            await fetched(engine, 0.05)

    asyncio.run(run())


def test_an_engine_that_has_died_says_so_at_once() -> None:
    async def run() -> None:
        engine = engine_with(RuntimeError("EngineCore died"))
        HeldOutputs(engine).hold(60)
        with pytest.raises(RuntimeError, match="died"):
            await fetched(engine, 60)

    asyncio.run(run())


def test_another_vllm_is_refused() -> None:
    pytest.importorskip("vllm")
    with pytest.raises(UnsupportedVllm, match="get_output_async"):
        HeldOutputs(SimpleNamespace(engine_core=SimpleNamespace()))
