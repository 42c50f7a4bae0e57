"""The 503 of a server that cannot sample now: for new requests, for requests in flight when its
engine hangs, and at its end.
"""

from __future__ import annotations

import asyncio
import json
import logging
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
        "/weights",  # answers in any state with the reason
        "/health_generate",  # answers in any state with the reason
    }
)
"""Paths that describe the server on GET and sample nothing. They do not include /health and /ping:
vLLM's own answer 200 while its engine lives, whatever its weights are.
"""
OPEN_PREFIXES = ("/bridge/", "/lora/", "/turns/")
"""Our own routes, by any method. They repair the server, and refuse by themselves."""
TRY_AGAIN_LATER = 1013
"""WebSocket's close code for it."""
ENDING = "this server is ending, and what it was asked for with it: ask again, or another server"
EVENT_STREAM = b"text/event-stream"
LAST_WORD_SECONDS = 5.0
"""Time for a client to take the answer that ends its request, and for the app to notice that the
request has ended."""

logger = logging.getLogger("vllm.lockstep.engine")


class Availability(Protocol):
    """The guard's view of the service."""

    def unavailable(self) -> str:
        """Why nothing can be generated now; empty if it can."""


def is_open(method: str, path: str) -> bool:
    """Return whether a request is answered even while no token can be sampled with the right
    weights.

    Paths that are not listed wait.
    """
    if path.startswith(OPEN_PREFIXES):
        return True
    return method in ("GET", "HEAD", "OPTIONS") and (
        path in OPEN_PATHS or path.startswith("/metrics/")
    )


class _Answer:
    """One guarded request in flight.

    Ending it answers the client. Later messages of the app are dropped.
    """

    def __init__(self, scope: Mapping[str, Any], send: Any) -> None:
        self._scope, self._send = scope, send
        self._task = asyncio.current_task()
        self._streams_events = False
        self.begun = self.ended = False

    async def send(self, message: Any) -> None:
        """Hand a message of the app to the client."""
        if self.ended:
            return
        if message["type"] == "http.response.start":
            self._streams_events = any(
                name.lower() == b"content-type" and value.startswith(EVENT_STREAM)
                for name, value in message.get("headers", ())
            )
        self.begun = True
        await self._send(message)

    async def end(self, reason: str, done: asyncio.Event) -> None:
        """Answer 503, and have the app end its work.

        An answer that has begun cannot become a 503. A stream of events gets an error as its last
        event. Anything else is cut off, which its client takes for a broken connection.

        Args:
            done: set once the app has returned.
        """
        if self.ended:
            return
        self.ended = True
        try:
            async with asyncio.timeout(LAST_WORD_SECONDS):
                if await self._last_word(reason):
                    # After a whole answer uvicorn reports a disconnect to the app, which then
                    # aborts the request in the engine.
                    await done.wait()
        except TimeoutError:
            logger.debug(
                "[Engine] a request has not ended within %g s and is cancelled", LAST_WORD_SECONDS
            )
        if not done.is_set() and self._task is not None:
            self._task.cancel()

    async def _last_word(self, reason: str) -> bool:
        """Send what ends the answer.

        Return False if nothing can, so that the connection has to be broken.
        """
        if self._scope["type"] == "websocket":
            await self._send(
                {"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason[:120]}
            )
        elif not self.begun:
            await JSONResponse({"error": reason}, 503)(self._scope, _nothing, self._send)  # type: ignore[arg-type]
        elif self._streams_events:
            error = {
                "error": {
                    "message": reason,
                    "type": "ServiceUnavailable",
                    "param": None,
                    "code": 503,
                }
            }
            await self._send(
                {"type": "http.response.body", "body": f"data: {json.dumps(error)}\n\n".encode()}
            )
        else:
            return False
        return True


class RefuseWhileUnavailable:
    """ASGI middleware: while no token can be sampled with the right weights, all requests get a 503
    with the reason. Paths that `is_open` lists are excepted.

    So does a request that is cancelled before its answer has begun. When the server ends, uvicorn
    cancels the requests under way, and would answer 500. That is a fault of the server's. But the
    request is as good as before and belongs to another server.
    """

    def __init__(self, app: Any, service: Availability) -> None:
        self._app = app
        self._service = service
        self._in_flight: dict[_Answer, asyncio.Event] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        path = get_route_path(scope)
        guarded = not is_open(scope.get("method", ""), path)
        if guarded:
            reason = self._service.unavailable()
            if reason:
                return await _refuse(reason, scope, receive, send)
        answer, done = _Answer(scope, send), asyncio.Event()
        if guarded:
            self._in_flight[answer] = done
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            if answer.ended:
                return
            if answer.begun or scope["type"] != "http":
                raise
            await _refuse(ENDING, scope, receive, send)
        finally:
            done.set()
            self._in_flight.pop(answer, None)

    async def end_requests(self, reason: str) -> None:
        """End all guarded requests in flight with 503 and the reason."""
        ends = [answer.end(reason, done) for answer, done in self._in_flight.items()]
        for failure in await asyncio.gather(*ends, return_exceptions=True):
            if failure is not None:
                logger.warning(
                    "[Engine] a request in flight could not be answered with 503: %r", failure
                )


async def _nothing() -> dict[str, Any]:
    """Receive nothing, where an answer is sent that reads nothing."""
    return {"type": "http.disconnect"}


async def _refuse(reason: str, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
    answer = JSONResponse({"error": reason}, 503)
    if scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {}):
        return await answer(scope, receive, send)  # type: ignore[arg-type]
    await receive()  # the request to connect, which must be read before it is refused
    await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason[:120]})
