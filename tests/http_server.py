"""An HTTP server in threads of the test: a function answers, and every request is recorded."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Request:
    """One request, with the port of its client."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    client_port: int

    @property
    def json(self) -> Any:
        """The JSON of the body; None if it is empty."""
        return json.loads(self.body or b"null")


Answer = tuple[int, Any] | tuple[int, Any, Mapping[str, str]] | None
"""Status, content (bytes as they are, else JSON) and headers; None breaks the connection off."""


class HttpServer(ThreadingHTTPServer):
    """Serve on loopback until the end of a `with` block.

    Attributes:
        requests: all requests so far.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, answer: Callable[[Request], Answer], port: int = 0, keep_alive: bool = False
    ) -> None:
        """
        Args:
            answer: called in a thread for each request.
            port: 0 for a free one.
            keep_alive: connections stay open between requests.
        """
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer, self.requests, self.port = answer, list[Request](), self.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self.protocol = ["HTTP/1.0", "HTTP/1.1"][keep_alive]
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join(60)
        self.server_close()

    def posted(self, path: str = "") -> list[Any]:
        """Return the JSON of the bodies, of all paths or of one."""
        return [one.json for one in self.requests if one.path == (path or one.path)]

    def saw(self, word: str) -> bool:
        """Return whether any request held a word, in its path, headers or body."""
        return any(word in f"{one.path}\n{one.headers}\n{one.body!r}" for one in self.requests)


class Script:
    """Gives its answers in turn, the last one again and again."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)

    def __call__(self, request: Request) -> Answer:
        if len(self.answers) > 1:
            return self.answers.pop(0)
        return self.answers[0]


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer

    def setup(self) -> None:
        super().setup()
        self.protocol_version = self.server.protocol

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        port = self.client_address[1]
        request = Request(self.command, self.path, self.headers, body, port)  # type: ignore[arg-type]
        self.server.requests.append(request)
        answer = self.server.answer(request)
        if answer is None:
            self.close_connection = True
            return
        status, content, *headers = answer
        kind = "text/html"
        if not isinstance(content, bytes):
            kind, content = "application/json", json.dumps(content).encode()
        self.send_response(status)
        named = {"Content-Type": kind, "Content-Length": str(len(content))}
        for name, value in (named | dict(*headers)).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        """Log nothing: it would stand among the output of the tests."""
