"""Access to the service: with the key, or, without one, for programs of this machine and for no web page.

A page in a browser on this machine can send requests here although it cannot read the answers. With a name of its
own that points here (DNS rebinding) it can read them too. The `Host` header shows such a name, and `Origin` and
`Sec-Fetch-*` show the rest (see `browsers`). Programs send none of these.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from atroposlib.web.browser_headers import SAFE_METHODS, BrowserHeaders
from atroposlib.web.key_attempts import TRIES, TRY_SECONDS, Attempts

READING = frozenset(
    {
        "/", "/info", "/wandb_info", "/status", "/stats", "/metrics", "/latest_example", "/docs", "/redoc", "/openapi.json",
        "/fleet", "/evaluations", "/reference",
    }
)  # fmt: skip
"""Paths whose GET changes nothing: a person may open them in a browser. Every other request counts as a change."""

PAGE = "/ui"
"""What is below it lets people in by itself: by a sign-in, and by links that a browser follows (see ui.web.gatekeeper)."""


class NotAllowedError(Exception):
    """The caller may not do this.

    Attributes:
        headers: of the answer, such as Retry-After.
    """

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers or {}


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call."""

    api_key: str | None = None
    """Bearer token that every request but GET / must carry. Whoever has it may call from anywhere."""
    bound_to: str = ""
    """The address that the service listens on, or the name of it; empty if that is not known."""
    hosts: frozenset[str] = frozenset()
    """Further names, in lower case, by which it may be called when there is no key."""
    reading: frozenset[str] = READING
    """Paths whose GET changes nothing."""
    attempts: Attempts = field(default_factory=lambda: Attempts(time.monotonic, all_tries=None), compare=False)
    """Wrong keys of each address."""

    def check(self, method: str, path: str, headers: Headers, client: str = "") -> bool:
        """Refuse a request that is not allowed.

        Args:
            client: the address that sends the request.

        Returns:
            Whether the client is proven: it has sent the key, or there is none and its request is let in.

        Raises:
            NotAllowedError: says why, and what to do.
        """
        is_page = path == PAGE or path.startswith(f"{PAGE}/")
        if self.api_key is not None:
            return self._check_key(self.api_key, headers, client, is_required=path != "/" and not is_page)
        if is_page:
            return False
        host = headers.get("host", "")
        if host and not self._is_ours(_name(host)):
            raise NotAllowedError(
                403,
                f"the Host {host[:200]!r} is none that this service goes by, and it has no key to know its clients by; "
                "call it by its address, or start it with --allow-host NAME or with a key",
            )
        browser = browser_headers(headers, host)
        reads = method in SAFE_METHODS and path in self.reading
        page = browser.foreign_page() if reads else browser.unproven_change(method, path)
        if page:
            raise NotAllowedError(
                403, f"{page}: a web page may not call a service without a key; use a program, such as curl, or set a key"
            )
        return True

    def _check_key(self, key: str, headers: Headers, client: str, is_required: bool) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            if is_required:
                raise _unauthorized("carries no bearer token" if not token else "carries a wrong bearer token")
            return False
        is_right = hmac.compare_digest(token.encode(), key.encode())
        wait = self.attempts.wait(client)
        # A host that works with the right key goes on if somebody else there guesses. A stranger's guess is not
        # even answered as right while its address has to wait.
        if is_right and (not wait or _is_loopback(client) or self.attempts.is_known(client)):
            self.attempts.succeeded(client)
            return True
        if wait:
            again = int(wait) + 1
            raise NotAllowedError(
                429,
                f"{client or 'this address'} sent {TRIES} wrong keys within {TRY_SECONDS:g} s; try again in {again} s "
                "with the service's key",
                {"Retry-After": str(again)},
            )
        self.attempts.failed(client)
        if is_required:
            raise _unauthorized("carries a wrong bearer token")
        return False

    def _is_ours(self, name: str) -> bool:
        if name in self.hosts or name == "localhost" or name == _name(self.bound_to):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return self._everywhere() and name == socket.gethostname().lower()
        # An address cannot be made to point elsewhere, so it is as good as the socket that it came in by.
        return address.is_loopback or self._everywhere()

    def _everywhere(self) -> bool:
        return self.bound_to in ("", "0.0.0.0", "::")


def _unauthorized(what: str) -> NotAllowedError:
    detail = f"the request {what}; send 'Authorization: Bearer <api key>'"
    return NotAllowedError(401, detail, {"WWW-Authenticate": "Bearer"})


def _is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def _name(host: str) -> str:
    """The name in a Host header or an address, without port and brackets, in lower case."""
    if host.count(":") > 1 and not host.startswith("["):  # a bare IPv6 address
        return host.lower()
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return host.lower()


def browser_headers(headers: Headers, host: str) -> BrowserHeaders:
    """Return what the headers show about a browser."""
    return BrowserHeaders(
        host,
        headers.get("origin"),
        headers.get("sec-fetch-site"),
        headers.get("sec-fetch-mode"),
        headers.get("sec-fetch-dest"),
        headers.get("user-agent", "").startswith("Mozilla/"),
    )
