"""A deadline for answers that arrive in small pieces.

The timeout of httpx holds for each read, so a server that sends a byte now and then would keep a
request for ever.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

import httpx

MIN_RATE = 16 << 10
"""Bytes a second. Beyond the timeout, an answer must arrive at least so fast."""
GAPS = 10
"""A gap between two pieces counts as at most a tenth of the timeout: this process itself may have
been stopped or busy."""


class _Pace:
    """Counts bytes and seconds of one answer."""

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
