"""Access control of the service, its page and the proxy: API key, Host, Origin, and limits on wrong
keys.

With a key, only the key counts. Without one, programs on this machine may call, and web pages may
not:

* A page in a browser on this machine can send requests here, although it cannot read the answers.
* A page with a host name that points here (DNS rebinding) can read them too. The `Host` header
  shows such a name.
* Browsers set `Origin` and `Sec-Fetch-*` themselves, and no page can change them. Programs such as
  curl, aiohttp and requests send none of these headers.

The vLLM server has the same rules for browsers and for wrong keys (vllm_patching/server/browsers.py
and attempts.py). Neither package may import the other, and tests compare the two.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from atroposlib.web.addresses import network_of
from atroposlib.web.refusal import HTTPRefusal

READ_ONLY_PATHS = frozenset(
    {
        "/", "/info", "/wandb_info", "/status", "/stats", "/metrics", "/latest_example", "/docs", "/redoc", "/openapi.json",
        "/fleet", "/evaluations", "/reference",
    }
)  # fmt: skip
"""Paths whose GET changes nothing: a person may open them in a browser. Every other request counts
as a change."""
PAGE = "/ui"
"""The page checks its own requests: it has a sign-in, and links that a browser follows
(dashboard/web/auth.py)."""
SAFE_METHODS = ("GET", "HEAD")
"""Methods that a browser also uses when its user follows a link."""
SCRIPT_MODES = ("cors", "same-origin", "websocket")
"""Values of Sec-Fetch-Mode for requests that a script makes. Links, forms, frames and images have
others."""
SCRIPT_DESTINATIONS = (None, "empty", "websocket")
_SHOWN = 200
"""Characters of a header that a message quotes."""
TRIES, TRY_SECONDS = 10, 60.0
"""Wrong keys that one address may send in this many seconds."""
ALL_TRIES = 300
"""Wrong keys that all addresses together may type into the sign-in in TRY_SECONDS: a person may
have many addresses."""
KNOWN_SECONDS = 3600.0
"""Seconds for which an address that sent the right key is not refused because of wrong ones."""
MAX_ADDRESSES = 10_000


@dataclass(frozen=True, slots=True)
class BrowserHeaders:
    """Headers by which a browser shows who sends a request; None for a header that is missing.

    Attributes:
        host: the Host header.
        origin: the Origin header.
        site, mode, destination: Sec-Fetch-Site, Sec-Fetch-Mode and Sec-Fetch-Dest.
        is_browser: the User-Agent is a browser's.
        origins: further origins that may send requests, as `scheme://host:port`.
    """

    host: str = ""
    origin: str | None = None
    site: str | None = None
    mode: str | None = None
    destination: str | None = None
    is_browser: bool = False
    origins: frozenset[str] = frozenset()

    @classmethod
    def of(cls, headers: Headers) -> BrowserHeaders:
        """Return the headers of a request that show a browser."""
        return cls(
            headers.get("host", ""),
            headers.get("origin"),
            headers.get("sec-fetch-site"),
            headers.get("sec-fetch-mode"),
            headers.get("sec-fetch-dest"),
            headers.get("user-agent", "").startswith("Mozilla/"),
        )

    def foreign_page(self) -> str:
        """Return the evidence that a page of another origin sends this; empty if there is none."""
        if self.origin is not None and self.origin in self.origins:
            return ""
        host = self.host.lower()
        if self.origin is not None and self.origin.lower() not in (
            f"http://{host}",
            f"https://{host}",
        ):
            return f"the request comes from the Origin {self.origin[:_SHOWN]!r}"
        if self.site not in (None, "same-origin", "none"):
            return f"the request comes from another page (Sec-Fetch-Site: {self.site[:_SHOWN]})"
        return ""

    def unproven_change(self, method: str, path: str) -> str:
        """Return why a browser may not send this request, which changes something; empty if it may.

        A browser must prove that a page of ours sends it. A link in an e-mail, a bookmark and a
        typed address prove nothing, and neither does a link or an image that our own page shows.

        Args:
            method: of the request.
            path: shown in the message.
        """
        refused = self.foreign_page()
        if refused:
            return refused
        named = f"{method} {path[:_SHOWN]}"
        is_proven = self.origin is not None or self.site == "same-origin"
        if not is_proven:
            if self.is_browser and self.site is None and self.mode is None:
                return f"{named} comes from a browser that does not say from which page"
            # Some programs (Node's fetch) send Sec-Fetch-Mode: cors, and nothing else.
            from_script = (
                self.mode in (None, *SCRIPT_MODES) and self.destination in SCRIPT_DESTINATIONS
            )
            if not self.is_browser and self.site is None and from_script:
                return ""
            return f"{named} changes something, and the browser {self._shown()}"
        sends_mode = self.mode is not None or self.destination is not None or self.origin is None
        from_script = self.mode in SCRIPT_MODES and self.destination in SCRIPT_DESTINATIONS
        if method in SAFE_METHODS and sends_mode and not from_script:
            return f"{named} changes something, and the browser {self._shown()}"
        return ""

    def _shown(self) -> str:
        named = (
            ("Sec-Fetch-Site", self.site),
            ("Sec-Fetch-Mode", self.mode),
            ("Sec-Fetch-Dest", self.destination),
        )
        sent = ", ".join(f"{name}: {value[:_SHOWN]}" for name, value in named if value is not None)
        return f"follows a link or loads a file ({sent or 'no Sec-Fetch-Site'})"


class Attempts:
    """Wrong keys by address, in bounded memory.

    Args:
        clock: seconds, of a clock that never jumps.
        all_tries: wrong keys that all addresses together may send in TRY_SECONDS; None for no such
            limit.
    """

    def __init__(self, clock: Callable[[], float], all_tries: int | None = ALL_TRIES) -> None:
        self._clock = clock
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()
        self._succeeded: OrderedDict[str, float] = OrderedDict()
        self._all: deque[float] = deque(maxlen=all_tries or 0)

    def wait(self, address: str) -> float:
        """Return the seconds until this address may try again; 0 if it may now."""
        since = self._clock() - TRY_SECONDS
        mine = self._failed.get(network_of(address), deque())
        # Each of them holds no more times than it may.
        full = [times for times in (mine, self._all) if times and len(times) == times.maxlen]
        return max([0.0, *(times[0] - since for times in full)])

    def failed(self, address: str) -> None:
        """Count a wrong key from this address."""
        now, network = self._clock(), network_of(address)
        self._all.append(now)
        self._failed.setdefault(network, deque(maxlen=TRIES)).append(now)
        _make_newest(self._failed, network)

    def succeeded(self, address: str) -> None:
        """Remember that this address sent the right key."""
        network = network_of(address)
        self._succeeded[network] = self._clock()
        _make_newest(self._succeeded, network)

    def is_known(self, address: str) -> bool:
        """Return whether this address sent the right key within KNOWN_SECONDS."""
        at = self._succeeded.get(network_of(address))
        return at is not None and self._clock() - at < KNOWN_SECONDS


def _make_newest(of: OrderedDict[str, Any], network: str) -> None:
    of.move_to_end(network)
    while len(of) > MAX_ADDRESSES:
        of.popitem(last=False)


def host_name(host: str) -> str:
    """Return the name in a Host header or an address: no port, no brackets, lower case.

    Empty if it cannot be read.
    """
    if host.count(":") > 1 and not host.startswith("["):  # a bare IPv6 address
        return host.lower()
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    """Return whether this address or name is one that only this machine can use."""
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def bearer_token(headers: Headers) -> str:
    """Return the bearer token of a request; empty if it has none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def is_same_key(sent: str, key: str) -> bool:
    """Compare keys. The comparison takes as long for a wrong key as for the right one."""
    return hmac.compare_digest(sent.encode(errors="replace"), key.encode())


@dataclass(frozen=True, slots=True)
class Access:
    """Rules for callers of one server.

    Attributes:
        api_key: bearer token that every request but GET / must carry. A caller that has it may call
            from anywhere.
        bound_to: address or name that the server listens on; empty if that is not known.
        hosts: more names of the server, in lower case, for callers without a key.
        reading: paths whose GET changes nothing.
        attempts: wrong keys of each address.
    """

    api_key: str | None = None
    bound_to: str = ""
    hosts: frozenset[str] = frozenset()
    reading: frozenset[str] = READ_ONLY_PATHS
    attempts: Attempts = field(
        default_factory=lambda: Attempts(time.monotonic, all_tries=None), compare=False
    )

    def check(self, method: str, path: str, headers: Headers, client: str = "") -> bool:
        """Refuse a request that is not allowed.

        Args:
            method: of the request.
            path: of the request.
            headers: of the request.
            client: address that sent the request.

        Returns:
            True if the client is proven: it has sent the key, or the server has none and lets the
            request in.

        Raises:
            HTTPRefusal: the request is not allowed; the detail gives the reason and the remedy.
        """
        is_page = path == PAGE or path.startswith(f"{PAGE}/")
        if self.api_key is not None:
            return self._check_key(
                self.api_key, headers, client, is_required=path != "/" and not is_page
            )
        if is_page:
            return False
        host = headers.get("host", "")
        if host and not self._is_ours(host_name(host)):
            raise HTTPRefusal(
                403,
                f"the Host {host[:_SHOWN]!r} is none that this service goes by, and it has no key to know its clients by; "
                "call it by its address, or start it with --allow-host NAME or with a key",
            )
        browser = BrowserHeaders.of(headers)
        reads = method in SAFE_METHODS and path in self.reading
        page = browser.foreign_page()
        if not reads:
            page = browser.unproven_change(method, path)
        if page:
            raise HTTPRefusal(
                403,
                f"{page}: a web page may not call a service without a key; use a program, such as curl, or set a key",
            )
        return True

    def _check_key(self, key: str, headers: Headers, client: str, is_required: bool) -> bool:
        token = bearer_token(headers)
        if not token:
            if is_required:
                raise _unauthorized("carries no bearer token")
            return False
        wait = self.attempts.wait(client)
        # If a host works with the right key, it goes on although another program there guesses. A
        # right guess of a stranger is not answered as right while the stranger's address has to
        # wait.
        if is_same_key(token, key) and (
            not wait or is_loopback(client) or self.attempts.is_known(client)
        ):
            self.attempts.succeeded(client)
            return True
        if wait:
            again = int(wait) + 1
            raise HTTPRefusal(
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
        if not name:
            return False
        if name in self.hosts or name == "localhost" or name == host_name(self.bound_to):
            return True
        listens_everywhere = self.bound_to in ("", "0.0.0.0", "::")
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return listens_everywhere and name == socket.gethostname().lower()
        # An address cannot be made to point elsewhere, so it is as good as the socket that received
        # the request.
        return address.is_loopback or listens_everywhere


def _unauthorized(reason: str) -> HTTPRefusal:
    detail = f"the request {reason}; send 'Authorization: Bearer <api key>'"
    return HTTPRefusal(401, detail, {"WWW-Authenticate": "Bearer"})
