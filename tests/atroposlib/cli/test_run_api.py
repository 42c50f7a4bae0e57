"""The command: its messages, its end, and what it refuses."""

from __future__ import annotations

import gzip
import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.atroposlib.service.conftest import ROOT, Service, group, marks, trainer
from tests.forked_commands import run_command

pytestmark = pytest.mark.nightly


def run(*flags: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return run_command([sys.executable, "-m", "atroposlib.cli.run_api", *flags], environment, cwd)


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--port", str(port), "--store", "memory")
    assert done.returncode == 1
    assert re.fullmatch(
        rf"error: \[Errno 98\] port {port} is in use by .+ \(pid \d+\); stop it or pass --port\n",
        done.stdout,
    ), done.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "70000"], "--port: '70000': input should be less than or equal to 65535"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--prot", "8001"], "unrecognized arguments: --prot 8001; did you mean --port?"),
        (["--max-queue-bytes", "lots"], "'lots': give a number of bytes"),
        (["--request-timeout", "-1"], "'-1': input should be greater than 0"),
        (["--host", "no.such.host.invalid", "--port", "0"], "cannot be resolved"),
        (["--host", "192.0.2.1", "--port", "0"], "cannot listen on 192.0.2.1"),
        (["--run-folder", "/etc/passwd"], "/etc/passwd is a file; give the folder of the run"),
        (["--run-folder", "/etc/passwd/below"], "/etc/passwd is a file; give the folder of the"),
        (["--tokenizer", "/nope"], "there is no /nope/tokenizer.json; give a folder that has one"),
        (["--store", "/nowhere/at/all.db", "--port", "0"], "the folder /nowhere/at does not exist"),
    ],
)
def test_bad_flags_are_one_clear_line(flags: list[str], says: str) -> None:
    done = run(*flags)
    assert done.returncode != 0
    last = done.stdout.strip().splitlines()[-1]
    assert "error: " in last
    assert says in last
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_runs_and_ends_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    service = Service(tmp_path, "--store", str(tmp_path / "a.db")).start()
    service.begin()
    with httpx.stream("GET", f"http://127.0.0.1:{service.port}/ui/api/stream", timeout=60) as page:
        events = page.iter_lines()
        assert next(events).startswith("retry"), "a page is open"
        assert service.signal(number) == 0
        assert '{"reason":"stopping"}' in "".join(events)
    log = service.log.read_text()
    assert f"Uvicorn running on http://127.0.0.1:{service.port}" in log
    assert log.rstrip().endswith("stopped")
    assert "Traceback" not in log
    assert not (tmp_path / "a.db-wal").exists(), "the log is folded into the file"


def until_refused(port: int) -> None:
    """Wait until a port has no listener any more: a service that is to end takes no more
    connections.
    """
    deadline = time.monotonic() + 60
    with suppress(ConnectionRefusedError):
        while time.monotonic() < deadline:
            socket.create_connection(("127.0.0.1", port)).close()
            time.sleep(0.02)
        raise AssertionError(f"port {port} still takes connections after 60 s")


def test_a_request_under_way_is_answered_before_the_end(tmp_path: Path) -> None:
    service = Service(tmp_path, "--store", "memory").start()
    service.begin()
    body = json.dumps(group()).encode()
    with socket.create_connection(("127.0.0.1", service.port)) as client:
        client.settimeout(60)
        head = b"POST /scored_data HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
        client.sendall(head % len(body))
        assert client.recv(10_000) == b"HTTP/1.1 100 Continue\r\n\r\n", "the request is under way"
        client.sendall(body[:20])
        assert service.process is not None
        service.process.send_signal(signal.SIGTERM)
        until_refused(service.port)
        client.sendall(body[20:])
        answer = client.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 200")
    assert service.signal(signal.SIGTERM) == 0


def listening_address(port: int) -> str:
    """The local address that listens on the port, as /proc/net/tcp writes it.

    The kernel writes the table piece by piece: while others' sockets come and go, a line may be
    missing from one reading.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].split(":")[1], 16) == port:
                return fields[1].split(":")[0]
        time.sleep(0.02)
    raise AssertionError(f"nobody listens on {port}")


@pytest.mark.parametrize(
    ("flags", "address"),
    [([], "0100007F"), (["--api-key", "s3cret"], "00000000"), (["--host", "0.0.0.0"], "00000000")],
    ids=["alone", "with a key", "told so"],
)
def test_it_listens_to_other_machines_only_with_a_key_or_when_told(
    tmp_path: Path, flags: list[str], address: str
) -> None:
    service = Service(tmp_path, "--store", "memory", *flags).start()
    assert listening_address(service.port) == address
    service.signal(signal.SIGTERM)


def test_the_api_key(tmp_path: Path) -> None:
    service = Service(tmp_path, "--store", "memory", environ={"ROLLOUT_API_KEY": "s3cret"}).start()
    assert service.http.get("/").status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}):
        for path in ("/status", "/metrics", "/batch", "/openapi.json"):
            answer = service.http.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
    assert (
        service.http.get("/status", headers={"authorization": "Bearer s3cret"}).status_code == 200
    )
    preflight = {"origin": "http://x", "access-control-request-method": "POST"}
    assert service.http.options("/scored_data", headers=preflight).status_code == 401
    anywhere = {
        "authorization": "Bearer s3cret",
        "host": "behind.a.proxy",
        "origin": "http://behind.a.proxy",
    }
    assert service.http.get("/status", headers=anywhere).status_code == 200, (
        "whoever has the key may come from anywhere"
    )
    assert "s3cret" not in service.log.read_text()
    service.signal(signal.SIGTERM)


def test_bounds(tmp_path: Path) -> None:
    service = Service(
        tmp_path,
        "--store",
        "memory",
        "--max-queue-groups",
        "2",
        "--max-body-bytes",
        "10K",
    ).start()
    service.begin(batch_size=4)
    for _ in range(2):
        service.post("/scored_data", group())
    answer = service.http.post("/scored_data", json=group())
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    service.get("/batch")
    service.get("/batch")
    service.post("/scored_data", group())
    assert service.http.post("/scored_data", json=group(length=5000)).status_code == 413
    bomb = gzip.compress(b" " * 50_000_000)
    assert (
        service.http.post(
            "/scored_data", content=bomb, headers={"content-encoding": "gzip"}
        ).status_code
        == 413
    )
    chunks = (b" " * 1000 for _ in range(20))
    assert service.http.post("/scored_data", content=chunks).status_code == 413
    service.signal(signal.SIGTERM)


def test_a_store_is_continued(tmp_path: Path) -> None:
    service = Service(tmp_path, "--store", str(tmp_path / "run.db")).start()
    service.begin(batch_size=4)
    for mark in range(3):
        service.post("/scored_data", group(mark=mark, env_id=0))
    assert marks(service.get("/batch")["batch"]) == [0]
    uuid = service.post("/register", trainer(batch_size=4))["uuid"]
    service.signal(signal.SIGKILL)
    service.start()
    assert service.status_env(0).status_code == 200, "the environment is still known"
    assert marks(service.http.get("/batch", params={"uuid": uuid}).json()["batch"]) == [0]
    assert service.get("/info")["batch_size"] == 4
    service.signal(signal.SIGTERM)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{service.port}/")


def answer_to(service: Service, *parts: bytes, pause: float = 0.0) -> bytes:
    """Return the service's reply to bytes that are sent one after the other, until it closes the
    connection.
    """
    with socket.create_connection(("127.0.0.1", service.port)) as client:
        client.settimeout(60)
        said = b""
        with suppress(
            ConnectionError
        ):  # closed while bytes were on their way: the reply before may be lost with them
            for part in parts:
                client.sendall(part)
                time.sleep(pause)
            while chunk := client.recv(10_000):
                said += chunk
    return said


def test_a_connection_that_sends_no_request_is_closed(tmp_path: Path) -> None:
    service = Service(tmp_path, "--store", "memory", "--request-timeout", "4").start()
    whole = b"GET /status HTTP/1.1\r\nhost: localhost\r\n\r\n"
    assert answer_to(service).startswith(b"HTTP/1.1 408 ")
    assert answer_to(service, b"GET /status HTTP/1.1\r\nhost:").startswith(b"HTTP/1.1 408 ")
    drops = [b"x-a: b\r\n"] * 25  # never silent, and never done
    assert answer_to(service, b"GET /status HTTP/1.1\r\n", *drops, whole, pause=0.2)[9:12] in (
        b"",
        b"408",
    )
    second = answer_to(service, whole, whole[:10])
    assert second.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in second, "the limit holds for later requests on the connection too"
    long = b"GET /status HTTP/1.1\r\nx: " + b"y" * 100_000
    assert answer_to(service, long)[9:12] in (b"", b"431")
    assert "closing a connection that sent no request: 431" in service.log.read_text()
    slow = answer_to(service, whole[:-2], b"connection: close\r\n", b"\r\n", pause=0.2)
    assert slow.startswith(b"HTTP/1.1 200 "), "slow is not late"
    for _ in range(2):
        service.get("/status")
        time.sleep(
            4.5
        )  # between requests a connection may be idle for longer than a request may take
    assert service.log.read_text().count("sent no request: 408") == 4
    with socket.create_connection(("127.0.0.1", service.port)) as client:
        client.sendall(
            b"POST /scored_data HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
        )
        client.settimeout(60)
        assert client.recv(1000).startswith(b"HTTP/1.1 408"), "a body has the same limit"
    service.signal(signal.SIGTERM)


def test_a_body_that_comes_after_its_refusal_is_no_head(tmp_path: Path) -> None:
    service = Service(tmp_path, "--store", "memory", "--api-key", "s3cret").start()
    head = b"POST /scored_data HTTP/1.1\r\nhost: localhost\r\ncontent-length: 300000\r\n\r\n"
    last = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    said = answer_to(service, head, *[b" " * 100_000] * 3, last, pause=0.1)
    assert said.startswith(b"HTTP/1.1 401 ")
    assert b"HTTP/1.1 431" not in said
    assert b"AtroposLib API" in said
    service.signal(signal.SIGTERM)
