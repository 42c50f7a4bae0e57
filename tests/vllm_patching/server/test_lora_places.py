"""The places for adapters, on workers that stall, fail and answer late: none is ever lost, and none
is given twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_patching.server import engine_calls, lora
from vllm_patching.server.lora import AdapterRemovals, AdapterSpans, LoraController, LoraRefusal

CAPACITY = 3
LONG = 120.0
"""For what must not end by a limit, on a busy machine either."""


class Engine:
    """vLLM's engine as far as adapters go: a queue of calls, carried out in order by two ranks,
    also without a waiting caller.

    Attributes:
        held: per rank, the adapters that it holds.
        running: cleared, it stalls between two calls.
        failing: how many of the next calls end in an error on the second rank.
    """

    engine_core = None

    def __init__(self) -> None:
        self.held: list[set[int]] = [set(), set()]
        self.running = asyncio.Event()
        self.running.set()
        self.failing = 0
        self.most = 0
        self._calls: asyncio.Queue[tuple[str, tuple[Any, ...], asyncio.Future[Any]]] = (
            asyncio.Queue()
        )
        self._loop = asyncio.get_running_loop().create_task(self._work())

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        await self._calls.put((method, args, answer))
        return await answer

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        yield None

    async def _work(self) -> None:
        while True:
            method, args, answer = await self._calls.get()
            await self.running.wait()
            answers = [getattr(self, method)(self.held[0], *args)]
            if self.failing:
                self.failing -= 1
                if not answer.done():
                    answer.set_exception(RuntimeError("rank 1 failed"))
                continue
            answers.append(getattr(self, method)(self.held[1], *args))
            if not answer.done():
                answer.set_result(answers)

    def lora_load(self, held: set[int], _: str, adapter_id: int, __: str | None) -> dict[str, Any]:
        if len(held) >= CAPACITY:
            return {
                "error": f"{len(held)} adapters are loaded, and no more are allowed",
                "checksum": "",
                "seconds": {},
            }
        held.add(adapter_id)
        self.most = max(self.most, len(held))
        return {"error": "", "checksum": "c", "seconds": {"read": 0.0}}

    def lora_remove(self, held: set[int], adapter_ids: list[int]) -> list[int]:
        held.difference_update(adapter_ids)
        return sorted(held)

    async def close(self) -> None:
        self._loop.cancel()
        with suppress(asyncio.CancelledError):
            await self._loop


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "open_adapter", lambda *_: SimpleNamespace(rank=8))
    monkeypatch.setattr(lora, "lora_request", lambda name, *_: name)
    monkeypatch.setattr(engine_calls, "engine_is_dead", lambda _: False)
    monkeypatch.setattr("vllm_patching.server.lora._FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("vllm_patching.server.lora._LONGEST_PAUSE_SECONDS", 0.002)


def with_controller(
    timeout: float, scenario: Callable[[Engine, LoraController], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        engine = Engine()
        controller = LoraController(engine, "m", timeout, AdapterSpans())
        controller._geometry = None  # type: ignore[assignment]  # the file is not read
        controller._ranks = [
            {"capacity": CAPACITY, "max_rank": 8, "slots": 2, "dtype": "float32"}
        ] * 2
        try:
            await scenario(engine, controller)
        finally:
            await engine.close()

    asyncio.run(main())


def limit(controller: LoraController, seconds: float) -> None:
    """Let the workers take so long for each step."""
    controller.timeout = controller._workers._timeout = seconds


async def load(controller: LoraController, version: int) -> None:
    await controller.load(str(Path("/adapters") / str(version)), version, None, None)


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), 120)


def names(controller: LoraController) -> set[int]:
    current = controller._current
    return set(controller._retiring) | ({current.adapter_id} if current else set())


def test_a_removal_without_an_answer_is_asked_for_again_until_the_place_is_free() -> None:
    async def scenario(engine: Engine, controller: LoraController) -> None:
        await load(controller, 1)
        await load(controller, 2)
        await until(lambda: engine.held[1] == names(controller))
        limit(controller, 0.05)
        engine.running.clear()
        await controller.unload()
        await until(lambda: "did not answer lora_remove" in controller.status()["removal_error"])
        assert controller.status()["removing"] == [lora.FIRST_ID + 1]
        engine.running.set()
        await until(lambda: not controller.status()["removing"])
        assert (controller.status()["removal_error"], engine.held) == ("", [set(), set()])

    with_controller(LONG, scenario)


def test_a_worker_that_fails_loses_no_place() -> None:
    async def scenario(engine: Engine, controller: LoraController) -> None:
        for version in range(1, 4 * CAPACITY, 2):
            await load(controller, version)
            await until(lambda: not controller.status()["removing"])
            engine.failing = 1
            with pytest.raises(RuntimeError, match="rank 1 failed"):
                await load(controller, version + 1)
            engine.failing = 2  # of the removals
            await until(lambda: not controller.status()["removing"])
        await until(lambda: engine.held == [names(controller)] * 2)

    with_controller(LONG, scenario)


def test_a_load_waits_for_a_place_that_is_not_certain_and_says_what_it_waited_for() -> None:
    async def scenario(engine: Engine, controller: LoraController) -> None:
        for version in range(1, CAPACITY):
            await load(controller, version)
            current = controller._current
            assert current is not None
            current.requests += 1  # so that it stays
        await load(controller, CAPACITY)
        engine.failing = 10**9
        await controller.unload()
        limit(controller, 0.5)
        with pytest.raises(
            LoraRefusal,
            match=r"lora-v1-\d+ \(1 requests\).* 1 whose removal is not certain \(.*rank 1 failed",
        ):
            await load(controller, 9)
        limit(controller, LONG)
        engine.failing = 0
        await load(controller, 10)
        assert controller.status()["current"]["version"] == 10

    with_controller(LONG, scenario)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.sampled_from(["load", "load", "stall", "go on", "fail", "ask", "answer", "unload"]),
        max_size=25,
    )
)
def test_whatever_happens_the_workers_end_with_what_is_in_use(steps: list[str]) -> None:
    async def scenario(engine: Engine, controller: LoraController) -> None:
        asked = []
        for version, step in enumerate(steps):
            match step:
                case "load":
                    with suppress(LoraRefusal, RuntimeError):
                        await load(controller, version)
                case "unload":
                    await controller.unload()
                case "stall":
                    engine.running.clear()
                case "go on":
                    engine.running.set()
                case "fail":
                    engine.failing += 1
                case "ask" if controller._current is not None:
                    controller._current.requests += 1
                    asked.append(controller._current)
                case "answer" if asked:
                    done = asked.pop()
                    done.requests -= 1
                    controller._retire_if_idle(done)
        engine.running.set()
        for done in asked:
            done.requests -= 1
            controller._retire_if_idle(done)
        await until(lambda: not controller.status()["removing"])
        engine.failing = 0
        limit(controller, LONG)
        for version in range(100, 100 + 2 * CAPACITY):
            await load(controller, version)
        await until(lambda: engine.held == [names(controller)] * 2)
        assert engine.most <= CAPACITY

    with_controller(0.03, scenario)


def test_what_is_added_while_the_workers_are_asked_is_asked_for_next() -> None:
    async def main() -> None:
        asked: list[list[int]] = []
        go_on = asyncio.Event()

        async def remove(ids: list[int]) -> list[list[int]]:
            asked.append(ids)
            await go_on.wait()
            return [[]]

        freed: list[None] = []
        removals = AdapterRemovals(remove, lambda: freed.append(None))
        removals.add(1)
        await until(lambda: bool(asked))
        removals.add(2)
        go_on.set()
        await until(lambda: not removals.pending)
        assert (asked, len(freed)) == ([[1], [2]], 2)

    asyncio.run(main())


def test_a_worker_that_keeps_what_it_was_told_to_forget_is_named() -> None:
    async def main() -> None:
        answers = [[[1], []], [[], []]]

        async def remove(_: list[int]) -> list[list[int]]:
            return answers.pop(0)

        removals = AdapterRemovals(remove, lambda: None)
        removals.add(1)
        await until(lambda: "still holds [1]" in removals.trouble)
        await until(lambda: not removals.pending)

    asyncio.run(main())
