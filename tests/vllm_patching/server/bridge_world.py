"""A bridge's server, its fake engine, and trainers to which things happen; and what must hold of
them at any moment.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.virtual_time import VirtualLoop
from tests.vllm_patching.server.fake_engine import PARAMETERS, PARTS, FakeEngine, checksum
from vllm_patching.engine_core import extension as engine_core
from vllm_patching.protocol.messages import BridgeRefusal, CohortBody, Writer
from vllm_patching.server import bridge, engine_calls, turns
from vllm_patching.server.bridge import LATE, BridgeController
from vllm_patching.server.engine_calls import EngineState
from vllm_patching.server.state import Phase, VersionSpans

STEPS = ("cohort", "begin", "commit", "abort")
POINTS = (
    *(f"{when} {step}" for step in STEPS for when in ("before", "after")),
    "before the look at the clock",
    "before the write",
    "in the write",
    "before the transfer",
    "in the transfer",
)
"""Where something can happen to a trainer."""
TIMEOUT = 4.0
CLOCKED = (bridge, engine_calls, engine_core, turns)
"""The modules whose seconds are the world's."""
PART_SECONDS = 0.1
CLIENT_MARGIN = 2.0
"""Seconds by which a trainer's deadline exceeds the server's."""


@dataclass(frozen=True)
class FakeWriter(Writer):
    """A process that ends on the test's command."""

    trainer: Any = None

    def is_here(self) -> bool:
        return True

    def has_ended(self) -> bool:
        return bool(self.trainer.killed)


class Silent(Exception):
    """The server's answer did not come."""


class Trainer:
    """Does updates as the real one does, and can be stopped and killed between any two of its
    steps.
    """

    def __init__(self, world: World, kind: str) -> None:
        """
        Args:
            kind: single_copy, follows (a single copy whose event the server waits for), direct or
                overlapped.
        """
        self.world, self.kind = world, kind
        self.pid = next(world.pids)
        self.name = f"t{self.pid}"
        self.epoch, self.version, self.killed, self.joined = 0, 0, False, False
        self.cohort, self.cohorts = "", itertools.count(1)
        self.comes_to_cohorts, self.awake = asyncio.Event(), asyncio.Event()
        self.comes_to_cohorts.set()
        self.may_write = False
        """Between its look at the clock and the moment at which nothing of it is on the way any
        more."""
        self.owes = False
        self.lease: str | None = None
        self.spoil = ""
        self.part_seconds = PART_SECONDS
        """Seconds of the GPU for a part of a write."""
        self.lose_answer = ""
        self.fate = ("", "")
        """A point of its way, and what happens to it there: it is stopped or killed."""
        self.awake.set()
        self.task: asyncio.Task[None] | None = None
        self.gpu, self.reached_gpu = dict[int, asyncio.Task[None]](), set[int]()
        self.wires: dict[tuple[int, int], asyncio.Future[str]] = {}
        self.log: list[str] = []
        world.trainers[self.name] = self

    # -- what happens to it

    def stop(self) -> None:
        """SIGSTOP: what it has given to the GPU goes on."""
        self.awake.clear()

    def go_on(self) -> None:
        self.awake.set()

    def kill(self) -> None:
        """SIGKILL."""
        for task in [self.task, *self.gpu.values()]:
            if task is not None:
                task.cancel()
        self.killed, self.may_write = True, False
        for wire in self.wires.values():
            if not wire.done():
                wire.set_exception(ConnectionError("connection closed by peer"))
                wire.exception()

    @property
    def busy(self) -> bool:
        return self.task is not None and not self.task.done()

    def begin(self) -> None:
        """Do one update in the background."""
        self.task = self.world.loop.create_task(self._update_for_sure())

    # -- what the server and the workers see of it

    async def reached(self, rank: int, seconds: float) -> bool:
        """Report if the GPU comes to the event behind the writes within that time."""
        deadline = self.world.now + seconds
        while rank not in self.reached_gpu:
            if self.world.now >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def sent(self, rank: int, part: int) -> str:
        """A part of a transfer, as its receiver waits for it."""
        wire = self._wire(rank, part)
        try:
            return await asyncio.wait_for(asyncio.shield(wire), TIMEOUT)
        except TimeoutError:
            raise ConnectionError("nothing came") from None
        finally:
            if self.wires.get((rank, part)) is wire:
                del self.wires[rank, part]

    def _wire(self, rank: int, part: int) -> asyncio.Future[str]:
        if (rank, part) not in self.wires:
            self.wires[rank, part] = self.world.loop.create_future()
            if self.killed:
                self.wires[rank, part].set_exception(ConnectionError("connection closed by peer"))
        return self.wires[rank, part]

    # -- what it does

    async def _update_for_sure(self) -> None:
        """One update; again, once, if it was too late."""
        version = self.version + 1
        try:
            if not self.joined:
                await self._join()
            try:
                await self._update(version)
            except BridgeRefusal as refusal:
                if refusal.status != LATE or self.owes:
                    raise
                await self._meet()
                await self._update(version)
            self.version = version
            self.log.append(f"served {self.version}")
        except (BridgeRefusal, Silent, ConnectionError) as error:
            self.log.append(f"{type(error).__name__}: {error}")
            self.cohort = ""

    async def _join(self) -> None:
        broadcast = self.sends
        if self.owes:
            await self._give_back()
        server, events = (
            self.world.server,
            [self.name] * len(self.world.ranks) if self.kind == "follows" else [],
        )
        answer = await self._call(
            "init",
            lambda: server.init(
                trainer=f"trainer {self.name}",
                mode="broadcast" if broadcast else "single_copy",
                parameters=PARAMETERS,
                writers=[FakeWriter("here", self.pid, 0, self)],
                transfer=self.kind if broadcast else "auto",
                events=events,
                weight_epoch=self.pid,
            ),
        )
        self.epoch, self.joined, self.cohort = answer["epoch"], True, ""

    @property
    def sends(self) -> bool:
        """Report if it is a broadcast's."""
        return self.kind in ("direct", "overlapped")

    async def _meet(self) -> None:
        """Form another cohort, as after one of its members was lost; what was sent in the one
        before it is of no use.
        """
        if not self.sends:
            return
        self.wires, key = {}, f"{self.name}/{next(self.cohorts)}"
        body = CohortBody(epoch=self.epoch, members=1, key=key)
        await self._call("cohort", lambda: self.world.server.cohort(body))
        self.cohort = key

    async def quarantine(self, reason: str) -> None:
        """As the real one does from another thread, whatever it is doing."""
        await self.world.server.quarantine(self.epoch, reason)
        self.world.held_back = self.world.server.state.updates

    async def _update(self, version: int) -> None:
        server, step = self.world.server, {"epoch": self.epoch, "version": version}
        new = f"{self.pid}/{version}"
        sums = [checksum([new] * PARTS)] * len(self.world.ranks)
        if self.spoil == "announces others":
            sums, self.spoil = ["others"] * len(sums), ""
        self.lease, self.owes = None, True
        try:
            if self.sends and not self.cohort:
                await self._meet()
            lease = (await self._call("begin", lambda: server.begin(**step, cohort=self.cohort)))[
                "lease"
            ]
            self.lease = lease and lease["id"]
            if self.sends:
                await self._send(new)
            else:
                await self._write(new, lease["deadline"])
            await self._call(
                "commit", lambda: server.commit(**step, checksums=sums, lease=self.lease)
            )
            self.owes = False
        except (BridgeRefusal, Silent, ConnectionError):
            await self._give_back()
            raise

    async def _write(self, new: str, deadline: float) -> None:
        await self._point("before the look at the clock")
        if self.world.now > deadline:
            raise BridgeRefusal(LATE, "the lease ran out before anything was written")
        self.may_write = True
        await self._point("before the write")  # what no look at the clock can exclude
        spoilt, self.spoil = self.spoil == "fails to write", ""
        self.reached_gpu = set()
        for number, rank in enumerate(self.world.ranks):
            self.gpu[number] = self.world.loop.create_task(
                self._land(rank.live, number, new, PARTS - spoilt)
            )
        await self._point("in the write")
        if spoilt:
            raise ConnectionError("the write failed")
        if self.kind == "single_copy":
            await asyncio.gather(*self.gpu.values())
        self.may_write = False

    async def _land(self, live: list[str], number: int, new: str, parts: int) -> None:
        for part in range(parts):
            await asyncio.sleep(self.part_seconds)
            live[part] = new
        self.reached_gpu.add(number)

    async def _send(self, new: str) -> None:
        for part in range(PARTS):
            for rank in range(len(self.world.ranks)):
                await self._point("in the transfer" if part else "before the transfer")
                wire = self._wire(rank, part)
                if not wire.done():
                    wire.set_result(new)
            await asyncio.sleep(PART_SECONDS)

    async def _give_back(self) -> None:
        await asyncio.gather(*self.gpu.values())
        self.may_write = False
        try:
            await self._call(
                "abort",
                lambda: self.world.server.abort(self.epoch, "something went wrong", self.lease),
            )
            self.owes = False
        except Silent:
            return
        except BridgeRefusal:
            self.owes = False

    async def _call(
        self, name: str, step: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """A request: the server goes on with it whatever becomes of the trainer."""
        await self._point(f"before {name}")
        request = asyncio.ensure_future(step())
        self.world.requests.add(request)
        request.add_done_callback(self.world.note_request)
        done, _ = await asyncio.wait({request}, timeout=TIMEOUT + CLIENT_MARGIN)
        await self._point(f"after {name}")
        lost, self.lose_answer = (
            self.lose_answer == name,
            "" if self.lose_answer == name else self.lose_answer,
        )
        if not done or lost:
            raise Silent(f"no answer to {name}")
        return request.result()

    async def _point(self, where: str) -> None:
        """Where something can happen to it."""
        await asyncio.sleep(0.001)
        point, what = self.fate
        if point == where:
            self.fate = ("", "")
            self.stop() if what == "stopped" else self.kill()
        await asyncio.sleep(0)
        await self.awake.wait()


class World:
    """One server with its engine."""

    def __init__(self, loop: VirtualLoop, folder: Path, ranks: int = 1) -> None:
        self.loop = loop
        self.pids = itertools.count(1)
        self.trainers: dict[str, Trainer] = {}
        self.requests: set[asyncio.Future[Any]] = set()
        self.wrong: list[str] = []
        self.watchdog_fails = False
        self.held_back: int | None = None
        """Number of updates served before the server was put in quarantine; None if it was not."""
        self._names = itertools.count()
        loop.run_until_complete(self._start(folder, ranks))

    async def _start(self, folder: Path, ranks: int) -> None:
        self.engine = FakeEngine(self, ranks)
        self.core, self.ranks = self.engine.core, self.engine.core.ranks
        self.spans = VersionSpans()
        self.server = BridgeController(self.engine, "model", "float32", TIMEOUT, folder, self.spans)
        await self.server.start()
        self.engine.start()
        self._begin_request()
        watchdog, lost = self.server._watchdog, self.server._watchdog._lost

        async def lost_or_broken() -> str:
            if self.watchdog_fails:
                raise ZeroDivisionError("a mistake in the watchdog")
            return await lost()

        watchdog._lost = lost_or_broken  # type: ignore[method-assign]

    @property
    def now(self) -> float:
        return self.loop.time()

    def run(self, seconds: float) -> None:
        """Let time pass, and look at every moment at which something may have changed."""
        end = self.now + seconds
        while self.now < end:
            self.loop.run_until_complete(asyncio.sleep(min(0.1, end - self.now)))
            self.look()

    def run_until(self, what: Callable[[], bool], seconds: float) -> None:
        end = self.now + seconds
        while not what():
            assert self.now < end, (self.server.status(), [t.log for t in self.trainers.values()])
            self.run(0.1)

    def note_request(self, request: asyncio.Future[Any]) -> None:
        self.requests.discard(request)
        error = None if request.cancelled() else request.exception()
        if error is not None and not isinstance(error, BridgeRefusal):
            self.wrong.append(f"a request ended with {error!r}")

    def writers_now(self) -> list[str]:
        """Who could write live weights at this moment."""
        trainers = [
            t.name
            for t in self.trainers.values()
            if t.may_write or any(not task.done() for task in t.gpu.values())
        ]
        return trainers + [f"rank {rank.number}" for rank in self.ranks if rank.writing]

    # -- what must hold

    def look(self) -> None:
        """Everything that must hold between two calls."""
        assert not self.wrong, self.wrong
        state, switch = self.server.state, self.server._switch
        if self.server._lock.locked():
            return
        commands = [name for name, _, _ in self.core.commands]
        in_flight = self.core.busy or self.now < max(self.core.stalled_until, self.core.mute_until)
        if self.held_back is not None and state.updates == self.held_back:
            assert state.phase is not Phase.SERVING, "it serves though it was put in quarantine"
            assert "in quarantine" in self.server.trouble() or self.server._watchdog.has_ended
        if state.phase is Phase.SERVING:
            expected = f"{state.weight_epoch}/{state.weight_version}"
            assert all(part == expected for rank in self.ranks for part in rank.live), (
                expected,
                state,
            )
            assert state.checksums == [checksum(rank.live) for rank in self.ranks]
            assert not self.writers_now(), "serving while somebody could write"
            assert self.server._leases.out is None
            told = switch.resting or self.server.trouble()
            assert switch.state is EngineState.RUNNING or told
            assert in_flight or not self.core.paused or told, (
                "it says that it serves, and stands still"
            )
        elif state.phase is Phase.UNHEALTHY:
            assert self.server.trouble()
            # A command to pause that failed without having paused it is repeated at the watchdog's
            # next look. A quarantine is reported at once, and stops the engine when the call that
            # has its turn has ended.
            trying = (
                "pause" in commands
                or in_flight
                or switch.state is EngineState.UNKNOWN
                or self.server._called_off()
            )
            assert self.core.paused or self.core.dead or trying, "unhealthy, and it goes on"
        if (
            self.core.paused
            and not state.in_update
            and not in_flight
            and self.server.turns.turn is turns.Turn.SAMPLING
        ):
            assert self.server.trouble(), (
                "it stands still outside an update, and says that all is well"
            )

    def check_tokens(self) -> None:
        """Every token that was handed out names the weights that sampled it.

        Begins another request.
        """
        tokens = list(self.engine.output_processor.tokens)
        spans = self.spans.finish(self._request, len(tokens))
        told = [
            f"{span.weights.epoch}/{span.weights.version}"
            for span in spans
            for _ in range(span.tokens)
        ]
        assert told == tokens, (told, tokens)
        self._begin_request()

    def _begin_request(self) -> None:
        self._request = f"r{next(self._names)}"
        self.spans.start(self._request)
        self.engine.output_processor.add_request(
            SimpleNamespace(request_id=self._request, external_req_id=None)
        )
