"""Real servers' processes that are killed, stopped, restarted and made to lie in each phase of an update."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.errors import BridgeError
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import BridgeServer
from tests.conftest import ROOT
from tests.fleet_server import tiny_model

TIMEOUT, PATIENCE, BACK_SECONDS = 30.0, 2.0, 10.0
"""Of a server's steps; for one that is late; after which one that is back serves the present weights."""
SOON = 60.0


class Host:
    """Starts servers by forking them from one process that has imported what they need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "tests.fleet_server"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, **told: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SOON)


@dataclass
class LightServer:
    """One server's process, the present one at its port."""

    host: Host
    port: int
    pid: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.pid = self.host.tell(do="start", port=self.port, folder=str(self.host.folder), timeout=TIMEOUT)["pid"]
        until(lambda: self.get("/weights") is not None)

    def signal(self, number: int) -> None:
        self.host.tell(do="signal", pid=self.pid, number=number)

    def fault(self, at: str, do: str) -> None:
        httpx.post(f"{self.url}/test/fault", json={"at": at, "do": do}, timeout=SOON).raise_for_status()

    def get(self, path: str) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = httpx.get(self.url + path, timeout=1.0).json()
        except httpx.HTTPError:
            return None
        return answer

    def serves(self, version: int) -> bool:
        told = self.get("/weights")
        return told is not None and bool(told["serving"]) and told["weight_version"] == version


def until(true: Callable[[], bool], seconds: float = SOON) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[list[LightServer]]:
    host = Host(tmp_path_factory.mktemp("fleet"))
    found = [LightServer(host, free_port()) for _ in range(3)]
    for server in found:
        server.start()
    yield found
    host.close()


class Trainer:
    """Weights of version v are v everywhere."""

    def __init__(self, servers: list[LightServer], transfer: str, limit: float = SOON, **options: Any) -> None:
        self.model = tiny_model(full=True)
        clients = [BridgeServer("127.0.0.1", server.port, TIMEOUT, None, limit, time.sleep, 5) for server in servers]
        self.bridge = BroadcastBridge(clients, transfer, patience=PATIENCE, **options)
        self.bridge.serving_dtype()
        self.bridge.connect(self.model)
        self.version = 0
        self.step()

    def step(self) -> float:
        """One update. Returns the seconds that it took."""
        self.version += 1
        begun = time.monotonic()

        def write() -> None:
            for parameter in self.model.parameters():
                parameter.data.fill_(float(self.version))

        self.bridge.sync(self.version, write)
        return time.monotonic() - begun

    def bring_back(self, server: LightServer) -> float:
        """Look after the servers as training does while it waits. Returns the seconds until this one serves."""
        begun = time.monotonic()
        while not server.serves(self.version):
            if self.bridge.server_restarted():
                self.bridge.keep_serving(lambda: None)
            assert time.monotonic() - begun < SOON, server.get("/bridge/state")
            time.sleep(0.05)
        return time.monotonic() - begun


@contextlib.contextmanager
def training(servers: list[LightServer], transfer: str, port: int, **options: Any) -> Iterator[Trainer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(port))
        trainer = Trainer(servers, transfer, **options)
        try:
            yield trainer
        finally:
            trainer.bridge.close()


def sound(servers: list[LightServer]) -> None:
    """No step of any engine has seen a mixture."""
    for server in servers:
        seen = server.get("/test")
        assert seen is not None
        assert seen["mixtures"] == []


@pytest.fixture(scope="module", params=["direct", "overlapped"])
def trainer(request: pytest.FixtureRequest, servers: list[LightServer], free_port: Callable[[], int]) -> Iterator[Trainer]:
    with training(servers, request.param, free_port()) as one:
        yield one


@pytest.mark.parametrize(
    ("at", "do"),
    [
        ("", "kill"), ("", "stop"), ("cohort", "kill"), ("begin", "kill"), ("begin", "stop"),
        ("receive", "kill"), ("receive", "stop"), ("receive", "slow"), ("commit", "kill"), ("commit", "lie"),
    ],
)  # fmt: skip
def test_one_of_three_fails_and_training_does_not_miss_a_step(
    trainer: Trainer, servers: list[LightServer], at: str, do: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    faulty, others = servers[1], [servers[0], servers[2]]
    if at == "cohort":
        trainer.bridge._updates._keeper.members[faulty.url].joined = False  # so that the cohort is formed anew
        next(iter(trainer.bridge._lines.values())).leave()
    if at:
        faulty.fault(at, do)
    else:
        faulty.signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[do])
    seconds = trainer.step()
    assert seconds < 10 * PATIENCE
    assert all(server.serves(trainer.version) for server in others)
    assert f"[Fleet] {faulty.url} quarantined: " in caplog.text
    assert "training goes on with 2 of 3 servers" in caplog.text
    if do == "kill":
        faulty.signal(signal.SIGKILL)
        faulty.start()
    elif do == "stop":
        faulty.signal(signal.SIGCONT)
    assert trainer.bring_back(faulty) < BACK_SECONDS
    assert f"[Fleet] {faulty.url} is back: serves version {trainer.version} after " in caplog.text
    trainer.step()
    assert all(server.serves(trainer.version) for server in servers)
    sound(servers)


def test_all_are_gone_and_back(trainer: Trainer, servers: list[LightServer], caplog: pytest.LogCaptureFixture) -> None:
    for server in servers:
        server.signal(signal.SIGKILL)
    starting = subprocess.Popen(["sleep", "2"])
    starter = pytest.importorskip("threading").Thread(target=lambda: (starting.wait(), [s.start() for s in servers]))
    starter.start()
    trainer.step()
    starter.join()
    assert "[Fleet] waiting for servers: 0 good, --min-servers 1: " in caplog.text
    for server in servers:
        assert trainer.bring_back(server) < BACK_SECONDS
    sound(servers)


def test_a_second_trainer_takes_over_and_the_first_one_is_told(
    servers: list[LightServer], free_port: Callable[[], int]
) -> None:
    with training(servers, "direct", free_port()) as first, training(servers, "direct", free_port()) as second:
        second.step()
        with pytest.raises(BridgeError, match="has taken it over"):
            first.step()
        second.step()
        assert all(server.serves(second.version) for server in servers)
    sound(servers)
