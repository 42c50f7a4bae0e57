"""Servers whose faults are played, and a trainer that sends them its number of steps: what
test_fleet_broadcast.py is about.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest
import torch

from example_trainer.errors import BridgeError
from example_trainer.vllm_client import ServerRefused, ServerSilent
from example_trainer.weight_bridge import broadcast
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import BridgeServer
from vllm_patching.protocol.manifest import Manifest, ManifestEntry
from vllm_patching.transport.rendezvous import Meeting
from vllm_patching.weights.sharding import ShardSpec, Slice

PATIENCE, SOON = 2.5, 120.0
"""Seconds: a trainer's patience, and after which a test fails rather than waits."""


def manifest_of(name: str, dtype: str) -> Manifest:
    return Manifest(
        0, 1, (ManifestEntry(ShardSpec(name, (4,), (4,), (Slice(0, 0, 0, 4),)), dtype, "cpu"),)
    )


class PlayedRendezvous:
    """No store: the played cohorts meet by themselves."""

    def open(self, urls: Any) -> Meeting:
        return Meeting("localhost", 1, "")

    def join(self, meeting: Meeting) -> Any:
        return object()


@dataclass
class PlayedServer:
    """A server's script, and its record; shared by all that speak to it.

    Attributes:
        faults: by step (init, cohort, begin, transfer, commit), what happens there, once: an error,
            or "hangs". At commit also "is late": it serves, and answers after the deadline.
        idle: it takes none of its bytes, and reports it.
        parameters: checksums of what vLLM has reloaded from the weights.
        heard: the received steps in order.
    """

    url: str
    name: str = "weight"
    dtype: str = "float32"
    life: int = 1
    alive: bool = True
    holds: int = 0
    serves: int = 0
    epoch: int = 0
    trainer: str = ""
    quarantine: str = ""
    cohort: str = ""
    target: int | None = None
    engine_dead: bool = False
    idle: bool = False
    parameters: list[str] = field(default_factory=list)
    joined_anew: bool = False
    faults: dict[str, Any] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)
    freed: threading.Event = field(default_factory=threading.Event)

    def restart(self) -> None:
        self.life, self.alive, self.epoch, self.serves, self.target = (
            self.life + 1,
            True,
            0,
            0,
            None,
        )
        self.quarantine = self.trainer = self.cohort = ""
        self.faults.clear()

    def state(self) -> dict[str, Any]:
        return {
            "instance": f"{self.url} {self.life}", "healthy": not self.quarantine and self.target is None,
            "trainer": self.trainer, "engine_dead": self.engine_dead, "epoch": self.epoch, "target_version": self.target,
            "weight_version": self.serves, "weight_epoch": 5, "last_error": "", "quarantine": self.quarantine,
            "silent_seconds": 0.0,
            "ranks": [{"phase": "receiving", "received_bytes": self.holds, "waits": not self.idle, "error": ""}],
        }  # fmt: skip


class PlayedClient(BridgeServer):
    """Speaks to a PlayedServer instead of a network."""

    def __init__(self, played: PlayedServer, limit: float = SOON) -> None:
        host, _, port = played.url.removeprefix("http://").rpartition(":")
        super().__init__(host, int(port), SOON, None, limit, time.sleep, 5)
        self.played = played

    def _step(self, step: str, epoch: int | None = None) -> PlayedServer:
        played = self.played
        if not played.alive:
            raise ServerSilent(f"{self.url} did not answer /bridge/{step} (connection refused)")
        played.heard.append(step)
        fault = played.faults.pop(step, None)
        if fault == "hangs":
            self._hang(step)
        if fault == "is late":
            played.faults["late"] = True
        elif fault is not None:
            raise fault
        if epoch is not None and epoch != played.epoch:
            raise ServerRefused(f"{self.url} refused /bridge/{step}: epoch {epoch} is over", 409)
        return played

    def _hang(self, step: str) -> NoReturn:
        assert self.played.freed.wait(SOON)
        raise ServerSilent(f"{self.url} did not answer /bridge/{step} (timed out)")

    def look(self, path: str, seconds: float = 1.0) -> dict[str, Any] | None:
        return self.played.state() if self.played.alive else None

    def wait_for_info(self) -> dict[str, Any]:
        deadline = time.monotonic() + SOON
        while not self.played.alive and time.monotonic() < deadline:
            time.sleep(0.02)
        return {
            "instance": self.played.state()["instance"], "hostname": "here", "device": "cpu", "model": "small",
            "gpu_uuids": [""], "tp_degree": 1, "ranks": [manifest_of(self.played.name, self.played.dtype).to_json()],
        }  # fmt: skip

    def init(
        self, mode: str, shapes: Any, transfer: str = "auto", *_: Any, **__: Any
    ) -> dict[str, Any]:
        played = self._step("init")
        played.epoch, played.trainer, played.target, played.joined_anew = (
            played.epoch + 1,
            "this trainer",
            None,
            True,
        )
        return {"epoch": played.epoch, "transfer": "direct", "replicas": 1}

    def cohort(
        self, epoch: int, meeting: Any = None, key: str = "", *_: Any, **__: Any
    ) -> dict[str, Any]:
        self._step("cohort", epoch).cohort = key
        return {}

    def begin(self, epoch: int, version: int, cohort: str = "") -> None:
        played = self._step("begin", epoch)
        assert cohort == played.cohort
        if played.serves == version and not played.joined_anew:
            raise ServerRefused(
                f"{self.url} refused /bridge/begin: version {version} is served", 409
            )
        played.joined_anew = False
        played.target, played.holds = version, -1

    def commit(self, epoch: int, version: int, checksums: Any) -> dict[str, Any]:
        played = self._step("commit", epoch)
        assert played.holds == int(checksums[0]), "it commits what it did not receive"
        played.serves, played.target, played.quarantine = version, None, ""
        if played.faults.pop("late", False):
            self._hang("commit")
        return {"seconds": {"resume": 0.0}, "parameters": played.parameters}

    def abort(self, epoch: int, reason: str) -> bool:
        played = self._step("abort", epoch)
        played.target = None
        played.faults.pop("waits", None)
        return True

    def quarantine(self, epoch: int, reason: str) -> None:
        played = self._step("quarantine", epoch)
        played.quarantine, played.target = reason, None


class PlayedCohort:
    """Meets its peers."""

    def __init__(self, world: World) -> None:
        self.world, self.key = world, ""
        self.plan = broadcast.SendPlan(1, 1)

    def form(
        self,
        meeting: Any,
        key: str,
        members: int,
        backend: str,
        store: Any,
        seconds: float,
        lost: Any,
    ) -> None:
        self.key = key
        assert len(self.members) == members

    @property
    def members(self) -> list[PlayedServer]:
        return [played for played in self.world.servers if played.cohort == self.key]

    def close(self) -> None:
        self.key = ""


class PlayedStream:
    """Brings the world's weights to all members of a cohort at the same time, or to none."""

    def __init__(self, world: World) -> None:
        self.world, self.memory = world, None

    def not_finite(self) -> str:
        return ""

    def send(self, cohort: PlayedCohort, lost: Callable[[], str]) -> list[str]:
        members = cohort.members
        self.world.streams.append([played.url for played in members])
        for played in members:
            if callable(fault := played.faults.pop("transfer", None)):
                fault(played)
            elif fault == "hangs":
                played.faults["stuck"] = True
        first = next(
            (place for place, played in enumerate(members) if "stuck" in played.faults),
            len(members),
        )
        for place, played in enumerate(members):
            if place > first and self.world.handed_on:
                played.faults["waits"] = True
            elif played.alive and "stuck" not in played.faults:
                played.holds = self.world.weights
        if any(not played.alive for played in members):
            raise BridgeError("sending failed: Connection closed by peer")
        deadline = time.monotonic() + SOON
        while any("stuck" in played.faults for played in members):
            if reason := lost():
                raise BridgeError(f"the transfer was broken off: {reason}")
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return [str(self.world.weights)]


class World:
    """Three servers and a trainer that sends its number of steps.

    Attributes:
        handed_on: a receiver has its bytes from the one before it, so that it gets none while that
            one is stuck.
    """

    handed_on = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers = [PlayedServer(f"http://127.0.0.1:{9001 + number}") for number in range(3)]
        self.streams: list[list[str]] = []
        self.weights = 100
        monkeypatch.setattr(broadcast, "Cohort", lambda *_: PlayedCohort(self))
        monkeypatch.setattr(broadcast, "WeightStream", lambda *_: PlayedStream(self))
        monkeypatch.setattr(broadcast, "Rendezvous", lambda *_: PlayedRendezvous())
        self.model = torch.nn.Module()
        self.model.weight = torch.nn.Parameter(torch.zeros(4))
        self.bridges: list[BroadcastBridge] = []

    def trainer(
        self,
        least: int = 1,
        limit: float = SOON,
        check: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> BroadcastBridge:
        clients = [PlayedClient(played, limit) for played in self.servers]
        made = {client.url: client for client in clients}
        bridge = BroadcastBridge(
            clients, least=least, patience=PATIENCE, make_server=lambda url: made[url]
        )
        self.bridges.append(bridge)
        bridge.serving_dtype()
        if check is not None:
            bridge.require(check)
        bridge.connect(self.model)
        self.step(bridge, 1)
        return bridge

    def step(self, bridge: BroadcastBridge, version: int) -> broadcast.SyncReport:
        def write() -> None:
            self.weights = 100 + version

        return bridge.sync(version, write)

    def right(self, version: int) -> list[str]:
        """The servers that serve this version, and nothing else."""
        return [
            played.url
            for played in self.servers
            if (played.serves, played.holds) == (version, 100 + version)
        ]
