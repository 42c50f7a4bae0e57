"""A process that answers what the page asks an inference server, and is killed:
`python inference_server.py PORT [INSTANCE]`.

Tests of the page's text about a server that is gone need a process that can go, not a model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BRIDGE = {
    "checksums": ["abc"],
    "updates": 3,
    "failures": 0,
    "last_update": {"to_paused": 0.01, "halted": 0.25},
}


def answering(port: int, answers: Callable[[], Mapping[str, Any]]) -> ThreadingHTTPServer:
    """A server on a port, 0 for a free one, that answers paths with JSON as it is asked for, and
    all others with 404.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers().get(self.path)
            body = json.dumps(found).encode()
            self.send_response(200 if found is not None else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main(port: int, instance: str) -> None:
    """Answer until killed."""
    weights = {
        "instance": instance,
        "weight_version": 3,
        "weight_epoch": 7,
        "serving": True,
        "in_flight": 0,
    }
    answering(port, lambda: {"/weights": weights, "/bridge/state": BRIDGE}).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
