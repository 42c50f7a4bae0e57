"""A server of several replicas: each is asked, and what becomes of all of them when one is wrong,
late or broken.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from vllm_patching.compat.engine import replicas
from vllm_patching.compat.versions import UnsupportedVllm
from vllm_patching.protocol.messages import (
    CAN_VERIFY_AND_RESUME,
    VERIFY_AND_RESUME,
    BridgeRefusal,
    BridgeWorker,
    compare,
)
from vllm_patching.server import engine_calls as rank_calls
from vllm_patching.server.engine_calls import RankCalls

TIMEOUT = 0.2
LONG = 1000.0
"""For what must not end by a limit, on a busy machine either."""


class Core:
    """An engine core that is paused at first, with two ranks.

    Args:
        held: what its ranks' weights condense to.
        late: seconds before it answers a check.
        broken: it fails in a check.
    """

    def __init__(self, held: str = "a", late: float = 0.0, broken: bool = False) -> None:
        self.held, self.late, self.broken, self.paused = held, late, broken, True

    async def check(
        self, method: str, expected: list[str], version: int, deadline: float
    ) -> dict[str, Any]:
        await asyncio.sleep(self.late)
        if self.broken:
            raise RuntimeError("Worker failed with error 'no such tensor'")
        self.paused = [self.held] * 2 != expected or time.monotonic() > deadline
        return {"answers": self.ranks(), "resumed_at": None if self.paused else time.monotonic()}

    def ranks(self) -> list[dict[str, Any]]:
        return [
            {"tp_rank": rank, "checksum": self.held, "not_finite": "", "began": None}
            for rank in range(2)
        ]


class Client:
    """As vLLM's DPLBAsyncMPClient, whose own calls hand the first replica's answer on alone."""

    def __init__(self, *cores: Core) -> None:
        self.core_engines = [bytes([number, 0]) for number in range(len(cores))]
        self.cores = dict(zip(self.core_engines, cores, strict=True))
        self.background: set[asyncio.Task[Any]] = set()

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        core = self.cores[engine]
        if method == "collective_rpc":
            assert args == ("lockstep_check", None, (), None)
            return core.ranks()
        if method == CAN_VERIFY_AND_RESUME:
            if core.broken:
                raise Exception(
                    f"Call to {method} method failed: 'EngineCoreProc' object has no attribute '{method}'"
                )
            return True
        assert method == VERIFY_AND_RESUME
        task = asyncio.create_task(
            core.check(*args)
        )  # it goes on working for a caller who has stopped waiting
        self.background.add(task)
        return await asyncio.shield(task)

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        await asyncio.shield(
            asyncio.gather(*self.background, return_exceptions=True)
        )  # one thing after the other
        for core in self.cores.values():
            core.paused = True


class Engine:
    errored = False

    def __init__(self, *cores: Core) -> None:
        self.cores, self.engine_core = cores, Client(*cores)


async def verify(
    engine: Engine, told: list[float], timeout: float = LONG
) -> tuple[list[Any], float | None, bool]:
    return await RankCalls(engine, timeout).verify_and_resume(
        BridgeWorker.lockstep_check, ["a", "a"], 3, told.append
    )


@pytest.mark.asyncio
async def test_every_rank_of_every_replica_answers_and_is_named() -> None:
    engine = Engine(Core("a"), Core("b"))
    assert replicas(engine) == 2
    answers = await RankCalls(engine, LONG).call(BridgeWorker.lockstep_check)
    assert [(a["replica"], a["tp_rank"], a["checksum"]) for a in answers] == [
        (0, 0, "a"),
        (0, 1, "a"),
        (1, 0, "b"),
        (1, 1, "b"),
    ]
    with pytest.raises(
        BridgeRefusal, match="rank 0 of replica 1 holds checksum b of version 3, the trainer's is a"
    ):
        compare(answers, ["a", "a"], 3, "holds")
    same = [{"tp_rank": 0, "checksum": "a", "not_finite": "", "replica": n} for n in (0, 1)]
    compare([{**answer, "parameters": "p"} for answer in same], ["a"], 3, "holds")
    with pytest.raises(
        BridgeRefusal,
        match=r"rank 0 of replica 1 has reloaded version 3 to other parameters \(p1\) than the same "
        r"rank of replica 0 \(p0\)",
    ):
        compare([{**a, "parameters": f"p{a['replica']}"} for a in same], ["a"], 3, "holds")


@pytest.mark.asyncio
async def test_all_go_on_together() -> None:
    engine, told = Engine(Core(), Core(late=0.01), Core()), []
    answers, moment, runs = await verify(engine, told)
    assert len(answers) == 6
    assert moment is not None
    assert runs
    assert not any(core.paused for core in engine.cores)
    assert not told


@pytest.mark.asyncio
async def test_none_serves_on_when_one_holds_other_weights() -> None:
    """Ranks that went on did so with the right weights, and the time is reported; then they stand
    still again.
    """
    engine, told = Engine(Core(), Core(held="b")), []
    answers, moment, runs = await verify(engine, told)
    assert [answer["checksum"] for answer in answers] == ["a", "a", "b", "b"]
    assert told == [moment]
    assert not runs
    assert all(core.paused for core in engine.cores)


@pytest.mark.asyncio
async def test_a_replica_that_fails_is_an_error_and_the_others_moment_is_told() -> None:
    engine, told = Engine(Core(), Core(broken=True)), []
    with pytest.raises(
        BridgeRefusal, match="failed in lockstep_check: Worker failed with error 'no such tensor'"
    ):
        await verify(engine, told)
    assert len(told) == 1


@pytest.mark.asyncio
async def test_a_late_replica_stands_still_and_so_do_the_others() -> None:
    engine, told = Engine(Core(), Core(late=2 * TIMEOUT)), []
    answers, moment, runs = await verify(engine, told, TIMEOUT)
    assert len(answers) == 4
    assert told == [moment]
    assert not runs
    assert all(core.paused for core in engine.cores)


@pytest.mark.asyncio
async def test_a_replica_that_does_not_answer_is_named_and_the_others_moment_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_calls, "_STOP_SECONDS", TIMEOUT / 2)
    engine, told = Engine(Core(), Core(late=LONG)), []
    with pytest.raises(BridgeRefusal, match="did not answer lockstep_check within"):
        await verify(engine, told, TIMEOUT)
    assert len(told) == 1
    for task in engine.engine_core.background:
        task.cancel()


@pytest.mark.asyncio
async def test_each_replica_must_have_the_plugin() -> None:
    await RankCalls(Engine(Core(), Core()), LONG).require_engine_core()
    with pytest.raises(UnsupportedVllm, match="has not loaded the plugin"):
        await RankCalls(Engine(Core(), Core(broken=True)), LONG).require_engine_core()
