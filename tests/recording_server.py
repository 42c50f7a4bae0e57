"""An HTTP server in threads of the test, which records what it was sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Recorder:
    """Answers of one server, and the requests that it got.

    Attributes:
        answer: JSON, for every path.
        leads_to: address to which every request is redirected with 307; empty for none.
        requests: method and path, with the whole of what was sent as text.
    """

    answer: Any = field(default_factory=dict)
    leads_to: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def saw(self, word: str) -> bool:
        """Return whether any request held a word, in its line, headers or body."""
        return any(word in line or word in text for line, text in self.requests)


@contextmanager
def recording(answer: Any = None, leads_to: str = "") -> Iterator[Recorder]:
    """Serve on a free port of loopback until the end of the block."""
    recorder = Recorder({} if answer is None else answer, leads_to)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            recorder.requests.append(
                (f"{self.command} {self.path}", f"{self.headers}{body.decode(errors='replace')}")
            )
            text = json.dumps(recorder.answer).encode()
            self.send_response(307 if recorder.leads_to else 200)
            if recorder.leads_to:
                self.send_header("Location", recorder.leads_to + self.path)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_DELETE = do_GET

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        recorder.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield recorder
        finally:
            server.shutdown()
            thread.join(60)
