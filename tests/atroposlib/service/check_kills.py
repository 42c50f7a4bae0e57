#!/usr/bin/env python3
"""Load on the durable rollout service while it is killed and started again. No accepted group may
be lost, doubled or changed.

    python tests/atroposlib/service/check_kills.py                                   # 200 clients, two minutes, five kills
    python tests/atroposlib/service/check_kills.py --clients 50 --minutes 10 --kills 40

Each client posts one group after the other. It repeats a post with the same idempotency key until
the service accepts it. One trainer takes and acknowledges batches, and compares every group with
the posted one. The load shares the machine's cores with the service. Prints a table, writes
bench/results/service_kills.json, and ends with status 1 if a group went wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(
    ROOT
)  # run by path: import from the repository, and never a sibling file by a bare name

import argparse
import http.client
import json
import os
import random
import signal
import sqlite3
import statistics
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from bench.gpu.processes import free_port
from bench.measured import measured
from bench.rollout_api_load import machine, ours
from example_trainer.child_processes.processes import Supervisor

SEQUENCES, TOKENS = 4, 32
"""Sizes of each group."""
GROUPS_IN_BATCH = 16
START_SECONDS = 180.0
"""Time for the service to answer after a start."""
END_SECONDS = 300.0
"""Time after the load for the last posts and batches."""
PER_CLIENT = 1_000_000
"""Numbers of groups that one client has."""
PACKAGES = ("fastapi", "starlette", "uvicorn", "httptools", "pydantic", "orjson")


def group_of(number: int) -> dict[str, Any]:
    """Return the group with this number.

    Its first token is the number, and the number decides all other values.
    """
    chance = random.Random(number)
    rows = [
        [number, *(chance.randrange(100_000) for _ in range(TOKENS - 1))] for _ in range(SEQUENCES)
    ]
    return {
        "tokens": rows,
        "masks": [[-100, *row[1:]] for row in rows],
        "scores": [chance.uniform(-1, 1) for _ in rows],
        "inference_logprobs": [[1.0, *(-chance.random() for _ in row[1:])] for row in rows],
    }


@dataclass
class Ledger:
    """Accepted and trained groups, by number."""

    accepted: Counter[int] = field(default_factory=Counter)
    trained: Counter[int] = field(default_factory=Counter)
    changed: list[int] = field(default_factory=list)
    batches: int = 0

    def train(self, batch: list[dict[str, Any]]) -> None:
        """Count the groups of a batch, and compare each with the posted one."""
        self.batches += 1
        for entry in batch:
            number = entry["tokens"][0][0]
            self.trained[number] += 1
            posted = group_of(number)
            if any(entry.get(name) != value for name, value in posted.items()):
                self.changed.append(number)

    def verdict(self) -> dict[str, int]:
        """Count groups, batches and faults."""
        return {
            "groups": len(self.accepted),
            "batches": self.batches,
            "lost": len(self.accepted.keys() - self.trained.keys()),
            "doubled": sum(count - 1 for count in self.trained.values()),
            "never accepted": len(self.trained.keys() - self.accepted.keys()),
            "changed": len(self.changed),
        }


FAULTS = ("lost", "doubled", "never accepted", "changed")


class Connection:
    """One client's connection, opened again after each kill of the service."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.broken = 0
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Return the answer to a request that is repeated until the service has answered it with
        200.

        Raises:
            RuntimeError: the service refused it, or did not answer in time.
        """
        content = None if body is None else json.dumps(body)
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            try:
                self._http.request(method, path, content, {"content-type": "application/json"})
                response = self._http.getresponse()
                data = response.read()
            except (OSError, http.client.HTTPException):
                self.broken += 1
                self._http.close()
                time.sleep(0.05)
                continue
            if response.status == 200:
                return json.loads(data)
            if response.status not in (429, 503):
                raise RuntimeError(f"{method} {path}: {response.status} {data[:300]!r}")
            time.sleep(0.2)
        raise RuntimeError(f"{method} {path}: no answer with 200 within {END_SECONDS:g} s")


class Poster(threading.Thread):
    """A client that posts groups until the load ends.

    `failure` has the reason if it ended before.
    """

    def __init__(
        self, port: int, index: int, ledger: Ledger, lock: threading.Lock, over: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self.connection = Connection(port)
        self.failure = ""
        self._first, self._ledger, self._lock, self._over = (
            (index + 1) * PER_CLIENT,
            ledger,
            lock,
            over,
        )

    def run(self) -> None:
        """Post."""
        number = self._first
        try:
            while not self._over.is_set():
                self.post(number)
                number += 1
        except RuntimeError as error:
            self.failure = str(error)

    def post(self, number: int) -> None:
        """Post one group."""
        answer = self.connection.request(
            "POST", "/scored_data", group_of(number) | {"idempotency_key": f"group {number}"}
        )
        if answer["status"] != "received":
            raise RuntimeError(f"group {number} was not received: {answer}")
        with self._lock:
            self._ledger.accepted[number] += 1


class Trainer(threading.Thread):
    """A trainer that acknowledges each batch.

    Like every trainer it recognises a batch that it has trained already.
    """

    def __init__(self, port: int, ledger: Ledger) -> None:
        super().__init__(daemon=True)
        self.connection = Connection(port)
        self.failure = ""
        self.until: int | None = None
        """Groups after which it ends; None while the load goes on."""
        self._ledger = ledger

    def run(self) -> None:
        """Train."""
        last = 0
        try:
            while self.until is None or len(self._ledger.trained) < self.until:
                answer = self.connection.request("GET", "/batch")
                if answer["batch"] is None:
                    time.sleep(0.01)
                    continue
                if answer["batch_id"] != last:
                    self._ledger.train(answer["batch"])
                    last = answer["batch_id"]
                self.connection.request(
                    "POST", "/batch/ack", {"batch_id": last, "weight_version": self._ledger.batches}
                )
        except RuntimeError as error:
            self.failure = str(error)


class Service:
    """The service's process, which can be killed and started again."""

    def __init__(self, port: int, folder: Path, supervisor: Supervisor) -> None:
        self._command, self._log = ours(port, folder), folder / "service.log"
        self._port, self._supervisor = port, supervisor
        self.start()

    def start(self) -> float:
        """Start the service, and return the seconds until it answers."""
        began, url = time.monotonic(), f"http://127.0.0.1:{self._port}/"
        self._process = self._supervisor.start("the service", self._command, self._log)
        self._supervisor.wait_for_http(self._process, url, START_SECONDS, interval=0.02)
        return time.monotonic() - began

    def kill(self) -> None:
        """Kill the service as a crash would, and wait for its end."""
        os.kill(self._process.command_pid(), signal.SIGKILL)
        self._supervisor.stop(self._process)


def put_load(clients: int, seconds: float, kills: int) -> dict[str, Any]:
    """Run the load with its kills, and return the counts."""
    port, ledger, lock, over = free_port(), Ledger(), threading.Lock(), threading.Event()
    chance = random.Random(0)
    (ROOT / "runs").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="rollouts", dir=ROOT / "runs") as folder,
        Supervisor() as supervisor,
    ):
        service = Service(port, Path(folder), supervisor)
        trainer = Trainer(port, ledger)
        register(trainer.connection)
        posters = [Poster(port, index, ledger, lock, over) for index in range(clients)]
        for thread in (trainer, *posters):
            thread.start()
        restarts = []
        for _ in range(kills):
            time.sleep(seconds / (kills + 1) * chance.uniform(0.8, 1.2))
            service.kill()
            restarts.append(service.start())
        time.sleep(seconds / (kills + 1))
        over.set()
        finish(trainer, posters, ledger)
    failures = [thread.failure for thread in (trainer, *posters) if thread.failure]
    broken = sum(thread.connection.broken for thread in (trainer, *posters))
    times = {
        "restart_seconds": restarts,
        "restart_seconds_median": statistics.median(restarts) if restarts else None,
    }
    return {
        **ledger.verdict(),
        "failed clients": failures,
        "requests without an answer": broken,
        **times,
    }


def register(connection: Connection) -> None:
    """Register a trainer that acknowledges its batches."""
    names = {"wandb_group": "g", "wandb_project": "p", "checkpoint_dir": "c", "ack_batches": True}
    numbers = {
        "batch_size": SEQUENCES * GROUPS_IN_BATCH,
        "max_token_len": TOKENS,
        "save_checkpoint_interval": 0,
    }
    connection.request(
        "POST", "/register", {**names, **numbers, "starting_step": 0, "num_steps": 10**6}
    )


def finish(trainer: Trainer, posters: list[Poster], ledger: Ledger) -> None:
    """Wait for the last posts, fill the last batch, and wait until the trainer has every group."""
    deadline = time.monotonic() + END_SECONDS
    for poster in posters:
        poster.join(max(0.0, deadline - time.monotonic()))
    for number in range(-len(ledger.accepted) % GROUPS_IN_BATCH):
        posters[0].post((len(posters) + 1) * PER_CLIENT + number)
    trainer.until = len(ledger.accepted)
    trainer.join(max(0.0, deadline - time.monotonic()))
    trainer.failure = trainer.failure or (
        "it waits for batches after the end" if trainer.is_alive() else ""
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the load, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--clients", type=int, default=200, help="connections that post (default: 200)"
    )
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="of the load, restarts not counted (default: 2)"
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=5,
        help="kill -9 of the service, each with a start after it (default: 5)",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench" / "results" / "service_kills.json"
    )
    given = parser.parse_args(arguments)
    described = machine()
    versions = {name: version(name) for name in PACKAGES} | {"sqlite": sqlite3.sqlite_version}
    counted = put_load(given.clients, 60 * given.minutes, given.kills)
    asked = {"clients": given.clients, "minutes": given.minutes, "kills": given.kills}
    results = {
        "machine": described,
        "versions": versions,
        "measured": measured(),
        **asked,
        **counted,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(results, indent=2) + "\n")
    for name, value in (asked | counted).items():
        print(f"{name:28} {value}")
    good = not counted["failed clients"] and not any(counted[name] for name in FAULTS)
    print(
        "every accepted group was trained once, unchanged"
        if good
        else "ERROR: groups or clients went wrong, see above"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
