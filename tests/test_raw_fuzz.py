"""The fuzzing of raw sockets finds servers that fail, hang or speak no HTTP, and repeats its
inputs.
"""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import raw_fuzz
from tests.raw_requests import ENDS, Target, attempt

TARGETS = [Target("GET", "/"), Target("POST", "/x", {"tokens": [[1, 2], [3]], "text": "a"})]


@contextmanager
def server(answer: bytes) -> Iterator[tuple[str, int]]:
    """A server that gives one answer to whatever comes, and closes the connection; it hangs if the
    answer is empty.
    """
    over = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 20)
            self.request.sendall(answer)
            if not answer:
                over.wait(60)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as served:
        served.daemon_threads = True
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield served.server_address  # type: ignore[misc]
        finally:
            over.set()
            served.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (
            b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n",
            "answered b'HTTP/1.1 500",
        ),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\nHTTP/1.1 502 Bad Gateway\r\n\r\n",
            "502 Bad Gateway",
        ),
        (b"<html>", "answered no HTTP: b'<html>'"),
        (b"", "no answer and no end of the connection within 0.5 s"),
    ],
)
def test_a_bad_server_is_found(answer: bytes, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not answer:
        monkeypatch.setattr(raw_fuzz, "HANG_SECONDS", 0.5)
    with server(answer) as address:
        outcome = raw_fuzz.run(address, TARGETS, 3, range(20))
    assert outcome.faults
    assert all(fault in line and line.startswith("seed 3, input ") for line in outcome.faults)


def test_refusals_are_no_faults() -> None:
    with server(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n") as address:
        outcome = raw_fuzz.run(address, TARGETS, 3, range(20))
    assert outcome.faults == []
    assert outcome.statuses.keys() == {503}


def test_a_seed_and_a_number_give_the_same_bytes() -> None:
    made = [attempt(5, number, TARGETS, "h") for number in range(400)]
    assert made == [attempt(5, number, TARGETS, "h") for number in range(400)]
    assert made != [attempt(6, number, TARGETS, "h") for number in range(400)]
    assert {one.end for one in made} == set(ENDS)
    kinds = " ".join(kind for one in made for kind in one.kinds)
    for kind in (
        "gzip: cut",
        "body: deep",
        "chunks of",
        "content-length",
        "requests",
        "more lines",
        "method",
        "cut",
    ):
        assert kind in kinds


def test_a_traceback_in_a_log_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("fine\nTraceback (most recent call last):\n  File\nValueError: x\n")
    assert raw_fuzz.faults_in(log) == ["Traceback (most recent call last):\n  File\nValueError: x"]
    log.write_text("a warning\n")
    assert raw_fuzz.faults_in(log) == []
