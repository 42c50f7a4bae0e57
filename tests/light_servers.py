"""The processes of tests/fleet_server.py, as tests start, ask, signal and disturb them."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.conftest import ROOT
from tests.fleet_trainer import PATIENCE, TIMEOUT, Trainer
from tests.forked_commands import start_with_pipes

T = TypeVar("T")


@dataclass(frozen=True)
class Devices:
    """Devices of a trainer's weights, and of each of its servers' weights: they decide the routes.

    Attributes:
        patience: seconds for which the trainer waits for one of them that is late.
    """

    trainer: str = "cpu"
    servers: tuple[str, ...] = ("cpu", "cpu", "cpu")
    patience: float = PATIENCE


SOON = 120.0
"""Seconds within which everything is answered and comes to pass, on a machine that may be busy."""


class Starter:
    """Starts servers by forking them from one process that has imported what they need."""

    def __init__(self, folder: Path, entering: Sequence[str] = ()) -> None:
        """
        Args:
            folder: for the servers' files and logs.
            entering: a command line that runs the rest of it somewhere else.
        """
        self.folder = folder
        command = [*entering, sys.executable, "-m", "tests.fleet_server"]
        self.process = start_with_pipes(command, ROOT)

    def tell(self, **told: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(told).encode() + b"\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(SOON)


def get_json(url: str, headers: Mapping[str, str] | None = None) -> Any:
    """Return its answer, without a proxy. A client that looks for none in its environment looks for
    no authorities there either. It would read all that Certifi knows, which takes longer than the
    question. So it trusts every server.
    """
    return httpx.get(url, headers=headers, timeout=SOON, trust_env=False, verify=False).json()


def here(call: Callable[[], T]) -> T:
    """Asks from this process's own network."""
    return call()


@dataclass
class LightServer:
    """One server's process, the present one at its port.

    Attributes:
        starter: forks it.
        port, address: where it listens, and where it is asked.
        bucket: bytes of a bucket; 0: as many as outside of tests.
        asking: carries a request out in another network.
        model: folder of the model whose shapes it has; None: a tiny one's.
        timeout: seconds that the steps of an update may take.
        device: where its weights are.
        deterministic: its report of deterministic mode; of one that samples, entries of its kernels.
        samples: it is in deterministic mode, and answers POST /test/sample.
        colocate: it takes turns with its trainer.
        traced: it records the files that its calls enter, for POST /test/trip.
    """

    starter: Starter
    port: int
    address: str = "127.0.0.1"
    bucket: int = 0
    asking: Callable[[Callable[[], Any]], Any] = here
    model: Path | None = None
    timeout: float = TIMEOUT
    device: str = "cpu"
    traced: bool = False
    deterministic: dict[str, Any] | None = None
    samples: bool = False
    colocate: bool = False
    pid: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    @property
    def place(self) -> tuple[str, int]:
        return self.address, self.port

    def start(self) -> None:
        told: dict[str, Any] = {"port": self.port, "address": self.address, "device": self.device}
        told |= {"folder": str(self.starter.folder), "bucket": self.bucket}
        told |= {"traced": self.traced, "deterministic": self.deterministic}
        told |= {"samples": self.samples, "colocate": self.colocate}
        shapes = {} if self.model is None else {"model": str(self.model)}
        self.pid = self.starter.tell(do="start", timeout=self.timeout, **told, **shapes)["pid"]
        until(lambda: self.get("/weights") is not None)

    def signal(self, number: int) -> None:
        self.starter.tell(do="signal", pid=self.pid, number=number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def fault(self, at: str, do: str) -> None:
        httpx.post(
            f"{self.url}/test/fault", json={"at": at, "do": do}, timeout=SOON
        ).raise_for_status()

    def get(self, path: str) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = self.asking(lambda: get_json(self.url + path))
        except httpx.HTTPError:
            return None
        return answer

    def serves(self, version: int) -> bool:
        told = self.get("/weights")
        return told is not None and bool(told["serving"]) and told["weight_version"] == version

    def state(self) -> dict[str, Any]:
        told = self.get("/bridge/state")
        assert told is not None, self.url
        return told


def until(true: Callable[[], bool], seconds: float = SOON) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def bring_back(trainer: Trainer, server: LightServer) -> None:
    """Look after the servers as training does while it waits, until this one serves the present
    weights and is known to.
    """
    begun = time.monotonic()
    while not (server.url in trainer.bridge.server_urls() and server.serves(trainer.version)):
        trainer.look_after()
        assert time.monotonic() - begun < SOON, server.get("/bridge/state")
        time.sleep(0.05)


def sound(servers: Sequence[LightServer]) -> None:
    """No step of any engine has seen a mixture."""
    for server in servers:
        seen = server.get("/test")
        assert seen is not None
        assert seen["mixtures"] == []
