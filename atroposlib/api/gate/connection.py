"""Bounds what a connection may do while no limit of a request sees it: before the head of one is there, and when nobody takes
the answer."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any

from starlette.types import Scope
from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
else:
    Base = AutoHTTPProtocol

logger = logging.getLogger(__name__)

MOST_HEAD_BYTES = 1 << 16
"""Of a request's first line and headers."""
ABORT = "lockstep.abort"
"""The ASGI extension by which an application ends its connection at once."""


def abort_connection(scope: Scope) -> None:
    """End the connection of a request and drop what was not sent. Closing one waits until all is sent, which may be never."""
    offered = scope.get("extensions", {}).get(ABORT)
    if offered is not None:
        offered["abort"]()


def bounded_protocol(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which by itself waits for ever for a first request, or for the rest of a request's head.

    Args:
        seconds: from the connection to the end of the first head, from the first byte of each later head to its end, and for
            which the client may take nothing of what is to be sent to it.
    """

    class BoundedProtocol(Base):
        """One connection."""

        _late: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """The client is there; now it has to ask something."""
            super().connection_made(transport)
            # Whatever is waiting to be sent, and whoever has closed the connection meanwhile: the system ends it, and says so.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
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
            self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}
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
