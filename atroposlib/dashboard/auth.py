"""Sign-in of the page, and the checks that every request for it passes.

With a key, the page answers browsers that have signed in and programs that send the key. Without
one, it answers this machine alone, by a name of its own. Two kinds of requests are refused in both
cases. One has a host name that was made to point here (DNS rebinding). The other is sent by another
page. A link to the page may be followed.

The sign-in is a cookie with its end and a number. It is signed with a key that is derived from the
API key and a random salt. It ends at its time, and it is worthless after the API key or the salt
has changed. A file holds the salt and the cookies that were signed out, so that both survive a
restart. If the file is lost, all sign-ins end.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, Field
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.utils.files import cannot_write, write_whole
from atroposlib.web.middleware import (
    SAFE_METHODS,
    Attempts,
    BrowserHeaders,
    StatusRecorder,
    bearer_token,
    fault_of,
    host_name,
    is_loopback,
    is_same_key,
    prove_connection,
)

logger = logging.getLogger(__name__)

PREFIX = "/ui"
SIGN_IN = "/ui/sign-in"
API = "/ui/api/"
PUBLIC_PATHS = (SIGN_IN, "/ui/static/")
"""Paths that show nothing of a run."""
SESSION_SECONDS = 12 * 3600.0
MAX_ENDED = 10_000
"""Signed-out sessions that are remembered. At this number the service forgets the sessions that
would have ended by now. If that does not make room, all sign-ins end."""
STATE_FILE = "sessions.json"
_COOKIE = re.compile(
    r"(?P<signed>1\.(?P<ends>[0-9a-f]{1,12})\.(?P<number>[0-9a-f]{32}))\.(?P<signature>[0-9a-f]{64})"
)
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data: blob:", "font-src 'self'",
        "connect-src 'self'", "manifest-src 'self'", "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'",
    ]
)  # fmt: skip
SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
"""Headers that each answer gets unless it has its own."""


class _State(BaseModel):
    """The file of the sign-ins: the salt, and the end of each session that was signed out."""

    salt: str = Field(pattern=r"^[0-9a-f]{32}$")
    ended: dict[str, float]


class Sessions:
    """The sign-ins of one service.

    Args:
        api_key: of the service.
        clock: Unix time.
        seconds: time for which a sign-in lasts.
    """

    def __init__(
        self, api_key: str, clock: Callable[[], float], seconds: float = SESSION_SECONDS
    ) -> None:
        self.seconds, self._clock = seconds, clock
        self._api_key = api_key
        self._path: Path | None = None
        self._ended: dict[str, float] = {}
        self._use_salt(secrets.token_hex(16))

    def _use_salt(self, salt: str) -> None:
        self._salt = salt
        self._secret = hmac.digest(
            self._api_key.encode(), b"lockstep: sessions of the page " + salt.encode(), "sha256"
        )
        # Services on other ports of a host see each other's cookies, so the cookie of each has its
        # own name.
        self.cookie = f"lockstep_ui_{hashlib.sha256(self._secret).hexdigest()[:8]}"

    def keep_in(self, path: Path) -> None:
        """Continue the sessions of an earlier process, and keep them in this file for the next one.

        A file that cannot be read, or holds something else, is replaced: all earlier sign-ins end.
        """
        self._path = path
        try:
            state = _State.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            self._save()
        except (OSError, ValueError) as error:
            logger.warning(
                "%s cannot be read (%s): all users have to sign in to the page again",
                path,
                fault_of(error),
            )
            self._save()
        else:
            self._ended = state.ended
            self._use_salt(state.salt)

    def _save(self) -> None:
        if self._path is None:
            return
        content = _State(salt=self._salt, ended=self._ended).model_dump_json().encode()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, content, mode=0o600)
        except OSError as error:
            reason = cannot_write(self._path, error, len(content))
            logger.warning(
                "%s; make room there: all sign-ins to the page end when this service restarts",
                reason,
            )
            # Without the file the next process has another salt, so that no signed-out cookie is
            # good again.
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def is_key(self, sent: str) -> bool:
        """Return whether this is the service's key."""
        return is_same_key(sent, self._api_key)

    def begin(self) -> str:
        """Return the cookie of a new session."""
        signed = f"1.{int(self._clock() + self.seconds):x}.{secrets.token_hex(16)}"
        return f"{signed}.{self._signature(signed)}"

    def ends(self, cookie: str | None) -> float | None:
        """Return the Unix time at which the session of this cookie ends; None if it is over, or the
        cookie is not ours.
        """
        session = self._session(cookie)
        return session and session[1]

    def end(self, cookie: str | None) -> None:
        """Sign out: no copy of the cookie is good any more, not even after a restart of the
        service.
        """
        session = self._session(cookie)
        if session is None:
            return
        number, ends = session
        now = self._clock()
        # Nothing is forgotten earlier: if the clock is ahead, a forgotten cookie would be good
        # again later.
        if len(self._ended) >= MAX_ENDED:
            self._ended = {ended: at for ended, at in self._ended.items() if at >= now}
        if len(self._ended) < MAX_ENDED:
            self._ended[number] = ends
        else:
            self._ended = {}
            self._use_salt(secrets.token_hex(16))
        self._save()

    def _session(self, cookie: str | None) -> tuple[str, float] | None:
        """Return number and end of a session that has not ended."""
        parts = _COOKIE.fullmatch(cookie or "")
        if parts is None or not hmac.compare_digest(
            parts["signature"], self._signature(parts["signed"])
        ):
            return None
        ends = float(int(parts["ends"], 16))
        if self._clock() >= ends or parts["number"] in self._ended:
            return None
        return parts["number"], ends

    def _signature(self, signed: str) -> str:
        return hmac.digest(self._secret, signed.encode(), "sha256").hex()


@dataclass(slots=True)
class PageAuth:
    """Access rules of the page.

    Attributes:
        sessions: the sign-ins; None for a page without a key.
        hosts: more names of the page, in lower case, for a page without a key.
        attempts: wrong keys in the sign-in.
    """

    sessions: Sessions | None = None
    hosts: frozenset[str] = frozenset()
    attempts: Attempts = field(default_factory=lambda: Attempts(time.monotonic))

    @classmethod
    def of_key(
        cls,
        api_key: str | None,
        hosts: frozenset[str] = frozenset(),
        seconds: float = SESSION_SECONDS,
    ) -> PageAuth:
        """Return the rules of a service with this key, or without one."""
        return cls(Sessions(api_key, time.time, seconds) if api_key else None, hosts)

    def session_ends(self, headers: Headers) -> float | None:
        """Return the Unix time at which the caller's sign-in ends; None if it is not signed in.

        The time is infinite for a program that sends the key, and for a page without a key.
        """
        if self.sessions is None or self.sessions.is_key(bearer_token(headers)):
            return float("inf")
        return self.sessions.ends(self.cookie(headers))

    def cookie(self, headers: Headers) -> str | None:
        """Return the caller's cookie, if it has one."""
        if self.sessions is None:
            return None
        return cookie_parser(headers.get("cookie", "")).get(self.sessions.cookie)

    def refusal(self, scope: Scope, headers: Headers) -> str:
        """Return why this request is refused, signed in or not; empty if it is not."""
        if self.sessions is None:
            callers = ((scope.get("client") or ("",))[0], *forwarded(headers))
            if not all(is_loopback(address) for address in callers):
                return (
                    "without a key this page answers this machine alone: start the service with a key (ROLLOUT_API_KEY, or "
                    "--api-key-file), or come by ssh -L PORT:localhost:PORT"
                )
            host = headers.get("host", "")
            name = host_name(host)
            if name not in self.hosts and not is_loopback(name):
                return (
                    f"the Host {host[:200]!r} is not a name of this machine alone. Open the page "
                    "at http://127.0.0.1:PORT/ui, or start the service with --allow-host NAME "
                    "or with a key"
                )
        return foreign_page(scope, headers)


def forwarded(headers: Headers) -> list[str]:
    """Return the addresses that sent a request before, as its headers list them: a reason for
    doubt, never for trust.
    """
    listed = [
        part.strip() for value in headers.getlist("x-forwarded-for") for part in value.split(",")
    ]
    return listed + headers.getlist("forwarded")


def foreign_page(scope: Scope, headers: Headers) -> str:
    """Return why a browser may not send this request; empty if it may.

    A link to a part of the page may be followed.
    """
    method, path = scope["method"], scope["path"]
    follows_link = (
        headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest", "document") == "document"
    )
    if method in SAFE_METHODS and follows_link and not path.startswith(API):
        return ""
    browser = BrowserHeaders.of(headers)
    reason = browser.foreign_page()
    if method not in SAFE_METHODS:
        reason = browser.unproven_change(method, path)
    return reason and f"{reason}: only this page itself may send it; a proxy must hand on the Host"


def safe_next(target: str) -> str:
    """Return where the browser goes after the sign-in: a path of this page, never another site."""
    parts = urlsplit(target)
    if (
        not (target == PREFIX or target.startswith((f"{PREFIX}/", f"{PREFIX}?")))
        or parts.scheme
        or parts.netloc
        or "\\" in target
        or not target.isprintable()
        or target.startswith(SIGN_IN)
        or ".." in parts.path.split("/")
    ):
        return PREFIX
    return target


class PageAuthMiddleware:
    """ASGI middleware around the page: access rules, sign-in, and the headers that limit what the
    browser does.

    Args:
        app: the page.
        auth: its access rules.
        refuse: makes the answer from scope, status, text and, for scripts, more fields.
    """

    def __init__(self, app: ASGIApp, auth: PageAuth, refuse: Callable[..., Response]) -> None:
        self.app, self.auth, self.refuse = app, auth, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if scope.get("scheme") == "https":
                    headers["Strict-Transport-Security"] = "max-age=31536000"
            await send(message)

        answer = StatusRecorder(send_secured)
        try:
            await (self._refusal(scope) or self.app)(scope, receive, answer.send)
        except Exception:
            if answer.started:
                raise
            logger.exception("the page could not answer %s", scope["path"][:200])
            failed = self.refuse(scope, 500, "the page has failed here; see the log of its service")
            await failed(scope, receive, answer.send)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a request that the page does not get; None if it gets the request."""
        headers = Headers(scope=scope)
        is_signed_in = self.auth.session_ends(headers) is not None
        scope.setdefault("state", {})["signed_in"] = self.auth.sessions is not None and is_signed_in
        reason = self.auth.refusal(scope, headers)
        if reason:
            return self.refuse(scope, 403, reason)
        if is_signed_in:
            prove_connection(scope)
        if is_signed_in or scope["path"].startswith(PUBLIC_PATHS):
            return None
        return self._sign_in_first(scope)

    def _sign_in_first(self, scope: Scope) -> Response:
        path: str = scope["path"]
        if path.startswith(API) or scope["method"] not in SAFE_METHODS:
            why = (
                "no user is signed in, or the sign-in has ended: sign in again, or send "
                "'Authorization: Bearer <api key>'"
            )
            return self.refuse(scope, 401, why, sign_in=SIGN_IN)
        query = scope.get("query_string", b"").decode("latin-1")
        target = f"{path}?{query}".removesuffix("?")
        return RedirectResponse(f"{SIGN_IN}?next={quote(target, safe='/')}", 303)
