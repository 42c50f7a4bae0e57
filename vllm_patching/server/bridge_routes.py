"""The routes of whoever receives weights: /weights and /bridge/*."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from vllm_patching.protocol.messages import (
    AbortBody,
    BeginBody,
    CohortBody,
    CommitBody,
    InitBody,
    QuarantineBody,
)
from vllm_patching.protocol.verification import BridgeRefusal
from vllm_patching.protocol.writers import Writer
from vllm_patching.server.controller import BridgeController

logger = logging.getLogger("vllm.lockstep.routes")

NOT_SHARED = (
    "this server does not share its weights: VLLM_ENABLE_SHARED_WEIGHTS was not 1 when it started. "
    "Stop it, `export VLLM_ENABLE_SHARED_WEIGHTS=1`, and start it again."
)


class Receives(Protocol):
    """What the routes act on; `engine` and `bridge` are None as long as nothing can be received."""

    engine: Any
    deterministic: dict[str, Any] | None

    @property
    def bridge(self) -> BridgeController | None:
        """Whose steps the routes are."""

    def weights_served(self) -> dict[str, Any]:
        """What GET /weights answers."""


def add_bridge_routes(router: APIRouter, service: Receives) -> None:
    """Add them."""

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
            return _error(503, "the engine is still loading")
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
    bridge_route("/bridge/cohort", lambda b, body: b.cohort(**body.model_dump()), CohortBody)
    bridge_route("/bridge/begin", lambda b, body: b.begin(**body.model_dump()), BeginBody)
    bridge_route("/bridge/commit", lambda b, body: b.commit(**body.model_dump()), CommitBody)
    bridge_route("/bridge/abort", lambda b, body: b.abort(**body.model_dump()), AbortBody)
    bridge_route(
        "/bridge/quarantine", lambda b, body: b.quarantine(**body.model_dump()), QuarantineBody
    )


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)
