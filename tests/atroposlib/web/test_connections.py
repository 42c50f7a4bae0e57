"""A flood of connections without the key, against a service with few open files."""

from __future__ import annotations

import http.client
import json
import select
import signal
import socket
import threading
from pathlib import Path

import httpx

from atroposlib.web.connections import connections_under
from tests.atroposlib.service.conftest import Service, group, trainer
from tests.atroposlib.service.killed_service import until

KEY = {"Authorization": "Bearer s3cret"}
FILES = 400
MOST = connections_under(FILES)


class FewFiles(Service):
    """A service that may have few files open."""

    def command(self) -> list[str]:
        return ["bash", "-c", f'ulimit -n {FILES}; exec "$@"', "limited", *super().command()]


class Flood(threading.Thread):
    """Holds more silent connections than the service has files, and replaces each that is closed."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.over = threading.Event()
        self.replaced = 0

    def run(self) -> None:
        held: dict[int, socket.socket] = {}
        poll = select.poll()
        while not self.over.is_set():
            while len(held) < 2 * FILES:
                client = socket.socket()
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", self.port))
                held[client.fileno()] = client
                poll.register(client, select.POLLIN | select.POLLHUP | select.POLLERR)
            for number, _ in poll.poll(100):
                poll.unregister(number)
                held.pop(number).close()
                self.replaced += 1
        for client in held.values():
            client.close()


def test_callers_with_the_key_are_served_while_strangers_hold_all_connections(
    tmp_path: Path,
) -> None:
    service = FewFiles(tmp_path, "--store", str(tmp_path / "run.db"), "--api-key", "s3cret").start()
    kept = [http.client.HTTPConnection("127.0.0.1", service.port, timeout=60) for _ in range(32)]

    def ask(
        connection: http.client.HTTPConnection, method: str, path: str, body: object = None
    ) -> None:
        connection.request(method, path, None if body is None else json.dumps(body), KEY)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()

    ask(kept[0], "POST", "/register", trainer(batch_size=4))
    for connection in kept:
        ask(connection, "GET", "/status")
    sockets = [connection.sock for connection in kept]
    flood = Flood(service.port)
    flood.start()
    until(lambda: flood.replaced > 2 * FILES, "the strangers' connections are closed")
    for mark in range(6):
        answer = httpx.post(
            f"{service.http.base_url}/scored_data", json=group(mark=mark), headers=KEY, timeout=60
        )
        assert answer.status_code == 200
    stranger = httpx.post(f"{service.http.base_url}/ui/sign-in", content=b"x" * 100_000, timeout=60)
    assert stranger.status_code == 413, "nothing of the space for bodies goes to strangers"
    before = flood.replaced
    until(lambda: flood.replaced > before + 50, "the flood goes on")
    for connection in kept:
        ask(connection, "GET", "/batch")
    assert [connection.sock for connection in kept] == sockets, (
        "idle connections of callers with the key were kept"
    )
    flood.over.set()
    flood.join(60)
    for connection in kept:
        connection.close()
    log = service.log.read_text()
    assert (
        f"limit on open files (ulimit -n): {FILES}; connections held at a time: at most {MOST}"
        in log
    )
    assert "too many connections: closed" in log
    assert "Too many open files" not in log
    service.signal(signal.SIGTERM)
