"""Limits of connections: how many a client keeps, how many a server accepts and holds, and how slow
an answer may be.

By default httpx keeps 20 idle connections for five seconds. Beyond that its pool (httpcore 1.0,
issue 1110 there) closes connections that look idle. A connection that the pool has just given to a
request looks idle until the request is written. So the pool sometimes closes a socket under a
request. The request then fails with "Bad file descriptor", or waits until its deadline. A pool that
never closes what the server holds open cannot do that.
"""

from __future__ import annotations

import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx

from atroposlib.web.keys import bearer

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
"""A connection for each request at a time, kept until the server closes it."""

SERVER_KEEPS_SECONDS = 75
"""Time for which the stack's own servers hold an idle connection open. It is longer than most
training steps: a request at the end of this time finds its connection closed."""

LISTEN_BACKLOG = 2048
"""Connections that the system holds for a server until it accepts them."""
ACCEPT_AT_ONCE = 32
"""Connections that asyncio accepts before it serves the others. Each is an open file before it can
be refused."""


MAX_FILES = 65_536
"""The soft limit is raised up to the hard one, but not above this: some programs loop over all
numbers below it."""
MAX_CONNECTIONS = 8192
"""Connections of one server, however many files may be open. Each takes memory before it has sent a
request."""
KEPT_SHARE, MIN_KEPT = 0.25, 4 * ACCEPT_AT_ONCE + 64
"""Files that connections may not take, as a share of the limit and as a number. Stores, child
processes, requests to other servers, and connections that are accepted but not yet counted need
them."""


def raise_file_limit(report: Callable[[str], object]) -> int:
    """Raise the soft limit on open files to the hard one, and return the limit that now holds."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (MAX_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    raised = min(hard, MAX_FILES)
    if soft >= raised:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, limits[1]))
    except (OSError, ValueError) as error:
        report(f"the limit on open files stays at {soft}: raising it to {raised} failed ({error})")
        return soft
    return raised


def connections_under(files: int) -> int:
    """Return the number of connections that a server may hold with this limit on open files."""
    return max(16, min(MAX_CONNECTIONS, files - max(int(files * KEPT_SHARE), MIN_KEPT)))


def connections_allowed(report: Callable[[str], object]) -> int:
    """Raise the limit on open files, and return the number of connections that a server may hold.

    Args:
        report: writes a line into the server's log.
    """
    files = raise_file_limit(report)
    most = connections_under(files)
    report(f"limit on open files (ulimit -n): {files}; connections held at a time: at most {most}")
    return most


MIN_RATE = 16 << 10
"""Bytes a second. Beyond the timeout, an answer must arrive at least so fast."""
GAPS = 10
"""A gap between two pieces counts as at most a tenth of the timeout: this process itself may have
been stopped or busy."""


class _Pace:
    """Counts bytes and seconds of one answer.

    The timeout of httpx holds for each read, so a server that sends a byte now and then would keep
    a request for ever.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._request = response.request
        self._timeout: float | None = response.request.extensions.get("timeout", {}).get("read")
        self._last, self._seconds, self._bytes = time.monotonic(), 0.0, 0

    def check(self, piece: bytes) -> None:
        """Count a piece.

        Raises:
            httpx.ReadTimeout: the answer is too slow.
        """
        if self._timeout is None:
            return
        now = time.monotonic()
        self._seconds += min(now - self._last, self._timeout / GAPS)
        self._bytes += len(piece)
        self._last = now
        if self._seconds > self._timeout + self._bytes / MIN_RATE:
            reason = f"the answer is too slow: {self._bytes} bytes in {self._seconds:.0f} s, and it has not ended"
            raise httpx.ReadTimeout(reason, request=self._request)


class _Stream(httpx.SyncByteStream):
    def __init__(self, response: httpx.Response) -> None:
        assert isinstance(response.stream, httpx.SyncByteStream)
        self._pieces, self._pace = response.stream, _Pace(response)

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self._pace.check(piece)
            yield piece

    def close(self) -> None:
        self._pieces.close()


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, response: httpx.Response) -> None:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._pieces, self._pace = response.stream, _Pace(response)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces:
            self._pace.check(piece)
            yield piece

    async def aclose(self) -> None:
        await self._pieces.aclose()


def end_slow_answer(response: httpx.Response) -> None:
    """Hook of a client for responses: raise ReadTimeout from an answer that is too slow."""
    response.stream = _Stream(response)


async def end_slow_answer_async(response: httpx.Response) -> None:
    """Do the same for an asynchronous client."""
    response.stream = _AsyncStream(response)


def direct_client(url: str, timeout: float, api_key: str | None = None) -> httpx.Client:
    """A client of one of the stack's servers, which is reached directly whatever HTTP_PROXY and
    similar variables contain.

    A proxy does not reach this machine's or cluster's addresses, and must not see prompts, rewards
    and keys. Certificates of one's own (SSL_CERT_FILE) apply. Threads may share the client.

    Args:
        url: the beginning of every address.
        timeout: seconds for each phase of a request, unless the request has its own.
        api_key: bearer token, if the server requires one.
    """
    return httpx.Client(
        **_direct(url, api_key),
        timeout=timeout,
        # A transport reads only the certificates from the environment.
        transport=httpx.HTTPTransport(trust_env=True, limits=LIMITS),
        event_hooks={"response": [end_slow_answer]},
    )


def direct_async_client(
    url: str, timeout: float | httpx.Timeout, api_key: str | None = None
) -> httpx.AsyncClient:
    """Return the same for an event loop."""
    return httpx.AsyncClient(
        **_direct(url, api_key),
        timeout=timeout,
        transport=httpx.AsyncHTTPTransport(trust_env=True, limits=LIMITS),
        event_hooks={"response": [end_slow_answer_async]},
    )


def _direct(url: str, api_key: str | None) -> dict[str, Any]:
    return {"base_url": url, "headers": bearer(api_key), "trust_env": False}
