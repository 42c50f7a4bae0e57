"""Faults that the service must survive, done to real processes: kills, cut connections, jumping
clocks, rival trainers.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import ROOT, Service, environment, group, marks, trainer
from .killed_service import DEADLINE, survive_kills, until

pytestmark = pytest.mark.nightly


@pytest.mark.timeout(600)  # twenty starts of a process, on a machine that may be busy
def test_twenty_kills_under_load_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    survive_kills(tmp_path, kills=20)


TRAINER = """
import sys, time
import httpx
http = httpx.Client(base_url=sys.argv[1], timeout=60)
http.post("/register", json={"wandb_group": "g", "wandb_project": "p", "batch_size": 8, "max_token_len": 128,
    "checkpoint_dir": "c", "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 100}).raise_for_status()
batch = http.get("/batch").json()
print([group["tokens"][0][0] for group in batch["batch"]], flush=True)
if sys.argv[2] == "ack":
    http.post("/batch/ack", json={"batch_id": batch["batch_id"], "weight_version": 1}).raise_for_status()
    print("acked", flush=True)
time.sleep(60)  # training
"""


def run_trainer_and_kill_it(service: Service, lines: int, mode: str) -> list[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(service.http.base_url), mode],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = [process.stdout.readline().strip() for _ in range(lines)]
    process.kill()
    process.wait(60)
    return said


def test_a_trainer_killed_between_batch_and_ack_gets_its_batch_again(tmp_path: Path) -> None:
    service = Service(tmp_path, "--store", str(tmp_path / "run.db")).start()
    service.begin()
    for mark in range(4):
        service.post("/scored_data", group(mark=mark))
    assert run_trainer_and_kill_it(service, 1, "train") == ["[0, 1]"]
    service.signal(signal.SIGKILL)  # and the service with it
    service.start()
    assert run_trainer_and_kill_it(service, 2, "ack") == ["[0, 1]", "acked"]
    assert run_trainer_and_kill_it(service, 2, "ack") == ["[2, 3]", "acked"]
    service.signal(signal.SIGTERM)


ENVIRONMENT = """
import json, socket, sys, time
body = sys.stdin.buffer.readline()
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
head = b"POST /scored_data HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body)
sock.sendall(head + body[:len(body) // 2])
print("half", flush=True)
print(sock.recv(1000), flush=True)
"""


def test_an_environment_killed_in_the_middle_of_a_group(service: Service) -> None:
    """Its half group belongs to no batch, and later groups do not wait for it."""
    service.begin(batch_size=4)
    process = subprocess.Popen(
        [sys.executable, "-c", ENVIRONMENT, str(service.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(group(mark=66, length=5000, env_id=0)) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "half\n"
    service.post("/scored_data", group(mark=1))
    answered, _, _ = select.select([process.stdout], [], [], 0)
    assert not answered, "the others did not wait until the stuck upload was given up"
    process.kill()
    process.wait(60)
    service.post(
        "/scored_data", group(2, mark=2, env_id=0)
    )  # half a group in the other sense: it stays in the buffer
    service.post("/scored_data", group(mark=3))
    assert marks(service.get("/batch")["batch"]) == [1]
    assert marks(service.get("/batch")["batch"]) == [3]
    assert service.get("/batch") == {"batch": None}
    service.post("/scored_data", group(2, mark=4, env_id=0))
    assert marks(service.get("/batch")["batch"]) == [2, 4]


def pump(source: socket.socket, target: socket.socket) -> None:
    """Hand on everything until one side ends."""
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        return


class CuttingProxy:
    """A TCP proxy that cuts answers after 200 bytes until it works."""

    def __init__(self, port: int, how: str) -> None:
        self.port, self.how = port, how
        self.works, self.over = threading.Event(), threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(0.2)

    def accept(self) -> None:
        """Serve clients until the end, each in a thread."""
        while not self.over.is_set():
            try:
                client, _ = self.listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self.port)) as server:
            client.settimeout(60)
            server.settimeout(60)
            threading.Thread(target=pump, args=(client, server), daemon=True).start()
            passed = 0
            try:
                while data := server.recv(4096):
                    if self.works.is_set():
                        client.sendall(data)
                        continue
                    client.sendall(data[: max(0, 200 - passed)])
                    passed += len(data)
                    if passed >= 200:
                        self.cut(client)
                        return
            except OSError:
                return

    def cut(self, client: socket.socket) -> None:
        if self.how == "stall":
            self.over.wait(20)
        elif self.how == "reset":
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


@contextmanager
def proxy(port: int, how: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """A TCP proxy that cuts the first answers in the middle: it stalls, resets or truncates.

    Afterwards it works.
    """
    cutting = CuttingProxy(port, how)
    accepting = threading.Thread(target=cutting.accept, daemon=True)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{cutting.listener.getsockname()[1]}", cutting.works.set
    finally:
        cutting.over.set()
        accepting.join(60)
        cutting.listener.close()


@pytest.mark.parametrize("how", ["stall", "reset", "truncate"])
def test_a_network_that_cuts_answers_loses_and_doubles_nothing(service: Service, how: str) -> None:
    service.begin(batch_size=4, ack_batches=True)
    body = group(mark=1, length=300, idempotency_key=f"once through a network that would {how}")
    with proxy(service.port, how) as (url, mend), httpx.Client(base_url=url, timeout=2) as http:
        failures = 0
        for attempt in range(4):
            try:
                # a long answer to a short post, so that its end is what gets lost
                http.post("/scored_data", json=body).raise_for_status()
                answer = http.get("/batch")
                assert marks(answer.json()["batch"]) == [1]
                break
            except httpx.TransportError:
                failures += 1
            if attempt == 1:
                mend()
                http.timeout = httpx.Timeout(
                    DEADLINE
                )  # two seconds show a stall, and are short for a busy machine
        assert failures == 2
        assert answer.json()["batch_id"] == 1, "the batch whose answer was cut came again"
        http.post("/batch/ack", json={"batch_id": 1, "weight_version": 1}).raise_for_status()
        assert http.get("/batch").json() == {"batch": None}
    assert service.get("/stats")["queue"]["held_groups"] == 0


def test_a_trainer_that_resets_its_connection_gets_the_batch_again_without_acks(
    service: Service,
) -> None:
    """A client of the old wire that goes away in the middle of an answer must not lose what it did
    not get.
    """
    service.begin(batch_size=8)
    for mark in (1, 2):
        service.post("/scored_data", group(length=100_000, mark=mark))
    with socket.create_connection(("127.0.0.1", service.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /batch HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    until(
        lambda: not any(lease["sent"] for lease in service.get("/stats")["leases"]),
        "the service notices",
    )
    batches: list[Any] = []

    def asked() -> bool:
        batches.append(service.get("/batch")["batch"])
        return batches[-1] is not None

    until(asked, "the batch comes again")
    assert marks(batches[-1]) == [1, 2]


JUMPING_CLOCK = """
import random, time
real, chance = time.time, random.Random(1)
time.time = lambda: real() + chance.choice([-1, 1]) * chance.uniform(0, 10 * 365 * 86400)
"""


def test_a_wall_clock_that_jumps_by_years_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK)
    environ = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    service = Service(tmp_path, "--store", str(tmp_path / "run.db"), environ=environ).start()
    service.begin(batch_size=8, env=environment(min_batch_allocation=0.5), max_staleness=1)
    for mark in range(4):
        service.post("/scored_data", group(mark=mark, env_id=0, weight_versions=[0] * 4))
    assert service.status_env(0).json()["unallocated_fraction"] == 0.5
    batch = service.get("/batch")
    assert marks(batch["batch"]) == [0, 1]
    service.signal(signal.SIGKILL)
    service.start()
    assert service.get("/batch", received=0)["batch_id"] == batch["batch_id"]
    service.post("/batch/ack", {"batch_id": batch["batch_id"], "weight_version": 1})
    assert marks(service.get("/batch")["batch"]) == [2, 3]
    assert service.get("/stats")["dropped"] == []
    assert service.get("/stats")["environments"][0]["seconds_silent"] < 60
    service.signal(signal.SIGTERM)


def test_two_trainers_at_once_share_nothing_and_the_first_is_told(service: Service) -> None:
    service.begin(batch_size=4)
    for mark in range(60):
        service.post("/scored_data", group(mark=mark))
    learned: list[int] = []
    superseded: list[str] = []
    lock = threading.Lock()

    def train(http: httpx.Client, uuid: int) -> None:
        while True:
            answer = http.get("/batch", params={"uuid": uuid})
            if answer.status_code == 409:
                superseded.append(answer.json()["detail"])
                return
            batch = answer.json()
            if batch["batch"] is None:
                return
            acked = http.post("/batch/ack", json={"batch_id": batch["batch_id"], "uuid": uuid})
            with lock:
                if acked.status_code == 200:
                    learned.extend(marks(batch["batch"]))

    def register_and_train(delay: float) -> None:
        time.sleep(delay)
        with httpx.Client(base_url=service.http.base_url, timeout=60) as http:
            uuid = http.post("/register", json=trainer(batch_size=4, ack_batches=True)).json()[
                "uuid"
            ]
            train(http, uuid)

    threads = [threading.Thread(target=register_and_train, args=(delay,)) for delay in (0.0, 0.05)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(learned) == list(range(60)), "each group was learned from once"
    assert all("another trainer has registered" in text for text in superseded)


def test_a_full_disk_refuses_new_data_and_keeps_the_old(tmp_path: Path) -> None:
    """A limit on file sizes makes the kernel refuse to write on, as a full disk does."""

    class Limited(Service):
        def command(self) -> list[str]:
            return [
                "bash",
                "-c",
                'ulimit -f 3000; exec "$@"',
                "limited",
                *super().command(),
            ]  # in KiB

    service = Limited(tmp_path, "--store", str(tmp_path / "run.db")).start()
    service.begin(batch_size=4)
    accepted = []
    for mark in range(200):
        answer = service.http.post("/scored_data", json=group(mark=mark, length=2000))
        if answer.status_code != 200:
            break
        accepted.append(mark)
    assert answer.status_code == 507
    assert "free some space" in answer.json()["detail"]
    assert len(accepted) > 3
    assert answer.headers["retry-after"]
    assert service.http.get("/status").status_code == 200
    service.signal(signal.SIGKILL)
    service = Service(tmp_path, "--store", str(tmp_path / "run.db")).start()
    kept = [marks(service.get("/batch")["batch"])[0] for _ in accepted]
    assert kept == accepted
    assert service.get("/batch") == {"batch": None}
    service.signal(signal.SIGTERM)
