"""The checks and limits of every request to the service, its page and the proxy.

In this order: refusals and their forms, access, bodies and their memory, and the middleware that
puts them together. That one has the time of answers, gzip in both directions, and one report for
each answer.

**Access.** With a key, only the key counts. Without one, programs on this machine may call, and web
pages may not:

* A page in a browser on this machine can send requests here, although it cannot read the answers.
* A page with a host name that points here (DNS rebinding) can read them too. The `Host` header
  shows such a name.
* Browsers set `Origin` and `Sec-Fetch-*` themselves, and no page can change them. Programs such as
  curl, aiohttp and requests send none of these headers.

The vLLM server has the same rules for browsers and for wrong keys (vllm_patching/server/browsers.py
and attempts.py). Neither package may import the other, and tests compare the two.
"""

from __future__ import annotations

import asyncio
import gzip
import hmac
import ipaddress
import logging
import re
import socket
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.web.addresses import network_of


class HTTPRefusal(Exception):
    """A request that is refused. `RequestLimitsMiddleware` turns it into the answer.

    Attributes:
        headers: of the answer, such as Retry-After.
        plain: the answer is text in place of JSON.
    """

    def __init__(
        self, status: int, detail: str, headers: dict[str, str] | None = None, plain: bool = False
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers, self.plain = status, detail, headers or {}, plain


def detail_answer(refusal: HTTPRefusal) -> Response:
    """Return the answer in FastAPI's form."""
    if refusal.plain:
        return PlainTextResponse(refusal.detail, refusal.status, refusal.headers)
    body = orjson.dumps({"detail": refusal.detail})
    return Response(body, refusal.status, refusal.headers, "application/json")


def fault_of(error: Exception) -> str:
    """Return an error in one line; of a record that pydantic refuses, the first fault and its field.

    The input is left out, for it may be long or secret.
    """
    if not isinstance(error, ValidationError):
        return " ".join(f"{type(error).__name__}: {error}".split())
    fault = error.errors(include_input=False, include_url=False)[0]
    return ": ".join([".".join(map(str, fault["loc"])) or error.title, fault["msg"]])


def openai_error(status: int, message: str) -> dict[str, dict[str, Any]]:
    """Return the body of an error in OpenAI's form."""
    kind = {429: "rate_limit_error"}.get(status, "invalid_request_error")
    if status >= 500:
        kind = "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}


def openai_answer(refusal: HTTPRefusal) -> Response:
    """Return the answer in OpenAI's form."""
    body = orjson.dumps(openai_error(refusal.status, refusal.detail))
    return Response(body, refusal.status, refusal.headers, "application/json")


# ---- access ----

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
(dashboard/auth.py)."""
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
        typed address prove nothing. Nor does a link or an image that our own page shows.

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
                return f"{named} comes from a browser that does not name its page"
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
                f"the Host {host[:_SHOWN]!r} is none that this service goes by, and it has no "
                "key to know its clients by. Call it by its address, or start it with "
                "--allow-host NAME or with a key",
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


logger = logging.getLogger(__name__)

# ---- bodies and their memory ----

SMALL_BODY = 1 << 20
"""Bytes of the largest body that never waits behind large ones."""
TINY_BODY = 1 << 16
"""Bytes of the largest body that never waits: the bound on connections bounds these too."""
SMALL_BUDGET = 128 << 20
"""Bytes of all small bodies that are worked on at a time."""
WAIT_SECONDS = 20.0
"""Time after which a request that waits for space is refused."""
ANSWERS_AT_ONCE = 8
"""Large answers of one path that are made or sent at a time."""
PAGE_ANSWERS_AT_ONCE = 32
"""Answers to open pages that are made or sent at a time, event streams left out."""


class NoSpaceError(Exception):
    """A request waited for space for too long. The message is for the client."""


class Budget:
    """A number of bytes, or of other units, for all requests together.

    Args:
        most: units in all. A request that asks for more gets all of them.
        name: of the units, for messages.
    """

    def __init__(self, most: int, name: str) -> None:
        self.most, self.name = most, name
        self.taken = 0
        self._turn, self._given = asyncio.Lock(), asyncio.Event()

    async def take(self, count: int, seconds: float = WAIT_SECONDS) -> int:
        """Wait for space, and return the units that were taken, to be given back.

        Raises:
            NoSpaceError: there was no space for so many seconds.
        """
        count = min(count, self.most)
        if self.taken + count <= self.most and not self._turn.locked():
            self.taken += count
            return count
        try:
            # The lock is given in order: no other request overtakes one that waits for space.
            async with asyncio.timeout(seconds), self._turn:
                while self.taken + count > self.most:
                    self._given.clear()
                    await self._given.wait()
                self.taken += count
        except TimeoutError:
            raise NoSpaceError(
                f"{self.taken} of {self.most} {self.name} are in work and this request needs {count}; it has waited for "
                f"{seconds:g} s: try again"
            ) from None
        return count

    def give(self, count: int) -> None:
        """Give units back."""
        self.taken -= count
        self._given.set()


@dataclass(slots=True)
class Share:
    """The part of the budgets that one request has."""

    _held: dict[str, tuple[Budget, int]] = field(default_factory=dict)

    async def take(self, budget: Budget, count: int, seconds: float) -> None:
        """Take units of a budget that the request has not yet drawn on.

        Raises:
            NoSpaceError: there was no space for so many seconds.
        """
        self._held[budget.name] = (budget, await budget.take(count, seconds))

    def shrink(self, budget: Budget, count: int) -> None:
        """Give back all but `count` units of a budget, if the request has more."""
        _, held = self._held.get(budget.name, (budget, 0))
        if count < held:
            budget.give(held - count)
            self._held[budget.name] = (budget, count)

    def give_all(self) -> None:
        """Give everything back."""
        for budget, held in self._held.values():
            budget.give(held)
        self._held.clear()


class Budgets:
    """Bounds on the bytes of bodies and on the number of large answers that a server works on.

    A request waits in a queue, first in, first out, until there is space for it. After WAIT_SECONDS
    it is refused with 503. Three budgets keep small requests and large ones apart. A request that
    needs two takes them in this order, so that no two requests wait for each other:

    1. packed: gzip bodies of more than SMALL_BODY bytes, as they arrive,
    2. large: bodies of more than SMALL_BODY bytes after decompression,
    3. small: all others.

    Args:
        max_body: bytes of the largest body after decompression.
        seconds: time for which a request waits at most.
        large: bytes of all large bodies after decompression; None for twice the largest one.
    """

    def __init__(
        self, max_body: int, seconds: float = WAIT_SECONDS, large: int | None = None
    ) -> None:
        self.seconds = min(seconds, WAIT_SECONDS)
        self.packed = Budget(max_body, "bytes of gzip bodies")
        self.large = Budget(
            2 * max_body if large is None else max(large, max_body), "bytes of bodies"
        )
        self.small = Budget(SMALL_BUDGET, "bytes of small bodies")
        self._answers: dict[str, Budget] = {}

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[Share]:
        """Give back, at the end of the block, everything that the request has taken in it."""
        share = Share()
        try:
            yield share
        finally:
            share.give_all()

    @asynccontextmanager
    async def answering(self, path: str, most: int = ANSWERS_AT_ONCE) -> AsyncIterator[None]:
        """Make and send one of at most so many large answers of a path in the block.

        Raises:
            NoSpaceError: other answers took too long.
        """
        async with self.shared() as share:
            budget = self._answers.setdefault(path, Budget(most, f"answers to {path}"))
            await share.take(budget, 1, self.seconds)
            yield


UNPACK_IN_A_THREAD_FROM = 1 << 12
"""Bytes above which unpacking would delay other requests: gzip unpacks to as much as a thousand
times its size."""
COUNTED_AT_ONCE = 1 << 20
"""Bytes that are unpacked at a time in order to count them."""


class Bodies:
    """Reads and unpacks bodies within the limits of bytes and time, and within the budgets.

    Args:
        budgets: of the server.
        seconds: time in which a body must arrive.
        remedy: advice to a client whose body is too large.
    """

    def __init__(self, budgets: Budgets, seconds: float, remedy: str = "send less at once") -> None:
        self.budgets, self.seconds, self.remedy = budgets, seconds, remedy

    async def read(self, headers: Headers, receive: Receive, most: int, share: Share) -> bytes:
        """Return the decompressed body of a request.

        Args:
            headers: of the request.
            receive: the ASGI `receive` of the request.
            most: bytes that the body may have, before and after decompression.
            share: of the budgets; it holds the space of the body until the request is answered.

        Raises:
            HTTPRefusal: the body is too large, too slow, or not what its headers promise.
            NoSpaceError: other bodies had the space for too long.
        """
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", ""):
            raise HTTPRefusal(
                415, f"Content-Encoding {encoding[:64]!r} is not understood; send gzip or none"
            )
        stated = headers.get("content-length", "")
        length = int(stated) if stated.isdigit() and len(stated) < 20 else None
        if length is not None and length > most:
            raise self._too_large(most)
        packed = encoding == "gzip"
        body = await self._arrived(receive, length, most, packed, share)
        if packed and body:
            body = await self._unpacked(body, most, share)
            share.shrink(self.budgets.packed, 0)
        return body

    async def _arrived(
        self, receive: Receive, length: int | None, most: int, packed: bool, share: Share
    ) -> bytes:
        """Return the body as it was sent.

        Space is taken before a byte is read, so that a body waits at the client.
        """
        budgets = self.budgets
        large = budgets.packed if packed else budgets.large
        expected = min(SMALL_BODY, most) if length is None else length
        if expected > SMALL_BODY:
            await share.take(large, expected, budgets.seconds)
        elif expected > TINY_BODY or packed:
            await share.take(budgets.small, SMALL_BODY if packed else expected, budgets.seconds)
        chunks: list[bytes] = []
        arrived, unknown = 0, length is None and most > SMALL_BODY
        deadline = asyncio.get_running_loop().time() + self.seconds
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                late = f"the body did not arrive within {self.seconds:g} s"
                raise HTTPRefusal(408, late, {"Connection": "close"}) from None
            if message["type"] == "http.disconnect":
                raise HTTPRefusal(400, "the client went away in the middle of its body")
            chunks.append(message.get("body", b""))
            arrived += len(chunks[-1])
            if arrived > most:  # before it is unpacked, too: gzip may hold nothing at any length
                raise self._too_large(most)
            if not message.get("more_body", False):
                break
            if unknown and arrived > SMALL_BODY:
                unknown = False
                began = asyncio.get_running_loop().time()
                await share.take(large, most, budgets.seconds)
                if not packed:
                    share.shrink(budgets.small, 0)
                deadline += asyncio.get_running_loop().time() - began
        if length is None and arrived > SMALL_BODY and not unknown:
            share.shrink(large, arrived)
        return b"".join(chunks)  # a single one is not copied

    async def _unpacked(self, body: bytes, most: int, share: Share) -> bytes:
        small = min(SMALL_BODY, most)
        try:
            unpacked = await decompress(body, small + 1)
            if len(unpacked) > small:
                del unpacked
                size = await asyncio.to_thread(unpacked_size, body, most + 1)
                if size > most:
                    raise self._too_large(most)
                await share.take(self.budgets.large, size, self.budgets.seconds)
                unpacked = await asyncio.to_thread(_inflate, body, size + 1)
        except zlib.error:
            raise HTTPRefusal(400, "Invalid gzip payload", plain=True) from None
        if len(unpacked) > most:
            raise self._too_large(most)
        return unpacked

    def _too_large(self, most: int) -> HTTPRefusal:
        return HTTPRefusal(
            413, f"the body is larger than {most} bytes; {self.remedy}", {"Connection": "close"}
        )


async def decompress(body: bytes, most: int) -> bytes:
    """Unpack gzip, in a thread if that may take long. The result is cut off at `most` bytes.

    Raises:
        zlib.error: this is not gzip, or not all of it.
    """
    if len(body) < UNPACK_IN_A_THREAD_FROM:
        return _inflate(body, most)
    return await asyncio.to_thread(_inflate, body, most)


def _parts(packed: bytes, size: int) -> Iterator[bytes]:
    """Yield what a body unpacks to, `size` bytes at a time at most. It may be several gzip members in
    a row (RFC 1952), padded with zeros.

    Raises:
        zlib.error: this is not gzip, or not all of it.
    """
    while packed:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            part = member.decompress(packed, size)
            packed = member.unconsumed_tail
            if not part and not packed and not member.eof:
                raise zlib.error("the last member is not complete")
            yield part
        packed = member.unused_data.lstrip(b"\0")


def _inflate(packed: bytes, most: int) -> bytes:
    """Unpack a body. The result is cut off at `most` bytes."""
    parts, size = [], 0
    for part in _parts(packed, most):
        parts.append(part)
        size += len(part)
        if size >= most:
            break
    return b"".join(parts)[:most]


def unpacked_size(packed: bytes, most: int) -> int:
    """Count the bytes that gzip unpacks to; `most` if there are as many or more.

    Raises:
        zlib.error: this is not gzip, or not all of it.
    """
    size = 0
    for part in _parts(packed, COUNTED_AT_ONCE):
        size += len(part)
        if size >= most:
            return most
    return size


# ---- the middleware ----

ABORT = "lockstep.abort"
"""The ASGI extension by which an application ends its connection at once."""
PROVE = "lockstep.prove"
"""The ASGI extension by which an application reports that it has let a request in, which is with
the key where there is one."""


def abort_connection(scope: Scope) -> None:
    """End the connection of a request and drop what was not sent.

    Closing one waits until all is sent, which may be never.
    """
    offered = scope.get("extensions", {}).get(ABORT)
    if offered is not None:
        offered["abort"]()


def prove_connection(scope: Scope) -> None:
    """Note that a request was let in: its connection is kept when others are too many."""
    offered = scope.get("extensions", {}).get(PROVE)
    if offered is not None:
        offered["prove"]()


GZIP_FROM = 1000
"""Bytes above which an answer is compressed for a client that accepts it."""
GZIP_LEVEL = 1
"""Numbers compress nearly as well at level 1, at a fraction of the time."""
GROUP_PATHS = frozenset({"/scored_data", "/scored_data_list", "/reference/done"})
"""Paths of the service whose bodies hold groups, or as many numbers."""
STREAMING_PATHS = frozenset({"/ui/api/stream"})
"""Paths whose answers go on until the client disconnects."""
MAX_SMALL_BODY = SMALL_BODY
"""Bytes of a body on any other path."""
LARGE_ANSWERS = frozenset({"/batch", "/latest_example", "/reference/lease", "/evaluations"})
"""Paths whose answers may hold groups, or as many numbers. ANSWERS_AT_ONCE of each are made and
sent at a time."""
PAGE_DATA = "/ui/api/"
"""Path of the figures and rollouts that the page fetches."""
IN_A_THREAD_FROM = 1 << 16
"""Bytes above which compressing would delay other requests."""
REFUSES_GZIP = re.compile(r"\bgzip\s*;\s*q\s*=\s*0(\.0*)?\s*(,|$)", re.IGNORECASE)
"""An Accept-Encoding that names gzip in order not to get it."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request.

    Attributes:
        max_body: bytes of a large body, after decompression.
        seconds: time for receiving the body, and again for answering.
        access: rules for callers.
        large_bodies: paths whose bodies may have max_body bytes; None for every path.
        bodies_budget: bytes of all large bodies at a time; None for twice max_body.
        has_answer_deadline: False for a server whose answers may take any time.
        remedy: advice to a client whose body is too large.
    """

    max_body: int = 256 << 20
    seconds: float = 60.0
    access: Access = field(default_factory=Access)
    large_bodies: frozenset[str] | None = GROUP_PATHS
    bodies_budget: int | None = None
    has_answer_deadline: bool = True
    remedy: str = "post fewer groups at once"

    def body_bytes(self, path: str, is_proven: bool) -> int:
        """Return the bytes that a body may have.

        Clients without proof take nothing of the budgets.
        """
        if not is_proven:
            return min(self.max_body, TINY_BODY)
        is_large = self.large_bodies is None or path in self.large_bodies
        return self.max_body if is_large else min(self.max_body, MAX_SMALL_BODY)


def accepts_gzip(headers: Headers) -> bool:
    """Return whether the client takes a gzipped answer."""
    accepted = headers.get("accept-encoding", "")
    return "gzip" in accepted.lower() and REFUSES_GZIP.search(accepted) is None


async def compress(body: bytes) -> bytes:
    """Gzip, in a thread if it takes long, for a route that sends its answer piece by piece.

    Others are packed on the way.
    """
    if len(body) < IN_A_THREAD_FROM:
        return gzip.compress(body, GZIP_LEVEL, mtime=0)
    return await asyncio.to_thread(gzip.compress, body, GZIP_LEVEL, mtime=0)


class RequestLimitsMiddleware:
    """ASGI middleware. The route behind it gets the whole body at once, decompressed.

    Args:
        app: the application behind it.
        limits: of each request.
        answered: called with method, route, status and seconds of each answered request.
        refuse: form of the answer to a refused request.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: RequestLimits,
        answered: Callable[[str, str, int, float], None] = lambda *_: None,
        refuse: Callable[[HTTPRefusal], Response] = detail_answer,
    ) -> None:
        self.app, self.limits, self.answered, self.refuse = app, limits, answered, refuse
        self.packing = GZipMiddleware(app, GZIP_FROM, GZIP_LEVEL)
        self.budgets = Budgets(limits.max_body, limits.seconds, limits.bodies_budget)
        self.bodies = Bodies(self.budgets, limits.seconds, limits.remedy)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = StatusRecorder(send)
        named = f"{scope['method']} {scope['path'][:200]}"
        started = time.perf_counter()
        try:
            await self._let_in(scope, receive, answer)
        except HTTPRefusal as refusal:
            if answer.started:
                raise
            await self.refuse(refusal)(scope, receive, answer.send)
        except NoSpaceError as error:
            logger.warning("%s was refused: %s", named, error)
            full = HTTPRefusal(503, str(error), {"Retry-After": "2", "Connection": "close"})
            await self.refuse(full)(scope, receive, answer.send)
        except TimeoutError:
            if answer.started:
                raise ConnectionAbortedError(
                    f"{named}: the client did not take the answer in {self.limits.seconds:g} s"
                ) from None
            logger.error("%s took longer than %g s", named, self.limits.seconds)
            late = HTTPRefusal(
                503, f"not done within {self.limits.seconds:g} s; try again", {"Retry-After": "1"}
            )
            await self.refuse(late)(scope, receive, answer.send)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self.answered(scope["method"], route, answer.status, time.perf_counter() - started)

    async def _let_in(self, scope: Scope, receive: Receive, answer: StatusRecorder) -> None:
        """Check a request, read its body and pass both on."""
        headers, path = Headers(scope=scope), scope["path"]
        client = (scope.get("client") or ("",))[0]
        is_proven = self.limits.access.check(scope["method"], path, headers, client)
        if is_proven:
            prove_connection(scope)
        app = self.packing if accepts_gzip(headers) else self.app
        async with self.budgets.shared() as share:
            body = await self.bodies.read(
                headers, receive, self.limits.body_bytes(path, is_proven), share
            )
            async with self._turn(path):
                # An open page gets its stream until it closes it, and each message of a stream has
                # its own deadline.
                has_deadline = self.limits.has_answer_deadline and path not in STREAMING_PATHS
                async with asyncio.timeout(self.limits.seconds if has_deadline else None):
                    await app(scope, replayed(body, receive), answer.send)

    def _turn(self, path: str) -> AbstractAsyncContextManager[None]:
        """Return the block in which an answer is made and sent: large answers of one path wait for
        each other.
        """
        if path in LARGE_ANSWERS:
            return self.budgets.answering(path, ANSWERS_AT_ONCE)
        if path.startswith(PAGE_DATA) and path not in STREAMING_PATHS:
            return self.budgets.answering(PAGE_DATA, PAGE_ANSWERS_AT_ONCE)
        return nullcontext()


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body, which was read before, once.

    Later messages come from the client.
    """
    pending = [body]

    async def again() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return again


class StatusRecorder:
    """Forwards an answer and records its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.status = 0

    async def send(self, message: Message) -> None:
        """Forward one ASGI message."""
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
        await self._send(message)
