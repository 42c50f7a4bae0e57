"""Access to the service: with the key, or, without one, for programs of this machine and for no web page.

A page in a browser on this machine can send requests here although it cannot read the answers. With a name of its
own that points here (DNS rebinding) it can read them too. The `Host` header shows such a name, and `Origin` and
`Sec-Fetch-*` show the rest (see `browsers`). Programs send none of these.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from atroposlib.api.gate.browsers import SAFE_METHODS, BrowserHeaders

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
    """The caller may not do this."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


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

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Refuse whoever may not call.

        Raises:
            NotAllowedError: says why, and what to do.
        """
        if path == PAGE or path.startswith(f"{PAGE}/"):
            return
        if self.api_key is not None:
            if path != "/":
                self._check_key(self.api_key, headers)
            return
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

    def _check_key(self, key: str, headers: Headers) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), key.encode()):
            what = "carries no bearer token" if not token else "carries a wrong bearer token"
            raise NotAllowedError(401, f"the request {what}; send 'Authorization: Bearer <api key>'")

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
