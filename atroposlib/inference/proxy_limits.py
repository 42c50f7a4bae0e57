"""What every request to the managed-server proxy passes first: who may call, and how large its body may be."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from atroposlib.web.access import Access, NotAllowedError
from atroposlib.web.bounded_protocol import prove_connection
from atroposlib.web.memory_budget import TINY_BODY, WAIT_SECONDS, Budget, NoSpaceError, Share
from atroposlib.web.middleware import replayed


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """What callers may ask of a proxy.

    Attributes:
        access: who may call.
        max_sessions: most sessions at once.
        session_seconds: how long a session is kept without a request.
        max_body: most bytes of a request.
        body_seconds: how long the body of a request may take to arrive.
    """

    access: Access = field(default_factory=Access)
    max_sessions: int = 1024
    session_seconds: float = 3600.0
    max_body: int = 16 << 20
    body_seconds: float = 60.0


class TooMuch(Exception):
    """A body that is too large, too slow, or that ended before its end."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


MOST_BODIES = 256 << 20
"""Bytes of all bodies of more than TINY_BODY bytes that a proxy works on at a time."""


class Door:
    """ASGI middleware. The route behind it gets the whole body at once."""

    def __init__(self, app: ASGIApp, limits: ProxyLimits):
        self.app, self.limits = app, limits
        self.budget = Budget(max(MOST_BODIES, limits.max_body), "bytes of bodies")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or say why not."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        share = Share()
        try:
            client = (scope.get("client") or ("",))[0]
            proven = self.limits.access.check(scope["method"], scope["path"], headers, client)
            if proven:
                prove_connection(scope)
            body = await self._body(headers, receive, share, self.limits.max_body if proven else TINY_BODY)
            await self.app(scope, replayed(body, receive), send)
        except NotAllowedError as error:
            await refuse(send, error.status, error.detail, error.headers)
        except TooMuch as error:
            await refuse(send, error.status, str(error))
        except NoSpaceError as error:
            await refuse(send, 503, str(error), {"Retry-After": "2"})
        finally:
            share.give_all()

    async def _body(self, headers: Headers, receive: Receive, share: Share, most: int) -> bytes:
        too_large = TooMuch(413, f"the body is larger than {most} bytes: shorten the messages, or raise --max-body-bytes")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > most:
            raise too_large
        expected = int(length) if length.isdigit() else most
        if expected > TINY_BODY:
            await share.take(self.budget, expected, WAIT_SECONDS)
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise TooMuch(400, "the client went away in the middle of its body")
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise TooMuch(408, f"the body did not arrive within {self.limits.body_seconds:g} s") from None


def error_body(status: int, message: str, kind: str = "invalid_request_error") -> dict[str, dict[str, object]]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "code": status}}


async def refuse(send: Send, status: int, message: str, more: Mapping[str, str] | None = None) -> None:
    """Answer without calling the proxy. The rest of the body is not read, so the connection ends.

    Args:
        more: headers of the answer, such as Retry-After.
    """
    body = orjson.dumps(error_body(status, message))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    headers += [(name.lower().encode(), value.encode()) for name, value in (more or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
