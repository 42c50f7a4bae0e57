"""A door in front of the rollout service that writes down what environments post, and hands
everything on unchanged.
"""

from __future__ import annotations

import gzip
import http.client
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

HANDED_ON = (
    "content-type",
    "content-encoding",
    "accept-encoding",
    "idempotency-key",
    "authorization",
)
TIMEOUT = 60


class Server(ThreadingHTTPServer):
    """One thread for each connection."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is stopped resets its connections: without a log line. Anything else is."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Recorder:
    """Listens on a port of its own, in threads.

    Attributes:
        posted: the groups of every answered post of groups, in the order of arrival.
        registered: the bodies of `/register-env`.
        refused: (path, status, answer) of what the service answered with 400 or more.
    """

    def __init__(self, service_port: int):
        self.service_port = service_port
        self.posted: list[dict[str, Any]] = []
        self.registered: list[dict[str, Any]] = []
        self.refused: list[tuple[str, int, str]] = []
        self.changed = threading.Condition()
        recorder = self

        class Door(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Log nothing: the harness prints the essentials."""

            def hand_on(self) -> None:
                recorder.answer(self)

            do_GET = do_POST = hand_on

        self.server = Server(("127.0.0.1", 0), Door)
        self.thread = threading.Thread(
            target=self.server.serve_forever, name="recorder", daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Recorder:
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(TIMEOUT)

    def answer(self, door: BaseHTTPRequestHandler) -> None:
        """Ask the service the same, note it, and give its answer back."""
        length = int(door.headers.get("content-length") or 0)
        body = door.rfile.read(length)
        if len(body) < length:  # The client was stopped while it posted.
            door.close_connection = True
            return
        headers = {
            name: value for name in HANDED_ON if (value := door.headers.get(name)) is not None
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.service_port, timeout=TIMEOUT)
        try:
            connection.request(door.command, door.path, body=body, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if door.command == "POST":
            self.note(
                door.path,
                body,
                door.headers.get("content-encoding") == "gzip",
                answer.status,
                content,
            )
        door.send_response(answer.status)
        for name in ("content-type", "content-encoding", "retry-after"):
            if (value := answer.getheader(name)) is not None:
                door.send_header(name, value)
        door.send_header("content-length", str(len(content)))
        door.end_headers()
        door.wfile.write(content)

    def note(self, path: str, body: bytes, packed: bool, status: int, content: bytes) -> None:
        """Keep what was posted. A 4xx loses the group, so it is kept apart."""
        found = json.loads(gzip.decompress(body) if packed else body) if body else None
        with self.changed:
            if status >= 400:
                self.refused.append((path, status, content[:2000].decode(errors="replace")))
            elif path == "/register-env":
                self.registered.append(found)
            elif path in ("/scored_data", "/scored_data_list"):
                self.posted += found if isinstance(found, list) else [found]
            self.changed.notify_all()
