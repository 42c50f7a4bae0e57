"""A small HTTP server for figures whose clients cannot use up the threads and open files of the
trainer.
"""

from __future__ import annotations

import socket
import sys
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

MOST_CONNECTIONS = 32
"""Connections at a time. One more ends the oldest."""
READ_SECONDS = 10.0
"""A connection that sends nothing for so long is closed."""


class _Handler(WSGIRequestHandler):
    timeout = READ_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


class BoundedWSGIServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application from threads.

    Args:
        host: name or address to listen on.
        port: 0 for any free one.

    Raises:
        OSError: the port is taken, or the address is none of this machine.
    """

    daemon_threads = True
    request_queue_size = 4 * MOST_CONNECTIONS

    def __init__(self, host: str, port: int, application: WSGIApplication) -> None:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = family
        self.connections: dict[socket.socket, None] = {}
        """In the order in which they came."""
        self._lock = threading.Lock()
        super().__init__((str(address[0]), int(address[1])), _Handler)
        self.set_app(application)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, and end the oldest one if there are too many."""
        with self._lock:
            self.connections[request] = None
            oldest = (
                next(iter(self.connections)) if len(self.connections) > MOST_CONNECTIONS else None
            )
            if oldest is not None:
                del self.connections[oldest]
        if oldest is not None:
            try:
                oldest.shutdown(socket.SHUT_RDWR)
            except OSError:  # its client has closed it
                self._forget(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._forget(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave out what clients cause: silence, and connections that end."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            self.connections.pop(request, None)
