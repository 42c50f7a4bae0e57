"""Who may see the page.

With a key: whoever has signed in, or sends the key as programs do. Without one: this machine alone, by a name of its own. A
name of somebody else's that points here (DNS rebinding) is refused, and so is what another page sends; a link that a person
follows there is not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import Scope

from atroposlib.dashboard.web.sessions import SESSION_SECONDS, Sessions
from atroposlib.web.access import SAFE_METHODS, Attempts, BrowserHeaders, host_name, is_loopback

PREFIX = "/ui"
SIGN_IN = "/ui/sign-in"
API = "/ui/api/"


@dataclass(slots=True)
class Gatekeeper:
    """Who may see the page.

    Attributes:
        sessions: of those who signed in; None where there is no key.
        hosts: names, in lower case, by which the page may be called besides those of this machine, where there is no key.
    """

    sessions: Sessions | None = None
    hosts: frozenset[str] = frozenset()
    attempts: Attempts = field(default_factory=lambda: Attempts(time.monotonic))

    @classmethod
    def of_key(cls, api_key: str | None, hosts: frozenset[str] = frozenset(), seconds: float = SESSION_SECONDS) -> Gatekeeper:
        """The gatekeeper of a service with this key, or without one."""
        return cls(Sessions(api_key, time.time, seconds) if api_key else None, hosts)

    def session_ends(self, headers: Headers) -> float | None:
        """When the caller's sign-in ends, infinity if it sends the key itself; None if it is not signed in."""
        if self.sessions is None:
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.sessions.is_key(token.strip()):
            return float("inf")
        return self.sessions.ends(self.cookie(headers))

    def cookie(self, headers: Headers) -> str | None:
        """The caller's cookie, if it has one."""
        return None if self.sessions is None else cookie_parser(headers.get("cookie", "")).get(self.sessions.cookie)

    def refusal(self, scope: Scope, headers: Headers) -> str:
        """Why this request is not answered at all, signed in or not; empty if it is."""
        host = headers.get("host", "")
        if self.sessions is None:
            if not all(is_loopback(address) for address in ((scope.get("client") or ("",))[0], *forwarded(headers))):
                return (
                    "without a key this page answers this machine alone: start the service with a key (ROLLOUT_API_KEY, or "
                    "--api-key-file), or come by ssh -L PORT:localhost:PORT"
                )
            name = host_name(host)
            if name not in self.hosts and not is_loopback(name):
                return (
                    f"the Host {host[:200]!r} is no name of this machine alone; open the page at http://127.0.0.1:PORT/ui, or "
                    "start the service with --allow-host NAME or with a key"
                )
        return _foreign(scope, headers)


def forwarded(headers: Headers) -> list[str]:
    """Where a request has been before, as a proxy says, or whoever asks: good for doubt, and not for trust."""
    listed = [part.strip() for value in headers.getlist("x-forwarded-for") for part in value.split(",")]
    return listed + headers.getlist("forwarded")


def _foreign(scope: Scope, headers: Headers) -> str:
    """Return why a browser may not send this; empty if it may. A link to a part of the page may be followed."""
    reads = scope["method"] in SAFE_METHODS
    if (
        reads
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest", "document") == "document"
        and not scope["path"].startswith(API)
    ):
        return ""
    browser = BrowserHeaders.of(headers)
    found = browser.foreign_page() if reads else browser.unproven_change(scope["method"], scope["path"])
    return f"{found}: only this page itself may send it; a proxy must hand on the Host" if found else ""


def safe_next(wanted: str) -> str:
    """Where to go after the sign-in: a path of this page, never another site."""
    parts = urlsplit(wanted)
    ours = wanted == PREFIX or wanted.startswith((f"{PREFIX}/", f"{PREFIX}?"))
    fine = ours and not parts.scheme and not parts.netloc and "\\" not in wanted and wanted.isprintable()
    return wanted if fine and not wanted.startswith(SIGN_IN) and ".." not in parts.path.split("/") else PREFIX
