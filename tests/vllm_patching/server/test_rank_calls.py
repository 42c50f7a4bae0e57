"""engine_calls.py: an engine that answers, is late, or has died; the reports of it, and whether it
stands still afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from vllm_patching.compat.versions import UnsupportedVllm
from vllm_patching.protocol.messages import (
    CAN_VERIFY_AND_RESUME,
    VERIFY_AND_RESUME,
    BridgeRefusal,
    BridgeWorker,
    compare,
)
from vllm_patching.server import engine_calls
from vllm_patching.server.engine_calls import FURTHER_SECONDS, RankCalls, Silence

TIMEOUT = 0.2
LONG = 1000.0
"""For what must not end by a limit, on a busy machine either."""


class Renderer:
    async def clear_mm_cache_async(self) -> None:
        raise AssertionError("a second pause must not drop what running requests have computed")


class EngineCore:
    """The front end's side of an engine core that is paused at first; `late` seconds pass before it
    answers a check.
    """

    def __init__(self, held: str = "a", late: float = 0.0, obeys_deadline: bool = True) -> None:
        self.held, self.late, self.obeys_deadline = held, late, obeys_deadline
        self.paused, self.dead, self.methods = (
            True,
            False,
            {VERIFY_AND_RESUME, CAN_VERIFY_AND_RESUME},
        )
        self.background: set[asyncio.Task[Any]] = set()
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if self.dead:
            raise RuntimeError("the engine is dead")
        if method not in self.methods:
            raise Exception(
                f"Call to {method} method failed: 'EngineCoreProc' object has no attribute '{method}'"
            )
        if method == CAN_VERIFY_AND_RESUME:
            return True
        # An engine core goes on working for a caller who has stopped waiting.
        task = asyncio.create_task(self._check(*args))
        self.background.add(task)
        return await asyncio.shield(task)

    async def _check(
        self, method: str, expected: list[str], version: int, deadline: float
    ) -> dict[str, Any]:
        await asyncio.sleep(self.late)
        await self.goes_on.wait()
        fits = [self.held] == expected and (time.monotonic() < deadline or not self.obeys_deadline)
        self.paused = not fits
        answers = [{"tp_rank": 0, "checksum": self.held, "not_finite": ""}]
        return {"answers": answers, "resumed_at": time.monotonic() if fits else None}

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        await asyncio.shield(asyncio.gather(*self.background))  # it does one thing after the other
        self.paused = True


class Engine:
    def __init__(self, core: EngineCore) -> None:
        self.engine_core, self.renderer = core, Renderer()

    @property
    def errored(self) -> bool:
        return self.engine_core.dead

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        await asyncio.sleep(self.engine_core.late)
        return [method]


async def ask(
    core: EngineCore, late: list[float] | None = None, timeout: float = TIMEOUT
) -> tuple[list[Any], float | None, bool]:
    told = [] if late is None else late
    return await RankCalls(Engine(core), timeout).verify_and_resume(
        BridgeWorker.lockstep_check, ["a"], 3, told.append
    )


@pytest.mark.asyncio
async def test_the_answers_and_the_moment_come_back() -> None:
    core = EngineCore()
    answers, moment, runs = await ask(core, timeout=LONG)
    assert answers == [{"tp_rank": 0, "checksum": "a", "not_finite": "", "replica": 0}]
    assert moment is not None
    assert moment <= time.monotonic()
    assert runs
    assert not core.paused


@pytest.mark.asyncio
async def test_other_weights_leave_it_paused() -> None:
    core = EngineCore(held="b")
    answers, moment, runs = await ask(core, timeout=LONG)
    assert (answers[0]["checksum"], moment, runs, core.paused) == ("b", None, False, True)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "obeys_deadline", [True, False], ids=["too late to go on", "went on at the last moment"]
)
async def test_after_a_late_answer_it_stands_still_and_the_answer_is_heard(
    obeys_deadline: bool,
) -> None:
    core = EngineCore(late=2 * TIMEOUT, obeys_deadline=obeys_deadline)
    answers, moment, runs = await ask(core)
    assert (answers[0]["checksum"], moment is not None, runs, core.paused) == (
        "a",
        not obeys_deadline,
        False,
        True,
    )


@pytest.mark.asyncio
async def test_an_engine_that_does_not_even_stop_says_later_when_it_went_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_calls, "_STOP_SECONDS", TIMEOUT / 2)
    core, late = EngineCore(obeys_deadline=False), []
    core.goes_on.clear()
    begun = time.monotonic()
    with pytest.raises(
        BridgeRefusal, match=r"vLLM's workers did not answer lockstep_check within 0\.2 s"
    ) as refusal:
        await ask(core, late)
    assert refusal.value.status == 504
    assert not late
    core.goes_on.set()
    await asyncio.gather(*core.background)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(late) == 1
    assert late[0] > begun + TIMEOUT


@pytest.mark.asyncio
async def test_a_dead_engine_is_named() -> None:
    core = EngineCore()
    core.dead = True
    with pytest.raises(BridgeRefusal, match="engine process has died; restart the server"):
        await ask(core)


@pytest.mark.asyncio
@pytest.mark.parametrize("question", ["check", "call"])
async def test_an_engine_that_dies_while_it_is_asked_is_not_waited_for(question: str) -> None:
    """Its front end answers neither with a result nor with an error; only the test's own limit
    would end the wait.
    """
    core = EngineCore(late=2 * LONG)
    asyncio.get_running_loop().call_later(0.01, setattr, core, "dead", True)
    ranks, check = RankCalls(Engine(core), LONG), BridgeWorker.lockstep_check
    questions: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "check": lambda: ranks.verify_and_resume(check, ["a"], 3, lambda _: None),
        "call": lambda: ranks.call(check),
    }
    with pytest.raises(
        BridgeRefusal, match="engine process has died; restart the server"
    ) as refusal:
        await questions[question]()
    assert refusal.value.status == 503
    for task in core.background:
        task.cancel()


class Queue(Engine):
    """An engine that does one thing after the other, once it moves."""

    def __init__(self) -> None:
        super().__init__(EngineCore())
        self.moves, self._turn = asyncio.Event(), asyncio.Lock()

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        async with self._turn:
            await self.moves.wait()
            return [method]


@pytest.mark.asyncio
async def test_while_an_answer_is_overdue_no_other_is_waited_for_as_long() -> None:
    """Giving an update up asks for several things, and a worker that stands still would hold up
    each for a whole deadline.
    """
    engine, silence = Queue(), Silence()
    with pytest.raises(BridgeRefusal, match=r"did not answer lockstep_check within 0\.2 s"):
        await RankCalls(engine, TIMEOUT, silence).call(BridgeWorker.lockstep_check)
    assert silence.patience(LONG) == FURTHER_SECONDS
    assert silence.patience(FURTHER_SECONDS / 2) == FURTHER_SECONDS / 2
    assert silence.seconds >= TIMEOUT, "nobody waits any more, and there is no answer yet"
    with pytest.raises(BridgeRefusal, match=rf"answer lockstep_room within {FURTHER_SECONDS:g} s"):
        await RankCalls(engine, LONG, silence).call(BridgeWorker.lockstep_room)
    engine.moves.set()
    third = await RankCalls(engine, LONG, silence).call(BridgeWorker.lockstep_leave)
    assert third == ["lockstep_leave"]
    assert (silence.patience(LONG), silence.seconds) == (LONG, 0.0)


@pytest.mark.asyncio
async def test_a_vllm_without_the_plugin_is_refused_at_the_start() -> None:
    core = EngineCore()
    await RankCalls(Engine(core), LONG).require_engine_core()
    core.methods.clear()
    with pytest.raises(
        UnsupportedVllm, match="has not loaded the plugin of vllm_patching/engine_core/plugin"
    ):
        await RankCalls(Engine(core), LONG).require_engine_core()


class Broken:
    """An engine one of whose workers raises; it lives."""

    errored, engine_core = False, None

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        raise RuntimeError(
            "Worker failed with error 'no such tensor'\nplease check the stack trace"
        )


@pytest.mark.asyncio
async def test_a_worker_that_raises_is_an_answer_like_any_other() -> None:
    with pytest.raises(
        BridgeRefusal,
        match=r"failed in lockstep_check: Worker failed with error 'no such tensor'; the",
    ):
        await RankCalls(Broken(), LONG).call(BridgeWorker.lockstep_check)


def test_writes_that_did_not_come_in_time_are_no_weights() -> None:
    late = {
        "tp_rank": 1,
        "checksum": "",
        "not_finite": "",
        "late": "trainer host:1 has not finished its writes",
    }
    with pytest.raises(
        BridgeRefusal, match="rank 1 does not have version 3: trainer host:1 has not finished"
    ) as refusal:
        compare([{"tp_rank": 0, "checksum": "a", "not_finite": ""}, late], ["a", "b"], 3, "holds")
    assert refusal.value.status == 504


class Rooms:
    """An engine whose ranks have this much memory free for a staging buffer of 100 bytes."""

    engine_core = None

    def __init__(self, *free: int | None) -> None:
        self.free = free

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        assert (method, args) == ("lockstep_room", ())
        return [{"needed": 100, "free": free} for free in self.free]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("asked", "free", "chosen"),
    [
        ("direct", (500, 500), "direct"),
        ("auto", (500, 100), "overlapped"),
        ("auto", (500, 99), "direct"),
        ("auto", (None,), "overlapped"),
        ("overlapped", (100,), "overlapped"),
        ("overlapped", (500, -1), ""),
    ],
)
async def test_a_transfer_overlaps_where_every_rank_has_room(
    asked: str, free: tuple[int | None, ...], chosen: str
) -> None:
    calls = RankCalls(Rooms(*free), LONG)
    if chosen:
        assert await calls.choose_transfer(asked) == chosen
        return
    with pytest.raises(
        BridgeRefusal, match=r"0\.00 GB are free: start vLLM with a lower --gpu-memory-utilization"
    ):
        await calls.choose_transfer(asked)
