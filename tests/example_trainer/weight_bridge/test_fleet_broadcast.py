"""A broadcast to several servers whose faults are played: who gets the weights, who is left out, and who comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from example_trainer.errors import BridgeError
from example_trainer.vllm_client import ServerRefused, ServerSilent
from example_trainer.weight_bridge import broadcast
from example_trainer.weight_bridge.base import LeaseLost
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.fleet import Standing
from example_trainer.weight_bridge.server import BridgeServer
from vllm_patching.protocol.manifest import Manifest, ManifestEntry
from vllm_patching.protocol.sharding import ShardSpec, Slice

PATIENCE, SOON = 1.5, 60.0
"""Seconds: a trainer's patience, and after which a test fails rather than waits."""


def manifest_of(name: str) -> Manifest:
    return Manifest(0, 1, (ManifestEntry(ShardSpec(name, (4,), (4,), (Slice(0, 0, 0, 4),)), "float32", "cpu"),))


@dataclass
class PlayedServer:
    """What a server does, and what was done to it; shared by whatever speaks to it.

    Attributes:
        faults: by step (init, cohort, begin, transfer, commit), what happens there, once: an error, or "hangs".
        heard: the steps in order.
    """

    url: str
    name: str = "weight"
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
    faults: dict[str, Any] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)
    freed: threading.Event = field(default_factory=threading.Event)

    def restart(self) -> None:
        self.life, self.alive, self.epoch, self.serves, self.target = self.life + 1, True, 0, 0, None
        self.quarantine = self.trainer = self.cohort = ""
        self.faults.clear()

    def state(self) -> dict[str, Any]:
        return {
            "instance": f"{self.url} {self.life}", "healthy": not self.quarantine and self.target is None,
            "trainer": self.trainer, "engine_dead": self.engine_dead, "epoch": self.epoch, "target_version": self.target,
            "weight_version": self.serves, "weight_epoch": 5, "last_error": "", "quarantine": self.quarantine,
            "silent_seconds": 0.0, "ranks": [{"received_bytes": self.holds, "error": ""}],
        }  # fmt: skip


class PlayedClient(BridgeServer):
    """Speaks to a PlayedServer instead of a network."""

    def __init__(self, played: PlayedServer, limit: float = SOON) -> None:
        host, _, port = played.url.removeprefix("http://").rpartition(":")
        super().__init__(host, int(port), 5.0, None, limit, time.sleep, 5)
        self.played = played

    def _step(self, step: str, epoch: int | None = None) -> PlayedServer:
        played = self.played
        if not played.alive:
            raise ServerSilent(f"{self.url} did not answer /bridge/{step} (connection refused)")
        played.heard.append(step)
        fault = played.faults.pop(step, None)
        if fault == "hangs":
            assert played.freed.wait(SOON)
            raise ServerSilent(f"{self.url} did not answer /bridge/{step} (timed out)")
        if fault is not None:
            raise fault
        if epoch is not None and epoch != played.epoch:
            raise ServerRefused(f"{self.url} refused /bridge/{step}: epoch {epoch} is over", 409)
        return played

    def look(self, path: str, seconds: float = 1.0) -> dict[str, Any] | None:
        return self.played.state() if self.played.alive else None

    def wait_for_info(self) -> dict[str, Any]:
        deadline = time.monotonic() + SOON
        while not self.played.alive and time.monotonic() < deadline:
            time.sleep(0.02)
        return {
            "instance": self.played.state()["instance"], "hostname": "here", "device": "cpu", "model": "small",
            "gpu_uuids": [""], "tp_degree": 1, "ranks": [manifest_of(self.played.name).to_json()],
        }  # fmt: skip

    def init(self, mode: str, shapes: Any, transfer: str = "auto", *_: Any, **__: Any) -> dict[str, Any]:
        played = self._step("init")
        played.epoch, played.trainer, played.target = played.epoch + 1, "this trainer", None
        return {"epoch": played.epoch, "transfer": "direct", "replicas": 1}

    def cohort(self, epoch: int, host: str = "", port: int = 0, key: str = "", *_: Any, **__: Any) -> dict[str, Any]:
        self._step("cohort", epoch).cohort = key
        return {}

    def begin(self, epoch: int, version: int, cohort: str = "") -> None:
        played = self._step("begin", epoch)
        assert cohort == played.cohort
        played.target, played.holds = version, -1

    def commit(self, epoch: int, version: int, checksums: Any) -> dict[str, Any]:
        played = self._step("commit", epoch)
        assert played.holds == int(checksums[0]), "it commits what it did not receive"
        played.serves, played.target, played.quarantine = version, None, ""
        return {"seconds": {"resume": 0.0}}

    def abort(self, epoch: int, reason: str) -> bool:
        self._step("abort", epoch).target = None
        return True

    def quarantine(self, epoch: int, reason: str) -> None:
        played = self._step("quarantine", epoch)
        played.quarantine, played.target = reason, None


class PlayedCohort:
    """Meets those who come."""

    def __init__(self, world: World) -> None:
        self.world, self.key = world, ""
        self.plan = broadcast.SendPlan(1, 1)

    def form(self, host: str, port: int, key: str, members: int, backend: str, store: Any, seconds: float, lost: Any) -> None:
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
        for played in members:
            if played.alive and "stuck" not in played.faults:
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
    """Three servers and a trainer that sends its number of steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers = [PlayedServer(f"http://127.0.0.1:{9001 + number}") for number in range(3)]
        self.streams: list[list[str]] = []
        self.weights = 100
        monkeypatch.setattr(broadcast, "Cohort", lambda *_: PlayedCohort(self))
        monkeypatch.setattr(broadcast, "WeightStream", lambda *_: PlayedStream(self))
        monkeypatch.setattr(broadcast, "host_store", lambda *_, **__: object())
        self.model = torch.nn.Module()
        self.model.weight = torch.nn.Parameter(torch.zeros(4))
        self.bridges: list[BroadcastBridge] = []

    def trainer(self, least: int = 1, limit: float = SOON) -> BroadcastBridge:
        clients = [PlayedClient(played, limit) for played in self.servers]
        made = {client.url: client for client in clients}
        bridge = BroadcastBridge(clients, least=least, patience=PATIENCE, make_server=lambda url: made[url])
        self.bridges.append(bridge)
        bridge.serving_dtype()
        bridge.connect(self.model)
        self.step(bridge, 1)
        return bridge

    def step(self, bridge: BroadcastBridge, version: int) -> broadcast.SyncReport:
        def write() -> None:
            self.weights = 100 + version

        return bridge.sync(version, write)

    def right(self, version: int) -> list[str]:
        """The servers that serve this version, and nothing else."""
        return [played.url for played in self.servers if (played.serves, played.holds) == (version, 100 + version)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    one = World(monkeypatch)
    yield one
    for played in one.servers:
        played.freed.set()
    for bridge in one.bridges:
        bridge.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill(played: PlayedServer) -> None:
    played.alive = False


def refuse(url: str) -> BridgeError:
    return ServerRefused(f"{url} refused it: another checksum", 500)


def test_all_are_updated_by_one_stream(world: World) -> None:
    bridge = world.trainer()
    report = world.step(bridge, 2)
    assert world.right(2) == [played.url for played in world.servers] == world.streams[-1]
    assert (report.fleet["good"], report.fleet["size"], len(world.streams)) == (3, 3, 2)
    assert [played.heard.count("cohort") for played in world.servers] == [1, 1, 1]
    assert bridge.joins == 3


@pytest.mark.parametrize("where", ["cohort", "begin", "transfer", "commit"])
@pytest.mark.parametrize("what", ["dies", "hangs", "refuses"])
def test_one_that_fails_is_left_out_of_the_step_and_is_right_again_after_the_next_look(
    world: World, where: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    if (where, what) == ("transfer", "refuses"):
        pytest.skip("receiving is not asked for")
    bridge = world.trainer()
    faulty = world.servers[1]
    url = faulty.url
    if where == "cohort":
        world.servers[2].restart()  # so that a cohort has to be formed
        bridge.keep_serving(lambda: None)
    if what == "dies" and where != "transfer":
        faulty.faults[where] = ServerSilent(f"{url} did not answer")
        faulty.faults["quarantine"] = ServerSilent(f"{url} did not answer")
    else:
        faulty.faults[where] = {"dies": kill, "hangs": "hangs", "refuses": refuse(url)}[what]
    begun = time.monotonic()
    world.step(bridge, 2)
    assert time.monotonic() - begun < SOON / 2
    others = [played.url for played in world.servers if played is not faulty]
    assert set(others) <= set(world.right(2))
    assert f"[Fleet] {url} {'quarantined' if faulty.alive else 'away'}: " in caplog.text
    assert "training goes on with 2 of 3 servers" in caplog.text
    if what == "refuses":
        assert "another checksum" in faulty.quarantine
    faulty.freed.set()
    faulty.restart() if not faulty.alive else faulty.faults.clear()
    until(bridge.server_restarted)
    bridge.keep_serving(lambda: None)
    assert url in world.right(2)
    assert world.streams[-1] == [url], "only the one that is back is sent to"
    assert f"[Fleet] {url} is back: serves version 2 after " in caplog.text
    world.step(bridge, 3)
    assert len(world.right(3)) == 3


def test_a_transfer_that_nobody_is_to_blame_for_is_done_again_one_by_one(world: World) -> None:
    bridge = world.trainer()

    def fails(played: PlayedServer) -> None:
        raise BridgeError("sending failed: Connection reset")

    world.servers[0].faults["transfer"] = fails
    world.step(bridge, 2)
    assert len(world.right(2)) == 3
    assert [len(urls) for urls in world.streams[-4:]] == [3, 1, 1, 1]


def test_a_server_that_did_not_wait_for_the_trainer_joins_anew_and_is_not_blamed(world: World) -> None:
    bridge = world.trainer()
    late = world.servers[2]
    late.faults["commit"] = LeaseLost(f"{late.url} refused /bridge/commit of version 2: gave it up")
    assert world.step(bridge, 2).fleet["good"] == 3
    assert len(world.right(2)) == 3
    assert late.heard.count("init") == 2
    assert "quarantine" not in late.heard


def test_with_too_few_it_waits_says_for_whom_and_goes_on_when_they_are_back(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = world.trainer(least=2)
    for played in world.servers[:2]:
        played.alive = False
    back = threading.Timer(1.5, world.servers[0].restart)
    back.start()
    world.step(bridge, 2)
    assert set(world.right(2)) == {world.servers[0].url, world.servers[2].url}
    assert "[Fleet] waiting for servers: " in caplog.text
    assert f"--min-servers 2: {world.servers[0].url} (" in caplog.text
    assert "; until " in caplog.text


def test_with_too_few_for_too_long_training_ends_with_the_reasons(world: World) -> None:
    bridge = world.trainer(limit=1.0)
    for played in world.servers:
        played.alive = False
    with pytest.raises(BridgeError, match=r"0 of 3 vLLM servers are good.*:9001 \(.*--resume auto"):
        world.step(bridge, 2)


def test_a_server_of_another_trainer_is_left_to_it(world: World) -> None:
    bridge = world.trainer()
    taken = world.servers[1]
    taken.epoch, taken.trainer = 9, "trainer elsewhere:7"
    world.step(bridge, 2)
    assert len(world.right(2)) == 2
    heard = len(taken.heard)
    until(lambda: bridge._keeper.fleet.places[taken.url].hopeless)
    world.step(bridge, 3)
    assert taken.heard[heard:] == []
    for played in world.servers:
        played.epoch, played.trainer = 9, "trainer elsewhere:7"
    with pytest.raises(BridgeError, match=r"trainer elsewhere:7 .* has taken it over"):
        world.step(bridge, 4)


def test_a_server_with_another_model_ends_the_start_and_is_kept_out_later(world: World) -> None:
    world.servers[1].name = "other"
    with pytest.raises(BridgeError, match="differ between the trainer and vLLM rank 0"):
        world.trainer()
    world.servers[1].name = "weight"
    bridge = world.trainer()
    world.servers[1].name = "other"
    world.servers[1].restart()
    world.step(bridge, 2)
    until(lambda: not bridge.server_restarted())
    assert len(world.right(2)) == 2


def test_a_server_that_is_wanted_joins_and_one_that_leaves_goes(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bridge = world.trainer()
    keeper, gone = bridge._keeper, world.servers[2]
    with keeper.lock:
        keeper.wish([], [gone.url])
    world.step(bridge, 2)
    assert gone.url not in world.right(2)
    with keeper.lock:
        keeper.wish([], [])
    until(bridge.server_restarted)
    bridge.keep_serving(lambda: None)
    assert len(world.right(2)) == 3
    assert f"[Fleet] {gone.url} joined: serves version 2" in caplog.text


def test_the_start_does_not_wait_for_a_server_that_is_late(world: World) -> None:
    world.servers[1].alive = False
    bridge = world.trainer()
    assert len(world.right(1)) == 2
    assert bridge._keeper.fleet.places[world.servers[1].url].standing is not Standing.GOOD
    world.servers[1].alive = True
    until(bridge.server_restarted)
    bridge.keep_serving(lambda: None)
    assert len(world.right(1)) == 3


def test_an_only_server_that_was_restarted_meets_the_trainer_anew(world: World) -> None:
    """Its first epoch has the number of the one before."""
    del world.servers[1:]
    bridge = world.trainer()
    world.servers[0].restart()
    bridge.keep_serving(lambda: None)
    assert len(world.right(1)) == 1
