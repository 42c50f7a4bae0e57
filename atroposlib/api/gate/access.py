"""Who may call the service: whoever has its key, or, without one, programs of this machine and no web page.

A page in a browser on this machine can send requests here although it cannot read the answers, and with a name of its own
that it lets point here (DNS rebinding) it can read them too. Neither can be had without the browser saying so: a request of
another page carries its `Origin`, or `Sec-Fetch-Site`, or the other name as `Host`. Programs send none of these.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers

READING = frozenset(
    {"/", "/info", "/wandb_info", "/status", "/stats", "/metrics", "/latest_example", "/docs", "/openapi.json", "/fleet"}
)
"""Paths whose GET changes nothing: a person may open them in a browser."""


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
        page = foreign_page(headers, host) or _silent_page(method, path, headers)
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


def foreign_page(headers: Headers, host: str) -> str | None:
    """What shows that a page of another origin sends this."""
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
        return f"the request comes from the Origin {origin[:200]!r}"
    site = headers.get("sec-fetch-site", "none")
    if site not in ("same-origin", "none"):
        return f"the request comes from another page (Sec-Fetch-Site: {site[:200]})"
    return None


def _silent_page(method: str, path: str, headers: Headers) -> str | None:
    """What shows that a page may send this: over plain HTTP to another machine browsers say no Sec-Fetch-Site, and for an
    image no Origin either. All that is left is that it is a browser."""
    browser = headers.get("user-agent", "").startswith("Mozilla/")
    reading = method in ("GET", "HEAD") and path in READING
    if browser and not reading and not ("origin" in headers or "sec-fetch-site" in headers):
        return f"{method} {path} comes from a browser that does not say from which page"
    return None
