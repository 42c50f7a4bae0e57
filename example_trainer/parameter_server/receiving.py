"""The half that the trainer sees: a vLLM server's bridge and routes, around held weights."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from atroposlib.web.bounded_protocol import bounded_protocol
from atroposlib.web.connections import connections_allowed
from example_trainer.errors import BridgeError, ConfigError
from example_trainer.parameter_server.held import HeldWeights
from vllm_patching.engine_core.extension import verify_and_resume
from vllm_patching.protocol.messages import CAN_VERIFY_AND_RESUME, BridgeRefusal
from vllm_patching.protocol.timeline import open_timeline
from vllm_patching.server.access import AskAtTheDoor, Door
from vllm_patching.server.bridge import BridgeController, Settlement
from vllm_patching.server.engine_calls import Answer, Arguments
from vllm_patching.server.metrics import BridgeMetrics, FollowBridge
from vllm_patching.server.routes import add_bridge_routes
from vllm_patching.server.state import VersionSpans, Weights
from vllm_patching.server.timeline import PushTimeline

# The bridge's calls of vLLM's engine, for a process that holds weights and samples nothing.

Call = Callable[[str, Sequence[Any]], list[Any]]
"""Calls a method of every rank's receiver with these arguments; one answer of each, by rank."""


class StillEngine:
    """Stands where the bridge expects vLLM's AsyncLLM. Ranks do one thing at a time, in the order
    in which they are asked.

    Attributes:
        errored: whether nothing can be asked of the ranks any more.
    """

    def __init__(self, call: Call, verified: Callable[[], None] = lambda: None) -> None:
        """Call from within the event loop.

        Args:
            call: asks the ranks; blocks.
            verified: called when all ranks have the trainer's checksums, in
                the same thread as `call`.
        """
        self.errored = False
        self.engine_core = self
        self.renderer = SimpleNamespace(clear_mm_cache_async=self._nothing)
        self.output_processor = SimpleNamespace(
            request_states={}, add_request=None, process_outputs=None
        )
        self._call, self._verified = call, verified
        self._main = ThreadPoolExecutor(1, "receiver")

    def ask(self, method: str, *args: Any, seconds: float) -> list[Any]:
        """As `collective_rpc`, for another thread. Raises TimeoutError."""
        return self._main.submit(self._call, method, args).result(seconds)

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = ()
    ) -> list[Any]:
        """The answers of all ranks."""
        return await self.on_main(self._call, method, args)

    async def on_main(self, work: Callable[..., Any], *args: Any) -> Any:
        """Work that takes its turn with what is asked of the ranks."""
        return await asyncio.get_running_loop().run_in_executor(self._main, work, *args)

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        """Nothing runs that could be paused."""
        await self.on_main(int)  # behind what is under way

    async def resume_generation(self) -> None:
        """Nothing was paused."""

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core's plugin; see verify_and_resume."""
        if method == CAN_VERIFY_AND_RESUME:
            return True
        core = SimpleNamespace(
            collective_rpc=lambda name: self._call(name, ()), resume_scheduler=self._verified
        )
        return await self.on_main(verify_and_resume, core, *args)

    async def get_output_async(self) -> Any:
        """There is never any."""
        await asyncio.Event().wait()

    async def _nothing(self) -> None:
        return None


logger = logging.getLogger(__name__)

START_SECONDS = 60.0
STOP_SECONDS = 5.0
ASK_SECONDS = 60.0
CONNECTION_SECONDS = 60.0
"""For a request's head or body, and for which an answer may be left untaken."""
MOST_BODY = 256 << 20
"""Bytes of a request's body."""
NOTHING_YET = "no trainer has pushed its weights to this parameter server yet"


class HeldSettlement(Settlement):
    """Ends pushes that failed: the newest version that is whole is what is handed out. It is an
    older one than before the push if that one had to give way, because what it replaced was still
    being sent.
    """

    async def _look(self) -> tuple[bool, str]:
        try:
            answers = sorted(
                await self._ranks.call(HeldWeights.held_newest), key=lambda one: one["tp_rank"]
            )
        except BridgeRefusal as refusal:
            return False, str(refusal)
        versions = {(one["weight_epoch"], one["version"]) for one in answers}
        epoch, version = versions.pop()
        state = self._state
        if (
            not versions
            and version is not None
            and (epoch, version) != (state.weight_epoch, state.weight_version)
        ):
            logger.warning(
                "[ParameterServer] version %d is lost: back to version %d",
                state.weight_version,
                version,
            )
            state.fall_back(version, epoch, [one["checksum"] for one in answers])
        return await super()._look()


class HeldController(BridgeController):
    """The bridge of a parameter server: every update arrives beside what is held."""

    settles = HeldSettlement

    async def start(self) -> None:
        """As of vLLM's; then wait for the first push."""
        await super().start()
        self.state.await_weights(NOTHING_YET)
        await self._settlement.stand_still()

    def _require_way(self, mode: str, transfer: str) -> None:
        """Refuse all but a broadcast beside what is held."""
        if mode == "broadcast" and transfer != "direct":
            return
        asked = mode
        if mode == "broadcast":
            asked = f"--weight-transfer {transfer}"
        raise BridgeRefusal(
            422, f"this is a parameter server, which receives a broadcast beside what it holds, and not {asked}; start the "
            "trainer with --weight-bridge-mode parameter_server"
        )  # fmt: skip

    facts: dict[str, Any]
    """More of what /bridge/info answers."""

    def info(self) -> dict[str, Any]:
        """See Bridge.info."""
        return {**super().info(), **self.facts}

    async def _until(
        self, wanted: str, what: str, also: tuple[str, ...] = ()
    ) -> list[dict[str, Any]]:
        """As of vLLM's. A shard has no other step to take, so it may wait itself. Questions do not
        hold up the receiving.
        """
        return await self._ranks.until(
            wanted, what, f"waiting for {self.state.trainer}", also, may_block=True,
            called_off=self._called_off,
        )  # fmt: skip

    @property
    def held(self) -> Weights | None:
        """The weights that may be handed out; None if none may."""
        state = self.state
        if not state.healthy or not state.updates:
            return None
        return Weights(state.weight_epoch, state.weight_version)

    async def quarantine(self, epoch: int, reason: str) -> dict[str, Any]:
        """The trainer goes on without this parameter server, whose push failed or is late. Its last
        whole weights are as good as before: they are handed out until a later push has come.
        """
        return await self.abort(epoch, reason)

    async def spoilt(self, reason: str) -> None:
        """Stop handing out weights whose checksum has changed, until the trainer has pushed again."""
        await super().quarantine(self.state.epoch, reason)


class ReceivingServer:
    """Answers the trainer, in a thread with an event loop of its own.

    Attributes:
        bridge: of the held weights.
        engine: asks the shards.
    """

    def __init__(
        self,
        call: Call,
        model: str,
        dtype: str,
        timeout: float,
        folder: Path,
        host: str,
        port: int,
        door: Door,
        facts: dict[str, Any],
    ) -> None:
        """
        Args:
            call: asks the shards.
            model, dtype: for messages.
            timeout: seconds for each step of an update.
            folder: where vllm_bridge_config.json goes.
            host, port: where to listen.
            door: lets requests in.
            facts: more of what /bridge/info answers.
        """
        self._call = call
        # As handing.py names its own: one file has the pushes that come and the pulls that go.
        self._timeline = PushTimeline(
            open_timeline("parameter-server", f"{socket.gethostname()}-{port}")
        )
        self._facts = facts
        self._about = (model, dtype, timeout, folder)
        self._host, self._port, self._door = host, port, door
        self.deterministic: dict[str, Any] | None = None
        self.bridge: HeldController | None = None
        self.engine: StillEngine | None = None
        self.fleet: Callable[[], list[dict[str, Any]]] = list
        """The servers that get weights from here, for GET /fleet."""
        self.sampling: Callable[[], str] = str
        """The logprobs mode of those servers; empty if none is known."""
        self.report: Callable[[], dict[str, Any]] = dict
        """The report of deterministic mode of those servers, see Handing.report."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready, self._failure = threading.Event(), ""
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._run, name="receiving server", daemon=True)

    def start(self) -> None:
        """Return when it listens. Raises ConfigError if it cannot."""
        self._thread.start()
        if not self._ready.wait(START_SECONDS) or self._failure:
            raise ConfigError(
                f"cannot listen on port {self._port}: {self._failure or 'it took too long'}; give another --port"
            )

    def check(self) -> None:
        """Raise BridgeError if the thread has ended."""
        if not self._thread.is_alive():
            raise BridgeError(
                f"the parameter server does not listen on port {self._port} any more: "
                f"{self._failure or 'its thread has ended'}; start it again, it takes the trainer's next push"
            )

    def stop(self) -> None:
        """Stop listening. Safe to call twice."""
        if self._server is not None:
            self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def ask(self, method: Callable[[Any, *Arguments], Answer], *args: *Arguments) -> list[Answer]:
        """Return every shard's answer. The call waits for earlier calls of the trainer's.

        Args:
            method: of HeldWeights.

        Raises:
            BridgeError: a shard does not answer.
        """
        assert self.engine is not None
        name = method.__name__
        try:
            return self.engine.ask(name, *args, seconds=ASK_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            raise BridgeError(
                f"the shards do not answer {name} ({error or type(error).__name__}); start this parameter server again"
            ) from error

    def condemn(self, reason: str) -> None:
        """See HeldController.spoilt. Raises BridgeError if it cannot be done."""
        assert self.bridge is not None
        assert self._loop is not None
        try:
            asyncio.run_coroutine_threadsafe(self.bridge.spoilt(reason), self._loop).result(
                ASK_SECONDS
            )
        except (RuntimeError, TimeoutError) as error:
            raise BridgeError(
                f"what is held is spoilt and could not be withdrawn ({error or type(error).__name__}); start this parameter "
                "server again"
            ) from error

    def trainer_kernels(self) -> dict[str, str] | None:
        """Return the kernels of the trainer that has joined, if it is in deterministic mode."""
        assert self.bridge is not None
        return self.bridge.trainer_kernels

    def weights_served(self) -> dict[str, Any]:
        """Return the answer of GET /weights."""
        bridge = self.bridge
        assert bridge is not None
        trouble = bridge.trouble()
        version, epoch = bridge.state.weight_version, bridge.state.weight_epoch
        return {
            "instance": bridge.instance, "weight_version": version, "weight_epoch": epoch, "serving": not trouble,
            "trouble": trouble, "in_flight": 0,
        }  # fmt: skip

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except (Exception, SystemExit) as error:
            self._failure = self._failure or f"{type(error).__name__}: {error}"
            logger.exception("[ParameterServer] does not listen")
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        model, dtype, timeout, folder = self._about
        self._loop = asyncio.get_running_loop()

        def verified() -> None:
            assert self.bridge is not None
            accept = HeldWeights.held_accept.__name__
            self._call(accept, (self.bridge.state.next_weight_epoch,))

        engine = StillEngine(self._call, verified)
        spans = VersionSpans()
        self.bridge = HeldController(
            engine, model, dtype, timeout, folder, spans, port=self._port, timeline=self._timeline
        )
        self.bridge.facts = self._facts
        await self.bridge.start()
        self.engine = engine
        config = uvicorn.Config(
            self._app(),
            self._host,
            self._port,
            log_level="warning",
            access_log=False,
            http=bounded_protocol(
                CONNECTION_SECONDS, connections_allowed(logger.info), logger, MOST_BODY
            ),
            ws="none",
        )
        self._server = server = uvicorn.Server(config)
        ready = asyncio.create_task(self._tell_ready(server))
        try:
            await server.serve()
        finally:
            ready.cancel()
            await self.bridge.stop()

    async def _tell_ready(self, server: uvicorn.Server) -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        self._ready.set()

    def _app(self) -> Any:
        app = FastAPI(title="Lockstep parameter server")
        router = APIRouter()
        add_bridge_routes(router, self)

        @router.get("/health")
        async def health() -> JSONResponse:
            if trouble := self.weights_served()["trouble"]:
                return JSONResponse({"error": trouble}, 503)
            return JSONResponse({"status": "ok"})

        @router.get("/metrics")
        async def metrics() -> Response:
            return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

        @router.get("/fleet")
        async def fleet() -> JSONResponse:
            return JSONResponse({"servers": self.fleet()})

        @router.get("/sampling")
        async def sampling() -> JSONResponse:
            if mode := self.sampling():
                return JSONResponse({"logprobs_mode": mode})
            return JSONResponse({"error": "no vLLM server is known"}, 503)

        @router.get("/deterministic")
        def deterministic() -> JSONResponse:  # it asks the vLLM servers, so in a thread of its own
            try:
                report = self.report()
            except ConfigError as error:
                return JSONResponse({"error": str(error)}, 409)
            if report:
                return JSONResponse(report)
            return JSONResponse({"error": "none of its vLLM servers answers"}, 503)

        app.include_router(router)
        bridge = self.bridge
        assert bridge is not None
        return AskAtTheDoor(FollowBridge(app, BridgeMetrics(), bridge.status), self._door)
