"""bench/gpu/vllm_engine_trainer.py speaks HTTP as our own trainer does: over one kept connection,
also from its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.gpu.vllm_engine_trainer import EngineTrainer


class Server(ThreadingHTTPServer):
    """Answers every POST, and counts connections."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections: list[object] = []
        self.posted: list[str] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections.append(self.client_address)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.posted.append(self.path)
        self.send_response(500 if self.path == "/broken" else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join(10)


def test_all_calls_to_a_server_share_one_connection(server: Server) -> None:
    trainer = EngineTrainer("tiny", server.server_address[1], "cpu", timeout=20)
    for _ in range(3):
        trainer._ask_all("/pause", params={"mode": "keep"})()
        trainer._ask_all("/update_weights", json={"update_info": {}})()
        trainer._ask_all("/resume")()
    assert server.posted == ["/pause?mode=keep", "/update_weights", "/resume"] * 3
    assert len(server.connections) == 1


def test_a_call_in_the_background_raises_where_it_is_waited_for(server: Server) -> None:
    wait = EngineTrainer("tiny", server.server_address[1], "cpu", timeout=20)._ask_all("/broken")
    with pytest.raises(Exception, match="500"):
        wait()
