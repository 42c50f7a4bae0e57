"""The checks and limits of every request: the key, bodies, time, gzip both ways, and a count of the answers."""

from __future__ import annotations

import asyncio
import gzip
import logging
import re
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.web.access import Access, NotAllowedError
from atroposlib.web.bodies import Bodies, RefusedError
from atroposlib.web.bounded_protocol import prove_connection
from atroposlib.web.memory_budget import ANSWERS_AT_ONCE, PAGE_ANSWERS_AT_ONCE, SMALL_BODY, TINY_BODY, Budgets, NoSpaceError

logger = logging.getLogger(__name__)

GZIP_FROM = 1000
"""Bytes above which an answer is compressed for a client that accepts it."""
GZIP_LEVEL = 1
"""Numbers compress nearly as well at level 1, at a fraction of the time."""
LARGE = ("/scored_data", "/scored_data_list", "/reference/done")
"""Requests whose bodies hold groups, or as many numbers."""
ENDLESS = frozenset({"/ui/api/stream"})
"""Requests whose answers go on for as long as the client listens."""
MOST_OF_OTHERS = SMALL_BODY
"""Bytes of a body that holds no groups."""
LARGE_ANSWERS = frozenset({"/batch", "/latest_example", "/reference/lease", "/evaluations"})
"""Paths whose answers may hold groups, or as many numbers. A number of each is made and sent at a time."""
PAGE_DATA = "/ui/api/"
"""Where the page fetches figures and rollouts."""
IN_A_THREAD_FROM = 1 << 16
"""Bytes above which compressing would hold up other requests."""
REFUSES_GZIP = re.compile(r"\bgzip\s*;\s*q\s*=\s*0(\.0*)?\s*(,|$)", re.IGNORECASE)
"""An Accept-Encoding that names gzip in order not to get it."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request."""

    max_body: int = 256 << 20
    """Bytes of a body that holds groups, after decompression."""
    seconds: float = 60.0
    """For receiving the body, and again for answering."""
    access: Access = field(default_factory=Access)


def accepts_gzip(headers: Headers) -> bool:
    """Return whether the client takes a gzipped answer."""
    accepted = headers.get("accept-encoding", "")
    return "gzip" in accepted.lower() and REFUSES_GZIP.search(accepted) is None


async def compress(body: bytes) -> bytes:
    """Gzip, in a thread if it takes long, for a route that sends its answer piece by piece. Others are packed on the way."""
    if len(body) < IN_A_THREAD_FROM:
        return gzip.compress(body, GZIP_LEVEL, mtime=0)
    return await asyncio.to_thread(gzip.compress, body, GZIP_LEVEL, mtime=0)


class Gate:
    """ASGI middleware. The route behind it gets the whole body at once, already decompressed.

    Args:
        app: what is behind it.
        limits: of each request.
        answered: called with method, route, status and seconds of each request that was answered.
    """

    def __init__(self, app: ASGIApp, limits: RequestLimits, answered: Callable[[str, str, int, float], None]) -> None:
        self.app, self.limits, self.answered = app, limits, answered
        self.packing = GZipMiddleware(app, GZIP_FROM, GZIP_LEVEL)
        self.budgets = Budgets(limits.max_body, limits.seconds)
        self.bodies = Bodies(self.budgets, limits.seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        answer = _Answer(send)
        app = self.packing if accepts_gzip(headers) else self.app
        started = time.perf_counter()
        try:
            client = (scope.get("client") or ("",))[0]
            proven = self.limits.access.check(scope["method"], scope["path"], headers, client)
            if proven:
                prove_connection(scope)
            most = MOST_OF_OTHERS if proven else TINY_BODY  # strangers take nothing of the budgets
            most = self.limits.max_body if scope["path"] in LARGE else min(self.limits.max_body, most)
            async with self.budgets.shared() as share:
                body = await self.bodies.read(headers, receive, most, share)
                await self._pass_on(app, scope, replayed(body, receive), answer.send)
        except NotAllowedError as error:
            await self._refuse(RefusedError(error.status, error.detail, error.headers), answer)
        except RefusedError as refusal:
            await self._refuse(refusal, answer)
        except NoSpaceError as error:
            logger.warning("%s %s was refused: %s", scope["method"], scope["path"][:200], error)
            await self._refuse(RefusedError(503, str(error), {"Retry-After": "2", "Connection": "close"}), answer)
        except TimeoutError:
            if answer.started:
                raise ConnectionAbortedError(
                    f"{scope['method']} {scope['path'][:200]}: the client did not take the answer in {self.limits.seconds:g} s"
                ) from None
            logger.error("%s %s took longer than %g s", scope["method"], scope["path"][:200], self.limits.seconds)
            late = RefusedError(503, f"not done within {self.limits.seconds:g} s; try again", {"Retry-After": "1"})
            await self._refuse(late, answer)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self.answered(scope["method"], route, answer.status, time.perf_counter() - started)

    async def _pass_on(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        turn: AbstractAsyncContextManager[None] = nullcontext()
        if path in LARGE_ANSWERS:
            turn = self.budgets.answering(path, ANSWERS_AT_ONCE)
        elif path.startswith(PAGE_DATA) and path not in ENDLESS:
            turn = self.budgets.answering(PAGE_DATA, PAGE_ANSWERS_AT_ONCE)
        async with turn:
            # A page that is open is told what is new until it is closed, and each message has its own time.
            async with asyncio.timeout(None if path in ENDLESS else self.limits.seconds):
                await app(scope, receive, send)

    async def _refuse(self, refusal: RefusedError, answer: _Answer) -> None:
        body = refusal.detail.encode() if refusal.plain else orjson.dumps({"detail": refusal.detail})
        headers = MutableHeaders()
        headers["content-type"] = "text/plain; charset=utf-8" if refusal.plain else "application/json"
        headers["content-length"] = str(len(body))
        for name, value in refusal.headers.items():
            headers[name] = value
        await answer.send({"type": "http.response.start", "status": refusal.status, "headers": headers.raw})
        await answer.send({"type": "http.response.body", "body": body})


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body, read before, once, and then what the client still says."""
    pending = [body]

    async def again() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return again


class _Answer:
    """Passes an answer on and remembers how it began."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.status = 0

    async def send(self, message: Message) -> None:
        """An ASGI send."""
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
        await self._send(message)
