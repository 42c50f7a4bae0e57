"""Reading and unpacking the bodies of requests, within limits of bytes and time and within the
budgets of a server.
"""

from __future__ import annotations

import asyncio
import zlib

from starlette.datastructures import Headers
from starlette.types import Receive

from atroposlib.web.memory_budget import SMALL_BODY, TINY_BODY, Budgets, Share
from atroposlib.web.refusal import HTTPRefusal

UNPACK_IN_A_THREAD_FROM = 1 << 12
"""Bytes above which unpacking would delay other requests: gzip unpacks to as much as a thousand
times its size."""
COUNTED_AT_ONCE = 1 << 20
"""Bytes that are unpacked at a time in order to count them."""


class Bodies:
    """Reader of bodies.

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
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

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


def _inflate(packed: bytes, most: int) -> bytes:
    """Unpack a body, which may be several gzip members in a row (RFC 1952), padded with zeros."""
    out: list[bytes] = []
    size = 0
    rest = packed
    while True:
        member = zlib.decompressobj(wbits=31)
        out.append(member.decompress(rest, most - size))
        size += len(out[-1])
        if size >= most:
            break
        if not member.eof:
            raise zlib.error("the last member is not complete")
        rest = member.unused_data.lstrip(b"\0")
        if not rest:
            break
    return out[0] if len(out) == 1 else b"".join(out)


def unpacked_size(packed: bytes, most: int) -> int:
    """Count the bytes that gzip unpacks to, a piece at a time; `most` if there are as many or more.

    Raises:
        zlib.error: this is not gzip, or not all of it.
    """
    size = 0
    rest = packed
    while rest:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            piece = member.decompress(rest, COUNTED_AT_ONCE)
            size += len(piece)
            if size >= most:
                return most
            rest = member.unconsumed_tail
            if not piece and not rest and not member.eof:
                raise zlib.error("the last member is not complete")
        rest = member.unused_data.lstrip(b"\0")
    return size
