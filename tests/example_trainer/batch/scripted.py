"""A rollout service with scripted answers."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Scripted:
    """An HTTP server that answers each path from a list, and repeats the last entry.

    An int is a status, None a cut connection. Paths without a list get 404.
    """

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self.seen: list[tuple[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                """Stay silent."""

            def serve(self) -> None:
                path = self.path.split("?")[0]
                length = int(self.headers.get("content-length") or 0)
                outer.seen.append(
                    (self.path, json.loads(self.rfile.read(length)) if length else None)
                )
                script = answers.get(path, [404])
                answer = script.pop(0) if len(script) > 1 else script[0]
                if answer is None:
                    self.connection.close()
                    return
                status = answer if isinstance(answer, int) else 200
                body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = serve

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]
