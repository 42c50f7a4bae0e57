"""vLLM's engine as the bridge sees it: a core that obeys one command after the other between steps,
and its front end.

It keeps to the essential parts of vLLM. A pause counts from the moment at which the core reads the
command, long before it is answered. Commands wait for the end of a step and for each other. A sent
command cannot be taken back. A caller that stops waiting for an answer does not stop the core.
Commands can be slow, and can fail before or after they have been carried out.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm_patching.engine_core import extension as engine_core
from vllm_patching.protocol.manifest import Manifest, ManifestEntry
from vllm_patching.protocol.messages import (
    CAN_VERIFY_AND_RESUME,
    VERIFY_AND_RESUME,
    CohortOrder,
)
from vllm_patching.weights.sharding import ShardSpec, Slice

CACHE_BYTES = 1000
"""Memory of a rank's keys and values."""
PARTS = 3
"""Pieces in which weights are written."""
STEP_SECONDS = 0.05
SHAPE = (4,)
PARAMETERS = {"w": (SHAPE, "float32")}


def checksum(parts: list[str]) -> str:
    return "|".join(parts)


@dataclass
class Fault:
    """The fault of a command of the core: `slow`, `fails before` or `fails after` it was carried
    out.

    Attributes:
        command: the one to which it happens; empty: the next.
    """

    kind: str
    seconds: float = 0.0
    command: str = ""


class FakeRank:
    """A worker. Its weights are PARTS strings, all the same when they are whole."""

    def __init__(self, number: int, ranks: int, world: Any) -> None:
        self.number, self.live, self.staged = number, ["0/0"] * PARTS, ["none"] * PARTS
        self._ranks, self._world = ranks, world
        self.status: dict[str, Any] = {"phase": "idle", "error": ""}
        self.pending = 0
        self.cache_away, self.memory_taken = False, 0
        self.writing = False
        self._commands: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._called_off = False
        self._sender: Any = None
        self._direct = False
        self._event: Any = None
        self._limit = 0.0
        self.recomputes, self.derived = False, ""
        self.thread = asyncio.ensure_future(self._updater())

    def lockstep_setup(self, share: bool) -> dict[str, Any]:
        entry = ManifestEntry(
            ShardSpec("w", SHAPE, SHAPE, (Slice(0, 0, 0, SHAPE[0]),)), "float32", "cpu"
        )
        manifest = Manifest(self.number, self._ranks, (entry,)).to_json()
        return {
            "manifest": manifest,
            "handles": None,
            "gpu_uuid": "",
            "checksum": checksum(self.live),
            "recomputes": self.recomputes,
        }

    def lockstep_room(self) -> dict[str, Any]:
        return {"needed": 0, "free": None}

    def lockstep_first_step(self) -> dict[str, Any]:
        return {"tp_rank": self.number, "began": None}

    def lockstep_follow(self, events: list[str], trainer: str, seconds: float) -> str:
        self._event, self._limit = (
            (self._world.trainers[events[self.number]] if events else None),
            seconds,
        )
        return ""

    def lockstep_check(self) -> dict[str, Any]:
        self.derived = checksum(self.live)
        return {"tp_rank": self.number, "checksum": checksum(self.live), "not_finite": ""}

    async def lockstep_check_written(self) -> dict[str, Any]:
        if self._event is not None and not await self._event.reached(self.number, self._limit):
            return {
                "tp_rank": self.number,
                "checksum": "",
                "not_finite": "",
                "late": "writes of the trainer have not come",
            }
        return self.lockstep_check()

    def lockstep_commit(self) -> dict[str, Any]:
        self.live[:] = self.staged
        return self.lockstep_check()

    # -- turns

    def lockstep_cache_bytes(self) -> dict[str, Any]:
        return {"tp_rank": self.number, "bytes": CACHE_BYTES, "error": ""}

    def lockstep_give_back(self) -> dict[str, Any]:
        assert self._world.core.paused, "keys and values are taken away from an engine that runs"
        freed, self.cache_away = 0 if self.cache_away else CACHE_BYTES, True
        return {"tp_rank": self.number, "bytes": freed, "error": ""}

    def lockstep_take_again(self) -> dict[str, Any]:
        if self.cache_away and self.memory_taken:
            return {
                "tp_rank": self.number,
                "bytes": 0,
                "error": f"{CACHE_BYTES} bytes wanted, {self.memory_taken} not free",
            }
        self.cache_away = False
        return {"tp_rank": self.number, "bytes": CACHE_BYTES, "error": ""}

    # -- the updater thread

    def lockstep_aim(self, direct: bool) -> None:
        self._direct = direct

    def lockstep_cohort(self, order: CohortOrder) -> None:
        self._called_off = True
        sender = self._world.trainers[order["key"].split("/")[0]]

        async def join() -> None:
            await sender.comes_to_cohorts.wait()
            self._sender = sender

        self._submit({"phase": "joining", "error": "", "cohort": order["key"]}, "ready", join)

    async def lockstep_leave(self) -> None:
        async def leave() -> None:
            self._sender = None

        self._submit({"phase": "idle", "error": ""}, "idle", leave)
        await self._wait(1.0)

    def lockstep_receive(self, version: int) -> None:
        self._called_off = False
        self._submit({"phase": "receiving", "error": ""}, "received", self._receive)

    async def lockstep_status(self, patience: float = 0.0) -> dict[str, Any]:
        await self._wait(patience)
        gone = self._sender is not None and self._sender.killed
        told = {"checksum": checksum(self.live if self._direct else self.staged), "not_finite": ""}
        return {"tp_rank": self.number, "trainer_gone": gone, "epoch": 0, **told, **self.status}

    async def lockstep_discard(self, patience: float) -> bool:
        self._called_off = True
        await self._wait(patience)
        if self.status["phase"] == "received":
            self.status["phase"] = "ready"
        return self.pending == 0

    async def _wait(self, seconds: float) -> None:
        deadline = self._world.now + seconds
        while self.pending and self._world.now < deadline:
            await asyncio.sleep(0.01)

    def _submit(
        self, status: dict[str, Any], done: str, work: Callable[[], Awaitable[None]]
    ) -> None:
        self.pending += 1
        self.status = status

        async def obey() -> None:
            try:
                await work()
                status["phase"] = done
            except ConnectionError as error:
                status.update(phase="failed", error=str(error))
            self.pending -= 1

        self._commands.put_nowait(obey)

    async def _updater(self) -> None:
        while True:
            await (await self._commands.get())()

    async def _receive(self) -> None:
        """Notices that it was called off only when its present wait ends, and writes what comes
        until then.
        """
        target = self.live if self._direct else self.staged
        self.writing = self._direct
        try:
            for part in range(PARTS):
                if self._called_off:
                    raise ConnectionError("called off")
                target[part] = await self._sender.sent(self.number, part)
        finally:
            self.writing = False


class FakeCore:
    """Carries out commands, and makes one token a step while it is not paused."""

    def __init__(self, world: Any, ranks: int) -> None:
        self.paused, self.dead = False, False
        self.commands: deque[tuple[str, Callable[[], Any], asyncio.Future[Any]]] = deque()
        self.faults: deque[Fault] = deque()
        self.stalled_until = 0.0
        self.mute_until = 0.0
        """It goes on working, and its answers arrive after that."""
        self._heard = 0.0
        self._loop = asyncio.get_running_loop()
        self.outputs: asyncio.Queue[tuple[float, str]] = asyncio.Queue()
        self.ranks = [FakeRank(number, ranks, world) for number in range(ranks)]
        self._world = world
        self._obeying = False
        self._background: set[asyncio.Future[Any]] = set()
        self.task = asyncio.ensure_future(self._run())

    async def send(self, name: str, work: Callable[[], Any]) -> Any:
        """A command, and its answer."""
        if self.dead:
            raise RuntimeError("the engine is dead")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.commands.append((name, work, future))
        return await asyncio.shield(future)

    @property
    def busy(self) -> bool:
        """Report if it has an open command."""
        return self._obeying or bool(self.commands)

    async def _run(self) -> None:
        while not self.dead:
            if self._world.now < self.stalled_until:
                await asyncio.sleep(self.stalled_until - self._world.now)
            if self.commands:
                self._obeying = True
                await self._obey(*self.commands.popleft())
                self._obeying = False
                await asyncio.sleep(0.001)
                continue
            if not self.paused:
                self._step()
            await asyncio.sleep(STEP_SECONDS)

    async def _obey(self, name: str, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        fault = next((fault for fault in self.faults if fault.command in ("", name)), Fault("none"))
        if fault in self.faults:
            self.faults.remove(fault)
        if fault.kind == "slow" and name != "pause":
            await asyncio.sleep(fault.seconds)
        try:
            if fault.kind == "fails before":
                raise RuntimeError(f"{name} fails")
            answer = work()
            answer = await answer if inspect.isawaitable(answer) else answer
            if fault.kind == "fails after":
                raise RuntimeError(f"{name} has failed")
        except RuntimeError as error:
            future.set_exception(error)
            future.exception()  # the caller may not wait any more
            return
        if name == "pause" and fault.kind == "slow":
            # It stands still already, and reports it when it is idle; other commands are carried
            # out in between.
            late = asyncio.ensure_future(self._answer_later(future, fault.seconds))
            self._background.add(late)
            return
        self._say(future.set_result, answer)

    def _say(self, hear: Callable[[Any], None], what: Any) -> None:
        """Answers of the core while no front end reads come later, in the same order."""
        if self._world.now >= max(self.mute_until, self._heard):
            return hear(what)
        self._heard = max(self._heard, self.mute_until) + 1e-6
        self._loop.call_at(self._heard, hear, what)
        return None

    async def _answer_later(self, future: asyncio.Future[Any], seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._say(future.set_result, None)

    def _step(self) -> None:
        held = {checksum(rank.live) for rank in self.ranks}
        parts = {part for rank in self.ranks for part in rank.live}
        if len(parts) != 1:
            self._world.wrong.append(f"a token was sampled from a mixture: {held}")
        if any(rank.cache_away for rank in self.ranks):
            self._world.wrong.append("a token was sampled without keys and values")
        writers = self._world.writers_now()
        if writers:
            self._world.wrong.append(f"a token was sampled while {writers} could write")
        self._say(self.outputs.put_nowait, (self._world.now, parts.pop()))

    # -- as vLLM's EngineCore

    def pause(self) -> None:
        self.paused = True

    def resume_scheduler(self) -> None:
        self.paused = False

    async def rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        answers = [getattr(rank, method)(*args) for rank in self.ranks]
        waiting = [answer for answer in answers if inspect.isawaitable(answer)]
        return list(await asyncio.gather(*waiting)) if waiting else answers

    async def verify_and_resume(
        self, method: str, expected: list[str], version: int, deadline: float
    ) -> dict[str, Any]:
        answers = await self.rpc(method, ())
        asked = SimpleNamespace(
            collective_rpc=lambda _: answers, resume_scheduler=self.resume_scheduler
        )
        return engine_core.verify_and_resume(asked, method, expected, version, deadline)


class Client:
    """The front end's side of the core."""

    def __init__(self, core: FakeCore) -> None:
        self._core = core

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        await self._core.send("pause", self._core.pause)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if method == CAN_VERIFY_AND_RESUME:
            return True
        assert method == VERIFY_AND_RESUME
        return await self._core.send(method, lambda: self._core.verify_and_resume(*args))

    async def get_output_async(self) -> tuple[float, str]:
        return await self._core.outputs.get()


class OutputProcessor:
    """Hands tokens to one request that never ends, unless it is asked for its tokens."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.tokens: list[str] = []

    def add_request(self, request: Any) -> None:
        self.tokens = []
        counter = SimpleNamespace(num_output_tokens=lambda: len(self.tokens))
        self.request_states = {
            request.request_id: SimpleNamespace(
                request_id=request.request_id, external_req_id=None, detokenizer=counter
            )
        }

    def process_outputs(self, outputs: str, moment: float | None = None) -> None:
        self.tokens.append(outputs)


class Renderer:
    async def clear_mm_cache_async(self) -> None:
        return None


class FakeEngine:
    """vLLM's AsyncLLM. Make it, and call `start` when its parts have been wrapped."""

    def __init__(self, world: Any, ranks: int = 1) -> None:
        self.core = FakeCore(world, ranks)
        self.engine_core = Client(self.core)
        self.renderer = Renderer()
        self.output_processor = OutputProcessor()
        self._handler: asyncio.Future[None] | None = None

    @property
    def errored(self) -> bool:
        return self.core.dead

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        answers: list[Any] = await self.core.send(method, lambda: self.core.rpc(method, args))
        return answers

    async def resume_generation(self) -> None:
        await self.core.send("resume", self.core.resume_scheduler)

    def start(self) -> None:
        self._handler = asyncio.ensure_future(self._hand_out())

    async def _hand_out(self) -> None:
        while True:
            moment, token = await self.engine_core.get_output_async()
            self.output_processor.process_outputs(token, moment)
