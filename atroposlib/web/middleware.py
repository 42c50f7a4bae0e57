"""The checks and limits of every request to the service and the proxy.

Access, the size and the time of bodies, the time of answers, gzip in both directions, and one
report for each answer.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import re
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.web.access import Access
from atroposlib.web.bodies import Bodies
from atroposlib.web.bounded_protocol import prove_connection
from atroposlib.web.memory_budget import (
    ANSWERS_AT_ONCE,
    PAGE_ANSWERS_AT_ONCE,
    SMALL_BODY,
    TINY_BODY,
    Budgets,
    NoSpaceError,
)
from atroposlib.web.refusal import HTTPRefusal, detail_answer

logger = logging.getLogger(__name__)

GZIP_FROM = 1000
"""Bytes above which an answer is compressed for a client that accepts it."""
GZIP_LEVEL = 1
"""Numbers compress nearly as well at level 1, at a fraction of the time."""
GROUP_PATHS = frozenset({"/scored_data", "/scored_data_list", "/reference/done"})
"""Paths of the service whose bodies hold groups, or as many numbers."""
STREAMING_PATHS = frozenset({"/ui/api/stream"})
"""Paths whose answers go on until the client disconnects."""
MAX_SMALL_BODY = SMALL_BODY
"""Bytes of a body on any other path."""
LARGE_ANSWERS = frozenset({"/batch", "/latest_example", "/reference/lease", "/evaluations"})
"""Paths whose answers may hold groups, or as many numbers. ANSWERS_AT_ONCE of each are made and
sent at a time."""
PAGE_DATA = "/ui/api/"
"""Path of the figures and rollouts that the page fetches."""
IN_A_THREAD_FROM = 1 << 16
"""Bytes above which compressing would delay other requests."""
REFUSES_GZIP = re.compile(r"\bgzip\s*;\s*q\s*=\s*0(\.0*)?\s*(,|$)", re.IGNORECASE)
"""An Accept-Encoding that names gzip in order not to get it."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request.

    Attributes:
        max_body: bytes of a large body, after decompression.
        seconds: time for receiving the body, and again for answering.
        access: rules for callers.
        large_bodies: paths whose bodies may have max_body bytes; None for every path.
        bodies_budget: bytes of all large bodies at a time; None for twice max_body.
        has_answer_deadline: False for a server whose answers may take any time.
        remedy: advice to a client whose body is too large.
    """

    max_body: int = 256 << 20
    seconds: float = 60.0
    access: Access = field(default_factory=Access)
    large_bodies: frozenset[str] | None = GROUP_PATHS
    bodies_budget: int | None = None
    has_answer_deadline: bool = True
    remedy: str = "post fewer groups at once"

    def body_bytes(self, path: str, is_proven: bool) -> int:
        """Return the bytes that a body may have.

        Clients without proof take nothing of the budgets.
        """
        if not is_proven:
            return min(self.max_body, TINY_BODY)
        is_large = self.large_bodies is None or path in self.large_bodies
        return self.max_body if is_large else min(self.max_body, MAX_SMALL_BODY)


def accepts_gzip(headers: Headers) -> bool:
    """Return whether the client takes a gzipped answer."""
    accepted = headers.get("accept-encoding", "")
    return "gzip" in accepted.lower() and REFUSES_GZIP.search(accepted) is None


async def compress(body: bytes) -> bytes:
    """Gzip, in a thread if it takes long, for a route that sends its answer piece by piece.

    Others are packed on the way.
    """
    if len(body) < IN_A_THREAD_FROM:
        return gzip.compress(body, GZIP_LEVEL, mtime=0)
    return await asyncio.to_thread(gzip.compress, body, GZIP_LEVEL, mtime=0)


class RequestLimitsMiddleware:
    """ASGI middleware. The route behind it gets the whole body at once, decompressed.

    Args:
        app: the application behind it.
        limits: of each request.
        answered: called with method, route, status and seconds of each answered request.
        refuse: form of the answer to a refused request.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: RequestLimits,
        answered: Callable[[str, str, int, float], None] = lambda *_: None,
        refuse: Callable[[HTTPRefusal], Response] = detail_answer,
    ) -> None:
        self.app, self.limits, self.answered, self.refuse = app, limits, answered, refuse
        self.packing = GZipMiddleware(app, GZIP_FROM, GZIP_LEVEL)
        self.budgets = Budgets(limits.max_body, limits.seconds, limits.bodies_budget)
        self.bodies = Bodies(self.budgets, limits.seconds, limits.remedy)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = StatusRecorder(send)
        named = f"{scope['method']} {scope['path'][:200]}"
        started = time.perf_counter()
        try:
            await self._let_in(scope, receive, answer)
        except HTTPRefusal as refusal:
            if answer.started:
                raise
            await self.refuse(refusal)(scope, receive, answer.send)
        except NoSpaceError as error:
            logger.warning("%s was refused: %s", named, error)
            full = HTTPRefusal(503, str(error), {"Retry-After": "2", "Connection": "close"})
            await self.refuse(full)(scope, receive, answer.send)
        except TimeoutError:
            if answer.started:
                raise ConnectionAbortedError(
                    f"{named}: the client did not take the answer in {self.limits.seconds:g} s"
                ) from None
            logger.error("%s took longer than %g s", named, self.limits.seconds)
            late = HTTPRefusal(
                503, f"not done within {self.limits.seconds:g} s; try again", {"Retry-After": "1"}
            )
            await self.refuse(late)(scope, receive, answer.send)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self.answered(scope["method"], route, answer.status, time.perf_counter() - started)

    async def _let_in(self, scope: Scope, receive: Receive, answer: StatusRecorder) -> None:
        """Check a request, read its body and pass both on."""
        headers, path = Headers(scope=scope), scope["path"]
        client = (scope.get("client") or ("",))[0]
        is_proven = self.limits.access.check(scope["method"], path, headers, client)
        if is_proven:
            prove_connection(scope)
        app = self.packing if accepts_gzip(headers) else self.app
        async with self.budgets.shared() as share:
            body = await self.bodies.read(
                headers, receive, self.limits.body_bytes(path, is_proven), share
            )
            async with self._turn(path):
                # An open page gets its stream until it closes it, and each message of a stream has
                # its own deadline.
                has_deadline = self.limits.has_answer_deadline and path not in STREAMING_PATHS
                async with asyncio.timeout(self.limits.seconds if has_deadline else None):
                    await app(scope, replayed(body, receive), answer.send)

    def _turn(self, path: str) -> AbstractAsyncContextManager[None]:
        """Return the block in which an answer is made and sent: large answers of one path wait for
        each other.
        """
        if path in LARGE_ANSWERS:
            return self.budgets.answering(path, ANSWERS_AT_ONCE)
        if path.startswith(PAGE_DATA) and path not in STREAMING_PATHS:
            return self.budgets.answering(PAGE_DATA, PAGE_ANSWERS_AT_ONCE)
        return nullcontext()


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body, which was read before, once.

    Later messages come from the client.
    """
    pending = [body]

    async def again() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return again


class StatusRecorder:
    """Forwards an answer and records its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.status = 0

    async def send(self, message: Message) -> None:
        """Forward one ASGI message."""
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
        await self._send(message)
