"""What a server answers while nothing can be sampled rightly, and to what it owes an answer when it ends: 503."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from fastapi.responses import JSONResponse
from starlette.routing import get_route_path

OPEN_PATHS = frozenset(
    {
        "/metrics",
        "/load",
        "/version",
        "/v1/models",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
        "/openapi.json",
        "/deterministic",
        "/sampling",
        "/vocabulary",
        "/weights",  # says itself whether anything can be generated
        "/health_generate",  # says itself why nothing can be generated
    }
)
"""Read with GET, they say something of the server and sample nothing. /health and /ping are not among them: vLLM's own say that
all is well for as long as its engine lives, whatever its weights are."""
OPEN_PREFIXES = ("/bridge/", "/lora/", "/turns/")
"""Ours, by any method: they mend what is wrong, and refuse by themselves what they cannot do."""
TRY_AGAIN_LATER = 1013
"""WebSocket's close code for it."""
ENDING = "this server is ending, and what it was asked for with it: ask again, or another server"


class Availability(Protocol):
    """What the guard asks."""

    def unavailable(self) -> str:
        """Why nothing can be generated now; empty if it can."""


def is_open(method: str, path: str) -> bool:
    """Whether a request is answered also while nothing can be sampled rightly. What a list like this does not know, waits."""
    if path.startswith(OPEN_PREFIXES):
        return True
    return method in ("GET", "HEAD", "OPTIONS") and (path in OPEN_PATHS or path.startswith("/metrics/"))


class RefuseWhileUnavailable:
    """ASGI middleware: everything but what `is_open` lists gets a 503 with the reason while nothing can be sampled rightly.

    So does a request that is cancelled before its answer has begun. uvicorn cancels what is under way when the server ends, and
    would answer 500: a fault of the server's, where the request is as good as before and belongs to another one.
    """

    def __init__(self, app: Any, service: Availability) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        path = get_route_path(scope)
        if not is_open(scope.get("method", ""), path):
            reason = self._service.unavailable()
            if reason:
                return await _refuse(reason, scope, receive, send)
        begun = False

        async def sending(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            if begun or scope["type"] != "http":
                raise
            await _refuse(ENDING, scope, receive, send)


async def _refuse(reason: str, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
    answer = JSONResponse({"error": reason}, 503)
    if scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {}):
        return await answer(scope, receive, send)  # type: ignore[arg-type]
    await receive()  # the request to connect, which must be read before it is refused
    await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason[:120]})
