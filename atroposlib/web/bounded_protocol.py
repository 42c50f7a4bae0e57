"""uvicorn's protocol with bounds on what a connection may do while no limit of a request applies.

Connections of the server and of one address are bounded (`ConnectionTable`). So is the time for a
request's head, for its body, and for taking an answer. Further bounds are the bytes and lines of a
head, and requests that are sent before earlier ones are answered.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atroposlib.web.addresses import network_of
from atroposlib.web.middleware import ABORT, PROVE

C = TypeVar("C", bound=Hashable)

MAX_SPEAKING = 256
"""Connections with unread bytes that the search for one to close passes over, before it gives up on
an address."""


class Crowd(Generic[C]):
    """Connections by address. Adding and removing take the same time for any number."""

    def __init__(self) -> None:
        self.by_address: dict[str, dict[C, None]] = {}

    def add(self, connection: C, address: str) -> None:
        """Add a connection; it is the youngest of its address."""
        self.by_address.setdefault(address, {})[connection] = None

    def remove(self, connection: C, address: str) -> None:
        """Remove a connection."""
        del self.by_address[address][connection]
        if not self.by_address[address]:
            del self.by_address[address]

    def count(self, address: str) -> int:
        """Return how many connections this address has."""
        return len(self.by_address.get(address, ()))

    def largest(self) -> str:
        """Return the address with the most connections; empty if there is no connection."""
        return max(self.by_address, key=self.count, default="")

    def oldest(self, address: str) -> Iterator[C]:
        """Return the connections of an address, the oldest first."""
        return iter(self.by_address.get(address, ()))


@dataclass(slots=True)
class Entry:
    """A connection in the table."""

    address: str
    is_proven: bool = False
    is_served: bool = False
    """A request on it is under way."""


class ConnectionTable(Generic[C]):
    """All connections of a server.

    Args:
        most: connections held at a time.
        is_speaking: whether bytes of a connection have arrived that were not read yet. Such a
            connection is not closed: the head of its request may be among them.
    """

    def __init__(
        self, most: int, is_speaking: Callable[[C], bool] = lambda connection: False
    ) -> None:
        self.most = most
        self.most_unproven_of_address = max(1, most // 2)
        self._is_speaking = is_speaking
        self._entries: dict[C, Entry] = {}
        self._crowds: dict[tuple[bool, bool], Crowd[C]] = {
            (is_proven, is_served): Crowd()
            for is_proven in (False, True)
            for is_served in (False, True)
        }

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, connection: C, address: str) -> C | None:
        """Take in a new connection, and return the one to close now: None, an older one, or the new
        one itself.

        The caller closes it and calls `remove`.
        """
        self._entries[connection] = Entry(address)
        self._crowds[False, False].add(connection, address)
        waiting, served = self._crowds[False, False], self._crowds[False, True]
        if waiting.count(address) + served.count(address) > self.most_unproven_of_address:
            return (
                self._first_of(waiting, address, connection)
                or self._first_of(served, address, connection)
                or connection
            )
        if len(self._entries) <= self.most:
            return None
        for crowd in (waiting, served, self._crowds[True, False]):
            largest = crowd.largest()
            # If all connections of the largest are speaking, others may not be.
            for address in (largest, *islice(crowd.by_address, MAX_SPEAKING)):
                victim = self._first_of(crowd, address, connection)
                if victim is not None:
                    return victim
        return connection

    def _first_of(self, crowd: Crowd[C], address: str, but: C) -> C | None:
        for looked_at, connection in enumerate(crowd.oldest(address)):
            if looked_at > MAX_SPEAKING:
                return None
            if connection != but and not self._is_speaking(connection):
                return connection
        return None

    def prove(self, connection: C) -> None:
        """Note that a request on the connection was let in."""
        if connection in self._entries:
            self._move(connection, True, self._entries[connection].is_served)

    def serve(self, connection: C, is_served: bool) -> None:
        """Note that a request on the connection is under way, or that it is answered."""
        if connection in self._entries:
            self._move(connection, self._entries[connection].is_proven, is_served)

    def _move(self, connection: C, is_proven: bool, is_served: bool) -> None:
        entry = self._entries[connection]
        if (is_proven, is_served) != (entry.is_proven, entry.is_served):
            self._crowds[entry.is_proven, entry.is_served].remove(connection, entry.address)
            entry.is_proven, entry.is_served = is_proven, is_served
            self._crowds[is_proven, is_served].add(connection, entry.address)

    def remove(self, connection: C) -> None:
        """Forget a connection. Doing so twice does nothing more."""
        entry = self._entries.pop(connection, None)
        if entry is not None:
            self._crowds[entry.is_proven, entry.is_served].remove(connection, entry.address)

    def counts(self) -> dict[str, int]:
        """Return how many connections there are of each kind."""
        return {
            "open": len(self._entries),
            "unproven": sum(not entry.is_proven for entry in self._entries.values()),
            "served": sum(entry.is_served for entry in self._entries.values()),
        }


logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 1 << 16
"""First line and headers of a request."""
MAX_HEADERS = 256
"""Lines in the head of a request."""
MAX_PIPELINED = 16
"""Requests of one connection that wait for the answers to earlier ones."""
BODY_GRACE_SECONDS = 30.0
"""A service that bounds the time of bodies itself, and lets some wait, answers before the
connection is closed under it."""
LOG_EVERY_SECONDS = 10.0


def bounded_protocol(
    seconds: float,
    most_connections: int,
    log: logging.Logger = logger,
    most_body: int | None = None,
) -> type[asyncio.Protocol]:
    """Return the class of the connections of one server.

    Args:
        seconds: time from the connection to the end of the first head, and from the first byte of
            each later head to its end. It also holds for a body (with BODY_GRACE_SECONDS more), and
            for an answer that the client does not take.
        most_connections: connections held at a time.
        log: gets a line for connections that are closed.
        most_body: bytes of a body as it is sent; None for a server that bounds bodies itself.
    """
    table: ConnectionTable[BoundedProtocol] = ConnectionTable(most_connections, _has_unread_bytes)
    closed = _Closed(table, log)

    class Connection(BoundedProtocol):
        """One connection of this server."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.seconds, self.table, self.closed, self.log = seconds, table, closed, log
            self.most_body = most_body

    return Connection


class _Closed:
    """Logs connections that were closed because there are too many: one line in LOG_EVERY_SECONDS,
    with their number.
    """

    def __init__(self, table: ConnectionTable[BoundedProtocol], log: logging.Logger) -> None:
        self._table, self._log = table, log
        self._count = 0
        self._logged = float("-inf")

    def note(self, address: str) -> None:
        """Count one connection from this address."""
        self._count += 1
        now = time.monotonic()
        if now - self._logged >= LOG_EVERY_SECONDS:
            self._log.warning(
                "too many connections: closed %d without the key or without a request, the last "
                "one from %s. Open now: %s of at most %d (%d without the key from one address). "
                "Raise `ulimit -n` if these are your own clients",
                self._count,
                address,
                self._table.counts(),
                self._table.most,
                self._table.most_unproven_of_address,
            )
            self._count, self._logged = 0, now


def _has_unread_bytes(connection: BoundedProtocol) -> bool:
    """Return whether the system holds bytes that this connection has received and the event loop
    has not read.
    """
    sock = connection.transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0 or connection.transport.is_closing():
        return False
    (count,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"\0" * 4))
    return bool(count)


class _Deadline:
    """A timer that runs once, unless it is stopped before."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        """Call in so many seconds. A deadline that is running already is kept."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(
                seconds, self._run, call, *arguments
            )

    def _run(self, call: Callable[..., object], *arguments: object) -> None:
        self._timer = None
        call(*arguments)

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def is_running(self) -> bool:
        """True until the timer has called or was stopped."""
        return self._timer is not None


class BoundedProtocol(HttpToolsProtocol):
    """One connection, with bounds."""

    seconds: float
    table: ConnectionTable[BoundedProtocol]
    closed: _Closed
    log: logging.Logger
    most_body: int | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late_head, self._late_body, self._late_reader = _Deadline(), _Deadline(), _Deadline()
        self._head_bytes = self._body_bytes = 0
        self._has_open_body = False
        self._answering: Any = None
        """The request that the application is answering. uvicorn itself knows the newest one
        alone."""

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take in the connection, or close one that matters less."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            # The system ends a connection whose peer acknowledges nothing of what was sent,
            # whatever state it is in.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self.seconds))
        address = network_of(self.client[0]) if self.client else "local"
        victim = self.table.add(self, address)
        if victim is not None:
            self.closed.note(victim.client[0] if victim.client else "local")
            victim.give_way()
        if victim is not self:
            self._await_head()

    def give_way(self) -> None:
        """Close this connection for another one."""
        self.table.remove(self)
        self._stop_timers()
        has_request = self.cycle is not None and not self.cycle.response_complete
        if has_request or self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
            return
        # A client that is about to send its request learns that it can try again.
        self.transport.write(_answer("503 Service Unavailable", "retry-after: 1\r\n"))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.table.remove(self)
        self._stop_timers()
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to the protocol of WebSockets, which has limits of its own.

        That protocol gets the head alone. It would wait without a limit for a body that the head
        announces.
        """
        if any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        ):
            self._refuse("400 Bad Request")
            return
        self.table.remove(self)
        self._stop_timers()
        super().handle_websocket_upgrade()

    def prove(self) -> None:
        """Note that a request of this client was let in."""
        self.table.prove(self)

    # ---- what the client sends ----

    def data_received(self, data: bytes) -> None:
        """Read bytes from the client."""
        super().data_received(data)
        if self._late_head.is_running:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse("431 Request Header Fields Too Large")
        if self._has_open_body:
            self._late_body.start(self.seconds + BODY_GRACE_SECONDS, self._end_body)

    def on_message_begin(self) -> None:
        """Begin to read a request."""
        super().on_message_begin()
        self.scope["extensions"] = {
            ABORT: {"abort": self.transport.abort},
            PROVE: {"prove": self.prove},
        }
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one line of the head."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse("431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        """Begin to answer the request."""
        self._late_head.stop()
        if self.transport.is_closing():  # it was refused for an earlier part of what is being read
            return
        if not self.flow.write_paused:
            self._late_reader.stop()
        self.table.serve(self, True)
        self._has_open_body, self._body_bytes = True, 0
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.log.info(
                "closing a connection that sent %d requests before the first was answered",
                len(self.pipeline),
            )
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """Take some of the body."""
        if self.transport.is_closing():
            return
        self._body_bytes += len(body)
        if self.most_body is not None and self._body_bytes > self.most_body:
            self.log.warning(
                "closing a connection whose request body is larger than %d bytes", self.most_body
            )
            self._end_with("413 Content Too Large")
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the whole request has arrived."""
        self._has_open_body = False
        self._late_body.stop()
        if not self.transport.is_closing():
            super().on_message_complete()

    def _await_head(self) -> None:
        if not self._late_head.is_running:
            self._head_bytes = 0
            self._late_head.start(self.seconds, self._refuse, "408 Request Timeout")

    def _end_body(self) -> None:
        self.log.info(
            "closing a connection whose request body did not arrive within %g s",
            self.seconds + BODY_GRACE_SECONDS,
        )
        self._end_with("408 Request Timeout")

    def _end_with(self, status: str) -> None:
        """End the connection in the middle of a body."""
        if self.cycle.response_started or self.transport.get_write_buffer_size():
            self.transport.abort()
            return
        self.transport.write(_answer(status))
        self.transport.close()

    def _refuse(self, status: str) -> None:
        self._late_head.stop()
        if not self.transport.is_closing():
            self.log.info("closing a connection that sent no request: %s", status)
            self.transport.write(_answer(status))
            self.transport.close()

    # ---- what the client takes ----

    def on_response_complete(self) -> None:
        """Wait for the next request, or begin with one that has arrived already."""
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:
            self.table.serve(self, False)
        if not self.flow.write_paused:
            self._late_reader.stop()
            if self.transport.get_write_buffer_size():
                self._late_reader.start(self.seconds, self._end_if_untaken)

    def pause_writing(self) -> None:
        """Note that the client takes an answer more slowly than it is made."""
        super().pause_writing()
        self._late_reader.stop()
        self._late_reader.start(self.seconds, self._end_if_untaken)

    def resume_writing(self) -> None:
        """Note that the client has taken nearly all of what was sent."""
        self._late_reader.stop()
        super().resume_writing()

    def _end_if_untaken(self) -> None:
        untaken = self.transport.get_write_buffer_size()
        if untaken:
            self.log.info(
                "closing a connection whose client left %d bytes of an answer for %g s",
                untaken,
                self.seconds,
            )
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _stop_timers(self) -> None:
        self._late_head.stop()
        self._late_body.stop()
        self._late_reader.stop()


def _answer(status: str, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{more}connection: close\r\ncontent-length: 0\r\n\r\n".encode()


class StoppingServer(uvicorn.Server):
    """Calls `when_stopping` before it waits for requests under way, so that streams and long polls
    end themselves.

    uvicorn would wait for them until its limit and then cancel them, with a traceback in the log
    for each.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.when_stopping: list[Callable[[], None]] = []

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End long answers, then stop as uvicorn does."""
        for call in self.when_stopping:
            call()
        await super().shutdown(sockets)
