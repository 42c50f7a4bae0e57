"""Access to this server: the API key, and without a key the caller's machine and the names that a
browser used.

With a key, everything but the monitoring paths needs it. Without one

* a request that another web page sent is refused, and so is a change for which a browser followed a
  link (see `browsers`);
* a request is refused if its Host is a name that a stranger may have pointed at this machine;
* every machine that reaches the port may look and sample, as with `vllm serve`. Routes that pause
  the engine or change weights, adapters or caches answer this machine alone. The routes for other
  machines are listed; all other routes answer this machine alone.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse

from vllm_patching.server.browsers import SAFE_METHODS, BrowserHeaders

TRIES, TRY_SECONDS = 10, 60.0
"""Wrong keys that one address may send in this many seconds."""
KNOWN_SECONDS = 3600.0
"""Seconds for which an address that sent the right key is not refused because of wrong ones."""
MOST_ADDRESSES = 10_000


def network_of(address: str) -> str:
    """Return the address, or the /64 network of an IPv6 address: one host may use any address in
    it.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = getattr(parsed, "ipv4_mapped", None)
    if parsed.version == 4 or mapped is not None:
        return str(mapped or parsed)
    return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))


class Attempts:
    """Counts wrong keys by address, in bounded memory.

    Args:
        clock: seconds, of a clock that never jumps.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()
        self._succeeded: OrderedDict[str, float] = OrderedDict()

    def wait(self, address: str) -> float:
        """Return the seconds until this address may try again; 0 if it may now."""
        times = self._failed.get(network_of(address), deque())
        return max(0.0, times[0] - (self._clock() - TRY_SECONDS)) if len(times) >= TRIES else 0.0

    def failed(self, address: str) -> None:
        """Count a wrong key from this address."""
        network = network_of(address)
        self._failed.setdefault(network, deque(maxlen=TRIES)).append(self._clock())
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
    while len(of) > MOST_ADDRESSES:
        of.popitem(last=False)


MONITORING = frozenset(
    {"/health", "/health_generate", "/metrics", "/metrics/", "/ping", "/version", "/weights"}
)
"""Needs no key: neither a prompt nor a weight can be read there."""
READING = MONITORING | {
    "/bridge/info", "/bridge/state", "/deterministic", "/docs", "/load", "/lora/info", "/lora/status", "/openapi.json",
    "/redoc", "/sampling", "/v1/models", "/vocabulary",
}  # fmt: skip
"""Paths whose GET changes nothing: a person may open them in a browser. Every other request counts
as a change."""
FROM_AFAR = MONITORING | {
    "/deterministic", "/detokenize", "/generate", "/inference/v1/generate", "/invocations", "/load", "/sampling", "/tokenize",
    "/vocabulary",
    "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/embeddings", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/models", "/v1/realtime", "/v1/responses",
}  # fmt: skip
"""Routes that answer other machines when there is no key: looking and sampling."""
PROVE = "lockstep.prove"
"""The ASGI extension by which the server's connections learn which of them belong to callers that
are known."""
_SHOWN = 80
"""Characters of a header that a message quotes."""


@dataclass(frozen=True)
class Asked:
    """One request, as far as it matters here.

    Attributes:
        path: as the routes see it, without a prefix that a proxy adds.
        host, origin, fetch_site, fetch_mode, fetch_dest: the headers Host, Origin and Sec-Fetch-*;
            None for a missing one.
        browser: what asks calls itself one.
        token: of `Authorization: Bearer`; empty if there is none.
        here: it was sent by a process on this machine.
    """

    path: str
    method: str = "GET"
    host: str | None = None
    origin: str | None = None
    fetch_site: str | None = None
    fetch_mode: str | None = None
    fetch_dest: str | None = None
    browser: bool = False
    token: bytes = b""
    here: bool = False


@dataclass(frozen=True)
class Refusal:
    """The answer to a request that is not let in."""

    status: int
    message: str
    headers: dict[str, str] | None = None


@dataclass(frozen=True)
class Door:
    """The requests that a server accepts.

    Attributes:
        keys: any of them is the right one; with none, see the module.
        bound_to: the address on which the server listens, or the name of it; empty for every
            address.
        names: further names by which it may be called, in lower case.
        origins: of web pages that may ask, as `scheme://host:port`.
    """

    keys: tuple[str, ...] = ()
    bound_to: str = ""
    names: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def refusal(self, asked: Asked) -> Refusal | None:
        """Why the request is not let in; None if it is."""
        return self._without_the_key(asked) if self.keys else self._from_elsewhere(asked)

    def knows(self, asked: Asked) -> bool:
        """Return whether the caller has sent a key; without keys, every caller that is let in is
        known.
        """
        return not self.keys or any(
            [hmac.compare_digest(asked.token, key.encode()) for key in self.keys]
        )

    def _without_the_key(self, asked: Asked) -> Refusal | None:
        # A browser asks by OPTIONS, without the key, whether it may send it; no route does anything
        # on OPTIONS.
        if asked.path in MONITORING or asked.method == "OPTIONS":
            return None
        if self.knows(asked):
            return None
        return Refusal(
            401,
            f"{asked.path[:_SHOWN]} needs the server's API key: send `Authorization: Bearer <key>` (trainer and environments "
            "take it from VLLM_API_KEY)",
        )

    def _from_elsewhere(self, asked: Asked) -> Refusal | None:
        if asked.host and not self.is_ours(asked.host):
            return Refusal(
                403,
                f"the Host {asked.host[:_SHOWN]!r} is none that this server goes by, and it has "
                "no key to know its clients by. Call it by its address, or start it with "
                "--allow-host NAME or with VLLM_API_KEY",
            )
        page = self._browser_refusal(asked)
        if page:
            return Refusal(
                403,
                f"{page}: a web page may not call a server without a key. Use a program, start "
                "the server with VLLM_API_KEY, or name the page's origin in --allowed-origins",
            )
        if (
            not asked.here
            and asked.path not in FROM_AFAR
            and not asked.path.startswith("/v1/responses/")
        ):
            return Refusal(
                403,
                f"{asked.path[:_SHOWN]} answers only this machine, since the server was started "
                "without an API key. Set VLLM_API_KEY to the same value for the server and its "
                "clients",
            )
        return None

    def is_ours(self, host: str) -> bool:
        """Return whether a Host header can only come from a client that meant this server.

        A page that was loaded under a name of the attacker's, which then gets this machine's
        address, sends that name. An address cannot be made to point elsewhere, so it is as good as
        the socket that it came in by.
        """
        name, bound = host_name(host), self.bound_to.lower()
        if not name:
            return False
        if name in self.names or name in ("localhost", bound):
            return True
        everywhere = bound in ("", "0.0.0.0", "::")
        if is_address(name):
            return everywhere or is_loopback(name)
        return everywhere and name == socket.gethostname().lower()

    def _browser_refusal(self, asked: Asked) -> str:
        """Return why a browser may not send this request; empty if it may."""
        browser = BrowserHeaders(
            asked.host or "",
            asked.origin,
            asked.fetch_site,
            asked.fetch_mode,
            asked.fetch_dest,
            asked.browser,
            self.origins,
        )
        if asked.method in SAFE_METHODS and asked.path in READING:
            return browser.foreign_page()
        return browser.unproven_change(asked.method, asked.path)


def make_door(args: argparse.Namespace, environment: MutableMapping[str, str]) -> Door:
    """The door that a server's flags and variables ask for, with a word on standard output where
    that deserves one.

    Args:
        args: vLLM's and --allow-host. Afterwards they hold no key: vLLM writes into its log which
            flags it was given.
        environment: its VLLM_API_KEY counts where --api-key is not given, and is removed where it
            is.
    """
    keys = args.api_key or [environment.get("VLLM_API_KEY", "")]
    if args.api_key:
        _say("--api-key is shown by `ps` to every user of this machine: set VLLM_API_KEY instead")
        args.api_key = None
        environment.pop("VLLM_API_KEY", None)
    names = frozenset(name.lower().removesuffix(".") for name in args.allow_host)
    door = Door(
        tuple(filter(None, keys)), args.host or "", names, frozenset(args.allowed_origins) - {"*"}
    )
    if not door.keys and not args.uds and not is_loopback(door.bound_to):
        _say(
            f"No VLLM_API_KEY: all that reach port {args.port} may sample. Routes that change the "
            "server (/bridge, /lora and all else that is not sampling) answer this machine "
            "alone. --host 127.0.0.1 keeps others out altogether"
        )
    return door


def _say(text: str) -> None:
    print(f"[vLLM Patch] {text}", flush=True)


def host_name(host: str) -> str:
    """Reduce `Example.com.:9001` to `example.com`, `[::1]:9001` to `::1`; empty if this is not a
    host with or without a port.
    """
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises for an invalid port
    except ValueError:
        return ""
    if parts.netloc != host or "@" in host or parts.hostname is None:
        return ""
    return parts.hostname.removesuffix(".")


def is_address(name: str) -> bool:
    """Return whether it is an IP address, which needs no name server."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Return whether it is localhost or an address that means the machine on which it is used."""
    return name == "localhost" or (is_address(name) and _plain(name).is_loopback)


def asked_of(scope: Mapping[str, Any]) -> Asked:
    """The parts of an ASGI scope that decide about access."""
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        # If a header comes twice, both values count: the result names nothing that is let in.
        if name in headers:
            value = headers[name] + b", " + value
        headers[name] = value
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")

    def text(name: bytes) -> str | None:
        return headers[name].decode("latin-1") if name in headers else None

    forwarded = b"forwarded" in headers or b"x-forwarded-for" in headers
    return Asked(
        path=_without_prefix(scope["path"], scope.get("root_path", "")),
        method=scope.get("method", "GET"),
        host=text(b"host"),
        origin=text(b"origin"),
        fetch_site=text(b"sec-fetch-site"),
        fetch_mode=text(b"sec-fetch-mode"),
        fetch_dest=text(b"sec-fetch-dest"),
        browser=headers.get(b"user-agent", b"").startswith(b"Mozilla/"),
        token=token.strip() if scheme.lower() == b"bearer" else b"",
        here=not forwarded and is_from_here(scope.get("client"), scope.get("server")),
    )


def is_from_here(client: tuple[str, int] | None, server: tuple[str, int | None] | None) -> bool:
    """Return whether a connection comes from a process on this machine.

    Args:
        client: address and port of the other end; None over a Unix socket, and where a connection
            was reset before it was read.
        server: our end; a path and None, or nothing, for a Unix socket.
    """
    if client is None:
        return server is None or server[1] is None
    if not is_address(client[0]):
        return False
    # Who asks by the machine's own address comes from it: the kernel drops what arrives from
    # outside under that sender.
    same = server is not None and is_address(server[0]) and _plain(client[0]) == _plain(server[0])
    return same or _plain(client[0]).is_loopback


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IPv4 address also where a socket for both kinds shows it as ::ffff:a.b.c.d."""
    parsed = ipaddress.ip_address(address)
    return getattr(parsed, "ipv4_mapped", None) or parsed


def _without_prefix(path: str, root: str) -> str:
    """As the routes take it off: only where it is followed by a slash, or by nothing."""
    rest = path.removeprefix(root)
    return rest if root and rest != path and (not rest or rest.startswith("/")) else path


class AskAtTheDoor:
    """ASGI middleware in front of all others.

    A WebSocket that is not let in is closed before it is accepted.
    """

    def __init__(self, app: Any, door: Door, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._door, self._attempts = app, door, Attempts(clock)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection event."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        asked = asked_of(scope)
        refusal = self._limited(asked, scope) or self._door.refusal(asked)
        if refusal is None:
            if PROVE in scope.get("extensions", {}) and self._door.knows(asked):
                scope["extensions"][PROVE][
                    "prove"
                ]()  # the connection is kept when others are too many
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send(
                {"type": "websocket.close", "code": 1008, "reason": refusal.message[:120]}
            )
        return await JSONResponse({"error": refusal.message}, refusal.status, refusal.headers)(
            scope, receive, send
        )

    def _limited(self, asked: Asked, scope: Mapping[str, Any]) -> Refusal | None:
        """Count a key that a request carries, and refuse one from an address that sent too many
        wrong ones.
        """
        if not self._door.keys or not asked.token:
            return None
        client = scope["client"][0] if scope.get("client") else ""
        wait, is_right = self._attempts.wait(client), self._door.knows(asked)
        # A host that uses the right key is not blocked if another process there guesses. A
        # stranger's guess is not even answered as right while its address has to wait.
        if is_right and (
            not wait
            or self._attempts.is_known(client)
            or is_from_here(scope.get("client"), scope.get("server"))
        ):
            self._attempts.succeeded(client)
            return None
        if not wait:
            self._attempts.failed(client)
            return None
        again = int(wait) + 1
        return Refusal(
            429,
            f"{client or 'this address'} sent {TRIES} wrong keys within {TRY_SECONDS:g} s; try again in {again} s with the "
            "server's key (VLLM_API_KEY)",
            {"Retry-After": str(again)},
        )
