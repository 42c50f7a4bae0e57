"""Bounds what a connection may do before it has sent the head of a request: until then no other limit sees it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
else:
    Base = AutoHTTPProtocol

logger = logging.getLogger(__name__)

MOST_HEAD_BYTES = 1 << 16
"""Of a request's first line and headers."""


def bounded_protocol(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which by itself waits for ever for a first request, or for the rest of a request's head.

    Args:
        seconds: from the connection to the end of the first head, and from the first byte of each later head to its end.
    """

    class BoundedProtocol(Base):
        """One connection."""

        _late: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """The client is there; now it has to ask something."""
            super().connection_made(transport)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            """The client is gone."""
            self._head_is_there()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            """Bytes from the client."""
            super().data_received(data)
            if self._late is None:
                return
            self._head_bytes += len(data)
            if not hasattr(Base, "on_headers_complete") and self.cycle is not None:
                self._head_is_there()  # h11's protocol has no such hook, and a bound on the bytes of its own
            elif self._head_bytes > MOST_HEAD_BYTES:
                self._refuse("431 Request Header Fields Too Large")

        def on_message_begin(self) -> None:
            """The first byte of a request."""
            super().on_message_begin()
            self._await_head()

        def on_headers_complete(self) -> None:
            """The head is complete."""
            self._head_is_there()
            super().on_headers_complete()

        def _await_head(self) -> None:
            if self._late is None:
                self._head_bytes = 0
                self._late = asyncio.get_running_loop().call_later(seconds, self._refuse, "408 Request Timeout")

        def _head_is_there(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _refuse(self, status: str) -> None:
            self._head_is_there()
            transport: Any = self.transport
            if not transport.is_closing():
                logger.info("closing a connection that sent no request: %s", status)
                transport.write(f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode())
                transport.close()

    return BoundedProtocol
