"""A small real HTTP server in the place of a model that judges."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Judge(ThreadingHTTPServer):
    """Answers with what `says` gives next, the last for ever: a text, a status to refuse with,
    bytes in place of JSON, or seconds to wait before it does. With `cut_off`, the texts end by
    their limit of tokens."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.says: list[str | int | bytes | float] = ["Score: 5"]
        self.asked: list[dict[str, Any]] = []
        self.cut_off = False
        self.lock, self.released = threading.Lock(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Judge

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def reply(self, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if body is data else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(200, {"object": "list", "data": [{"id": "the-judge", "object": "model"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(request | {"authorization": self.headers.get("Authorization")})
            said = self.server.says.pop(0) if len(self.server.says) > 1 else self.server.says[0]
        if isinstance(said, float):
            self.server.released.wait(said)
            return None
        if isinstance(said, bytes):
            return self.reply(200, said)
        if isinstance(said, int):
            return self.reply(said, {"error": {"message": f"refused with {said}"}})
        reason = "length" if self.server.cut_off else "stop"
        message = {
            "index": 0,
            "finish_reason": reason,
            "message": {"role": "assistant", "content": said},
        }
        return self.reply(
            200,
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [message],
            },
        )


@contextlib.contextmanager
def judging() -> Iterator[Judge]:
    """A judge that answers until the block ends."""
    server = Judge()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
