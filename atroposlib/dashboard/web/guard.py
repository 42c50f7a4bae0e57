"""What every request for the page passes: sign-in, and the headers that tell the browser what it may do."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.dashboard.page import RunPage
from atroposlib.dashboard.web.gatekeeper import API, SIGN_IN
from atroposlib.web.bounded_protocol import prove_connection

logger = logging.getLogger(__name__)

OPEN = (SIGN_IN, "/ui/static/")
"""Paths that show nothing of a run."""
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data: blob:", "font-src 'self'",
        "connect-src 'self'", "manifest-src 'self'", "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'",
    ]
)  # fmt: skip
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


def secured(headers: Mapping[str, str], scope: Scope) -> dict[str, str]:
    """Headers that an answer gets besides its own."""
    kept = {name: value for name, value in HEADERS.items() if name not in headers}
    if "Cache-Control" not in headers:
        kept["Cache-Control"] = "no-store"
    if scope.get("scheme") == "https":
        kept["Strict-Transport-Security"] = "max-age=31536000"
    return kept


class Guard:
    """ASGI middleware around the page."""

    def __init__(self, app: ASGIApp, page: RunPage) -> None:
        self.app, self.page, self.keeper = app, page, page.keeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                given = MutableHeaders(scope=message)
                for name, value in secured(given, scope).items():
                    given[name] = value
            await send(message)

        path: str = scope["path"]
        ends: float | None = float("inf")
        refused = self.keeper.refusal(scope, headers)
        if self.keeper.sessions is not None:
            ends = self.keeper.session_ends(headers)
        scope.setdefault("state", {})
        scope["state"] |= {"session_ends": ends, "signed_in": self.keeper.sessions is not None and ends is not None}
        if not refused and (ends is not None or self.keeper.sessions is None):
            prove_connection(scope)
        if refused:
            await self.page.refuse(scope, 403, refused)(scope, receive, with_headers)
        elif ends is None and not path.startswith(OPEN):
            await self._ask_to_sign_in(scope)(scope, receive, with_headers)
        else:
            try:
                await self.app(scope, receive, with_headers)
            except Exception:
                if started:
                    raise
                logger.exception("the page could not answer %s", path[:200])
                failed = self.page.refuse(scope, 500, "the page has failed here; the log of its service says how")
                await failed(scope, receive, with_headers)

    def _ask_to_sign_in(self, scope: Scope) -> Response:
        path: str = scope["path"]
        if path.startswith(API) or scope["method"] not in ("GET", "HEAD"):
            why = "nobody is signed in, or the sign-in has ended: sign in again, or send 'Authorization: Bearer <api key>'"
            return self.page.refuse(scope, 401, why, sign_in=SIGN_IN)
        query = scope.get("query_string", b"").decode("latin-1")
        wanted = path + (f"?{query}" if query else "")
        return RedirectResponse(f"{SIGN_IN}?next={quote(wanted, safe='/')}", 303)
