"""Waiting: a deadline, an early end, and ports that are really free."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from example_trainer.child_processes.ports import (
    DEFAULT_RENDEZVOUS,
    HIGHEST,
    LOWEST,
    PortReservations,
    is_free,
)
from example_trainer.child_processes.processes import (
    ProcessDied,
    ProcessError,
    get_json,
    http_probe,
    wait_until,
)
from tests.http_server import HttpServer


class Clock:
    """Time that passes only in calls of sleep."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def test_ready_at_once_costs_no_time() -> None:
    clock = Clock()
    assert wait_until("x", lambda: None, 5, clock=clock, sleep=clock.sleep) == 0
    assert clock.now == 100


def test_polls_until_ready() -> None:
    clock = Clock()
    answers = iter(["starting", "loading", None])
    assert (
        wait_until("x", lambda: next(answers), 5, interval=0.5, clock=clock, sleep=clock.sleep)
        == 1.0
    )


def test_the_deadline_is_kept_and_the_last_answer_told() -> None:
    clock = Clock()
    with pytest.raises(ProcessError, match=r"the server was not ready after 5 s: loading 7"):
        wait_until(
            "the server", lambda: "loading 7", 5, interval=0.7, clock=clock, sleep=clock.sleep
        )
    assert clock.now == 105


def test_a_death_ends_the_wait_before_the_deadline() -> None:
    clock = Clock()

    def check() -> None:
        if clock.now > 101:
            raise ProcessDied("vLLM server exited with code 1")

    with pytest.raises(ProcessDied):
        wait_until("the server", lambda: "loading", 600, check, clock=clock, sleep=clock.sleep)
    assert clock.now < 102


@pytest.fixture
def server() -> Iterator[str]:
    answers = {"/ok": (200, b'{"a": 1}'), "/empty": (200, b"")}
    with HttpServer(lambda request: answers.get(request.path, (503, b"busy"))) as running:
        yield running.url


def test_http_probe_tells_what_is_missing(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "http_proxy", "http://127.0.0.1:1"
    )  # a proxy must not come between processes of one machine
    assert http_probe(f"{server}/ok")() is None
    assert http_probe(f"{server}/empty")() is None
    assert http_probe(f"{server}/else")() == f"GET {server}/else answers 503"
    assert get_json(f"{server}/ok") == {"a": 1}
    assert get_json(f"{server}/empty") is None


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"],
    ids=["another program", "killed in its answer"],
)
def test_what_is_no_whole_answer_counts_as_none(answer: bytes) -> None:
    def serve() -> None:
        for _ in range(2):
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        missing = http_probe(url)()
        with pytest.raises(OSError, match="not a whole HTTP answer"):
            get_json(url)
        server.join(60)
    assert missing is not None
    assert missing.startswith(f"GET {url}: not a whole HTTP answer")


def test_http_probe_of_nobody() -> None:
    with PortReservations() as ports:
        url = f"http://127.0.0.1:{ports.pick()}/"
        missing = http_probe(url)()
    assert missing is not None
    assert missing.startswith(f"GET {url}: ")
    assert "refused" in missing


def test_a_port_that_programs_take_without_a_reservation_is_not_picked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = iter([DEFAULT_RENDEZVOUS, DEFAULT_RENDEZVOUS + 1, DEFAULT_RENDEZVOUS + 1])
    monkeypatch.setattr("random.randrange", lambda *_: next(drawn))
    monkeypatch.setattr("example_trainer.child_processes.ports.is_free", lambda port: True)
    with PortReservations(tmp_path / "ports") as ports:
        assert ports.pick() == DEFAULT_RENDEZVOUS + 1


def test_two_runs_never_pick_the_same_port(tmp_path: Path) -> None:
    with PortReservations(tmp_path) as one, PortReservations(tmp_path) as two:
        first = [one.pick() for _ in range(20)]
        assert not any(two.take(port) for port in first)
        assert not any(one.take(port) for port in first)
        assert len(set(first) | {two.pick() for _ in range(20)}) == 40
        assert all(LOWEST <= port < HIGHEST for port in first)
        one.close()
        assert two.take(first[0])


def test_links_in_the_folder_of_reservations_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep this")
    folder = tmp_path / "ports"
    folder.mkdir()
    (folder / "20001").symlink_to(precious)
    (folder / "20002").symlink_to(tmp_path / "made-by-a-link")
    (folder / "20003").hardlink_to(precious)
    os.mkfifo(folder / "20004")
    (folder / "20005").mkdir()
    with PortReservations(folder) as ports:
        for port in (20001, 20002):
            with pytest.raises(ProcessError, match=f"{port} is a link"):
                ports.take(port)
        ports.take(20003)
        for port, said in ((20004, "is not a regular file"), (20005, "cannot reserve port 20005")):
            with pytest.raises(ProcessError, match=said):
                ports.take(port)
    assert precious.read_text() == "keep this"
    assert not (tmp_path / "made-by-a-link").exists()


def test_the_folder_of_reservations_must_be_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ProcessError, match=r"it is a link.*TMPDIR"):
        PortReservations(link)
    (tmp_path / "file").write_text("")
    with pytest.raises(ProcessError, match="TMPDIR"):
        PortReservations(tmp_path / "file")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    PortReservations(open_to_all)
    assert open_to_all.stat().st_mode & 0o777 == 0o700
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ProcessError, match=f"belongs to user {user} and not to {user + 1}"):
        PortReservations(open_to_all)


def test_a_port_that_somebody_listens_on_is_not_free(tmp_path: Path) -> None:
    with socket.socket() as busy, PortReservations(tmp_path) as ports:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert not is_free(port)
        assert not ports.take(port)
        busy.close()
        assert ports.take(port)
