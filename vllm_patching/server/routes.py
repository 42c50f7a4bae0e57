"""The routes that are added to vLLM's app: /generate, /health_generate, /deterministic, /sampling,
/vocabulary, and those of bridge_routes.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from vllm_patching.compat.engine import engine_is_dead
from vllm_patching.compat.outputs import output_token_counts
from vllm_patching.compat.requests import caller_errors, logprobs_mode, tokenizer_of
from vllm_patching.server.access import AskAtTheDoor, Door
from vllm_patching.server.bridge_routes import NOT_SHARED, add_bridge_routes
from vllm_patching.server.controller import BridgeController
from vllm_patching.server.engine_watch import EngineWatch
from vllm_patching.server.generate import CutOff, GenerateRequest, Generator, LogprobNotFinite
from vllm_patching.server.guard import RefuseWhileUnavailable
from vllm_patching.server.lora import LoraController, add_lora_routes
from vllm_patching.server.refusals import RefusingRoute
from vllm_patching.server.shared_check import CHECK_SECONDS, SharedCheck
from vllm_patching.server.timeline import FollowRequests, ServerTimeline
from vllm_patching.server.turns import add_turn_routes

logger = logging.getLogger("vllm.lockstep.routes")

GENERATE_OPTIONS = ["return_text", "token_logprobs", "prompt_token_logprobs"]
"""Fields of /generate that other servers refuse; GET /sampling names them for clients that speak to
several kinds."""


class LockstepService:
    """What the routes act on; filled in when vLLM's engine is ready."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.generator: Generator | None = None
        self.watch: EngineWatch | None = None
        self.guard: RefuseWhileUnavailable | None = None
        self.bridge: BridgeController | None = None
        self.lora: LoraController | None = None
        self.instance = uuid.uuid4().hex
        """Another one after each start of the server."""
        self.weights: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Version and epoch of the weights that are served."""
        self.deterministic: dict[str, Any] | None = None
        """Of the self-test, with the provenance of the kernels; None if the server is not in
        deterministic mode."""

    def weights_served(self) -> dict[str, Any]:
        """What GET /weights answers: whether a request that is sent now would be answered, and by
        which weights.

        During the short pause of an update it would be: it waits.
        """
        version, epoch = self.weights()
        trouble = self.unavailable()
        return {
            "instance": self.instance if self.bridge is None else self.bridge.instance,
            "weight_version": version,
            "weight_epoch": epoch,
            "serving": not trouble,
            "trouble": trouble,
            "in_flight": 0 if self.engine is None else len(output_token_counts(self.engine)),
        }

    def unavailable(self) -> str:
        """Why nothing can be generated now; empty if it can."""
        if self.engine is None:
            return "the engine is still loading"
        if engine_is_dead(self.engine):
            return "vLLM's engine process has died; restart the server"
        if self.bridge is not None:
            return self.bridge.trouble()
        return self.watch.trouble if self.watch is not None else ""

    async def end_requests(self, reason: str) -> None:
        """Answer every request in flight with 503 and a reason."""
        if self.guard is not None:
            await self.guard.end_requests(reason)


def attach(
    app: Any, service: LockstepService, door: Door, timeline: ServerTimeline | None = None
) -> None:
    """Add our routes to vLLM's app, a guard in front of all that generates, and the door in front
    of everything.

    Args:
        timeline: told of the requests that come through.
    """
    app.include_router(make_router(service))
    # vLLM hands the app over with its middleware stack built, so ours goes around the finished
    # stack.
    stack = app.middleware_stack or app.build_middleware_stack()
    if timeline is not None and timeline.on:
        stack = FollowRequests(stack, timeline)
    service.guard = RefuseWhileUnavailable(stack, service)
    app.middleware_stack = AskAtTheDoor(service.guard, door)


def make_router(service: LockstepService) -> APIRouter:
    router = APIRouter(route_class=RefusingRoute)
    check = SharedCheck()

    @router.get("/health_generate")
    async def health_generate() -> JSONResponse:
        reason = service.unavailable()
        if reason or service.generator is None:
            return _error(503, reason or "the engine is still loading")
        try:
            seconds, age = await check.result(service.generator.check)
        except TimeoutError:
            paused = service.bridge is not None and service.bridge.state.in_update
            resting = service.bridge.turns.reason if service.bridge is not None else ""
            why = (
                resting or "a weight update holds it"
                if resting or paused
                else "the engine is stuck or overloaded"
            )
            return _error(503, f"no token within {CHECK_SECONDS:g} s: {why}")
        except CutOff as error:
            return _error(503, service.unavailable() or str(error))
        return JSONResponse({"status": "ok", "seconds": seconds, "age": age})

    @router.post("/generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        if service.generator is None:
            return _error(503, "the engine is still loading")
        work = asyncio.create_task(service.generator.generate(body))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return _error(499, "the client has closed the connection")
            return Response(work.result().to_json(), media_type="application/json")
        except caller_errors() as error:
            return _error(400, str(error))
        except LogprobNotFinite as error:
            return _error(500, str(error))
        except CutOff as error:
            return _error(503, str(error))
        except Exception:
            if reason := service.unavailable():  # the engine has ended under the request
                return _error(503, reason)
            raise
        finally:
            work.cancel()
            gone.cancel()

    @router.get("/deterministic")
    async def deterministic() -> JSONResponse:
        if service.engine is None:
            return _error(503, "the engine is still loading")
        if service.deterministic is None:
            return _error(
                404,
                "this server is not in deterministic mode: stop it, and start it with --deterministic",
            )
        return JSONResponse(service.deterministic)

    @router.get("/sampling")
    async def sampling() -> JSONResponse:
        if service.engine is None:
            return _error(503, "the engine is still loading")
        return JSONResponse(
            {"logprobs_mode": logprobs_mode(service.engine), "generate_options": GENERATE_OPTIONS}
        )

    @router.get("/vocabulary")
    async def vocabulary() -> JSONResponse:
        if service.engine is None:
            return _error(503, "the engine is still loading")
        try:
            tokenizer = await tokenizer_of(service.engine)
        except ValueError as error:
            return _error(404, f"this server has no tokenizer: {error}")
        # Hundreds of thousands of entries: not in the event loop.
        return await asyncio.to_thread(lambda: JSONResponse({"vocabulary": tokenizer.get_vocab()}))

    add_bridge_routes(router, service)
    add_lora_routes(router, service)
    add_turn_routes(
        router, lambda: service.bridge.turns if service.bridge is not None else None, NOT_SHARED
    )
    return router


async def _disconnected(request: Request) -> None:
    """Return when the client has gone. Its body has been read, so nothing else comes any more."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)
