"""The routes that are added to vLLM's app: /generate, /health_generate, /deterministic, /sampling,
/vocabulary, /weights and /bridge/*.

A body that does not validate is answered with 400 and the field, the value and the bound.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from vllm_patching.compat.engine import engine_is_dead
from vllm_patching.compat.outputs import output_token_counts
from vllm_patching.compat.requests import (
    caller_errors,
    logprobs_mode,
    returns_routed_experts,
    tokenizer_of,
)
from vllm_patching.protocol.messages import (
    AbortBody,
    BeginBody,
    BridgeRefusal,
    CohortBody,
    CommitBody,
    InitBody,
    QuarantineBody,
    Writer,
)
from vllm_patching.server.access import AskAtTheDoor, Door
from vllm_patching.server.bridge import BridgeController
from vllm_patching.server.engine_watch import EngineWatch
from vllm_patching.server.generate import (
    CHECK_SECONDS,
    CutOff,
    GenerateRequest,
    Generator,
    LogprobNotFinite,
    SharedCheck,
)
from vllm_patching.server.guard import RefuseWhileUnavailable
from vllm_patching.server.lora import LoraController, add_lora_routes
from vllm_patching.server.numbers import refuse_mistaken_numbers
from vllm_patching.server.timeline import FollowRequests, ServerTimeline
from vllm_patching.server.turns import add_turn_routes

logger = logging.getLogger("vllm.lockstep.routes")

REMEDIES = {
    "int_type": "send a whole JSON number such as 5, without quotation marks",
    "float_type": "send a JSON number such as 0.5, without quotation marks",
    "bool_type": "send true or false, without quotation marks",
}
"""Kind of pydantic's error -> the message in its stead."""
MOST_ERRORS = 5
LONGEST_VALUE = 80


class RefusingRoute(APIRoute):
    """A route that refuses a wrong body by itself.

    FastAPI's and vLLM's own answers repeat the value. They fail with 500 if JSON cannot hold it:
    NaN, or half a surrogate pair.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                return JSONResponse({"error": describe(error)}, 400)

        return handled


def describe(error: RequestValidationError) -> str:
    """One line with the first errors: field, value and rule, in characters that every encoding has."""
    found = error.errors()
    lines = [_described(one) for one in found[:MOST_ERRORS]]
    if len(found) > MOST_ERRORS:
        lines.append(f"and {len(found) - MOST_ERRORS} more")
    return "; ".join(lines).encode("utf-8", errors="backslashreplace").decode()


def _described(error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"] if part != "body") or "the body"
    message = REMEDIES.get(error["type"], str(error["msg"]).removeprefix("Value error, "))
    if error["type"] in (
        "missing",
        "json_invalid",
        "value_error",
    ):  # the input is the whole body, or the message has it
        return f"{where}: {message}"
    return f"{where} is {_shown(error.get('input'))}: {message}"


def _shown(value: Any) -> str:
    if (
        isinstance(value, int) and abs(value) >= 10**40
    ):  # Python refuses to print integers of 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


NOT_SHARED = (
    "this server does not share its weights: VLLM_ENABLE_SHARED_WEIGHTS was not 1 when it started. "
    "Stop it, `export VLLM_ENABLE_SHARED_WEIGHTS=1`, and start it again."
)


class Receives(Protocol):
    """The service behind the routes. `engine` and `bridge` are None until weights can be received."""

    engine: Any
    deterministic: dict[str, Any] | None

    @property
    def bridge(self) -> BridgeController | None:
        """Return the bridge whose steps the routes are."""

    def weights_served(self) -> dict[str, Any]:
        """Return the answer to GET /weights."""


def add_bridge_routes(router: APIRouter, service: Receives) -> None:
    """Add /weights and the /bridge routes."""

    @router.get("/weights")
    async def weights() -> JSONResponse:
        return JSONResponse(service.weights_served())

    def bridge_route(
        path: str,
        step: Callable[[BridgeController, Any], Awaitable[dict[str, Any]]],
        body: type[BaseModel],
    ) -> None:
        async def endpoint(body: Any) -> JSONResponse:
            if service.bridge is None:
                return _error(409, NOT_SHARED)
            try:
                return JSONResponse(await step(service.bridge, body))
            except BridgeRefusal as refusal:
                logger.warning("[Bridge] %s: %s", path, refusal)
                return _error(refusal.status, str(refusal))

        endpoint.__annotations__["body"] = body
        router.post(path)(endpoint)

    def info(read: Callable[[BridgeController], dict[str, Any]]) -> JSONResponse:
        if service.engine is None:
            return _error(503, LOADING)
        if service.bridge is None:
            return _error(409, NOT_SHARED)
        return JSONResponse(read(service.bridge))

    @router.get("/bridge/info")
    async def bridge_info() -> JSONResponse:
        return info(lambda bridge: {**bridge.info(), "deterministic": service.deterministic})

    @router.get("/bridge/state")
    async def bridge_state() -> JSONResponse:
        return info(lambda bridge: bridge.status())

    bridge_route(
        "/bridge/init",
        lambda b, body: b.init(
            **body.model_dump(exclude={"writers"}),
            writers=[Writer(**writer.model_dump()) for writer in body.writers],
        ),
        InitBody,
    )
    bridge_route("/bridge/cohort", lambda b, body: b.cohort(body), CohortBody)
    bridge_route("/bridge/begin", lambda b, body: b.begin(**body.model_dump()), BeginBody)
    bridge_route("/bridge/commit", lambda b, body: b.commit(**body.model_dump()), CommitBody)
    bridge_route("/bridge/abort", lambda b, body: b.abort(**body.model_dump()), AbortBody)
    bridge_route(
        "/bridge/quarantine", lambda b, body: b.quarantine(**body.model_dump()), QuarantineBody
    )


LOADING = "the engine is still loading"
GENERATE_OPTIONS = ["return_text", "token_logprobs", "prompt_token_logprobs"]
"""Fields of /generate that other servers refuse; GET /sampling names them for clients that speak to
several kinds."""


class LockstepService:
    """The service behind the routes; filled in when vLLM's engine is ready."""

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
        """Report of the self-test, with the provenance of the kernels; None outside deterministic
        mode."""

    def weights_served(self) -> dict[str, Any]:
        """Return the answer to GET /weights: whether a request would be answered now, and by which
        weights.

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
        """Return why no token can be generated now; empty if one can."""
        if self.engine is None:
            return LOADING
        if engine_is_dead(self.engine):
            return "vLLM's engine process has died; restart the server"
        if self.bridge is not None:
            return self.bridge.trouble()
        return getattr(self.watch, "trouble", "")

    def delay(self) -> str:
        """Return why no token is sampled though the server is available."""
        if self.bridge is not None:
            if self.bridge.turns.reason:
                return self.bridge.turns.reason
            if self.bridge.state.in_update:
                return "a weight update holds it"
        return "the engine is stuck or overloaded"

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
        timeline: counts the requests that come through.
    """
    refuse_mistaken_numbers(app)
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
            return _error(503, reason or LOADING)
        try:
            seconds, age = await check.result(service.generator.check)
        except TimeoutError:
            return _error(503, f"no token within {CHECK_SECONDS:g} s: {service.delay()}")
        except Exception as error:
            reason = service.unavailable()  # not empty if the engine has ended under the check
            if not reason and not isinstance(error, CutOff | LogprobNotFinite):
                raise
            return _error(503, reason or str(error))
        return JSONResponse({"status": "ok", "seconds": seconds, "age": age})

    @router.post("/generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        if service.generator is None:
            return _error(503, LOADING)
        try:
            return await _generate_for(service.generator, body, request)
        except Exception:
            if reason := service.unavailable():  # the engine has ended under the request
                return _error(503, reason)
            raise

    _add_engine_routes(router, service)
    add_bridge_routes(router, service)
    add_lora_routes(router, service)
    add_turn_routes(router, lambda: getattr(service.bridge, "turns", None), NOT_SHARED)
    return router


def _add_engine_routes(router: APIRouter, service: LockstepService) -> None:
    """Add the routes that describe the engine. They answer 503 until the engine is loaded."""

    @router.get("/deterministic")
    async def deterministic() -> JSONResponse:
        if service.engine is None:
            return _error(503, LOADING)
        if service.deterministic is None:
            return _error(
                404,
                "this server is not in deterministic mode: stop it, and start it with --deterministic",
            )
        trainer = service.bridge and service.bridge.trainer_kernels
        version, _ = service.weights()
        return JSONResponse(
            {**service.deterministic, "trainer": trainer, "weight_version": version}
        )

    @router.get("/sampling")
    async def sampling() -> JSONResponse:
        if service.engine is None:
            return _error(503, LOADING)
        options = list(GENERATE_OPTIONS)
        if returns_routed_experts(service.engine):
            options.append("routed_experts")
        return JSONResponse(
            {"logprobs_mode": logprobs_mode(service.engine), "generate_options": options}
        )

    @router.get("/vocabulary")
    async def vocabulary() -> JSONResponse:
        if service.engine is None:
            return _error(503, LOADING)
        try:
            tokenizer = await tokenizer_of(service.engine)
        except ValueError as error:
            return _error(404, f"this server has no tokenizer: {error}")
        # Hundreds of thousands of entries: not in the event loop.
        return await asyncio.to_thread(lambda: JSONResponse({"vocabulary": tokenizer.get_vocab()}))


async def _generate_for(generator: Generator, body: GenerateRequest, request: Request) -> Response:
    """Answer /generate, for as long as its client waits."""
    work = asyncio.create_task(generator.generate(body))
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
    finally:
        work.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    """Return when the client has gone. Its body has been read, so nothing else comes any more."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)
