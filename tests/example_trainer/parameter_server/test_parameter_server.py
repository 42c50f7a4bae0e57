"""Trainer, parameter server and light vLLM servers: pushed weights arrive, even if one of the
processes is killed, slow or late.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.errors import BridgeError
from example_trainer.parameter_server.held import held_manifest
from example_trainer.weight_bridge.broadcast import ParameterServerBridge
from example_trainer.weight_bridge.server import ParameterServer
from example_trainer.weight_bridge.stream import WeightStream
from tests.fleet_server import CONFIG, tiny_model
from tests.fleet_trainer import PATIENCE, TIMEOUT
from tests.http_server import Answer, HttpServer, Request
from tests.light_servers import SOON, LightServer, Starter, sound, until
from vllm_patching.protocol.checksum import weights_checksum
from vllm_patching.protocol.manifest import ManifestEntry, flat_layout, source_view
from vllm_patching.protocol.timeline import VARIABLE
from vllm_patching.weights.families import Geometry
from vllm_patching.weights.sharding import plan_shards

# early among the others (tests/conftest.py): they take long
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

LONG = 600.0
"""Seconds that nothing waits for."""


@dataclass
class HeldServer(LightServer):
    """A parameter server's process, the shard that answers."""

    model: Path = Path()
    more: tuple[str, ...] = ()

    def start(self, dies: str = "", ranks: int = 1, rendezvous: int = 0) -> None:
        arguments = [
            "--model-name", str(self.model), "--port", str(self.port), "--device", "cpu", "--bridge-timeout", str(TIMEOUT),
            "--server-patience", str(PATIENCE), "--log-dir", str(self.starter.folder), *self.more,
        ]  # fmt: skip
        told = {
            "do": "parameter server",
            "arguments": arguments,
            "folder": str(self.starter.folder),
            "dies": dies,
        }
        for rank in reversed(range(ranks)):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": rendezvous,
            }
            environment = {name: str(value) for name, value in place.items()} if ranks > 1 else {}
            self.pid = self.starter.tell(**told, environment=environment)["pid"]
        until(lambda: self.get("/weights") is not None)


class Trainer:
    """Weights of version v are v everywhere."""

    def __init__(
        self,
        servers: list[HeldServer],
        epoch: int = 5,
        push_every: int = 1,
        last: int = 1000,
        kernels: dict[str, str] | None = None,
    ) -> None:
        self.model = tiny_model(full=True)
        clients = [
            ParameterServer("127.0.0.1", server.port, TIMEOUT, None, SOON, time.sleep, epoch)
            for server in servers
        ]
        self.bridge = ParameterServerBridge(clients, None, 1, PATIENCE, push_every, last, None)
        self.bridge.serving_dtype()
        if kernels is not None:
            self.bridge.require_kernels(kernels, lambda url, info: None)
        self.bridge.connect(self.model)
        self.version = 0

    def step(self, different: bool = False) -> None:
        """One step, with its push."""
        self.version += 1
        self.bridge.sync(self.version, self.write_different if different else self.write)

    def write(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.fill_(float(self.version))

    def write_different(self) -> None:
        for (_, parameter), (_, values) in zip(
            self.model.named_parameters(), self.parts(self.version), strict=True
        ):
            parameter.data.copy_(values)

    def parts(self, version: int) -> list[tuple[str, torch.Tensor]]:
        """Weights, no two of them equal."""
        made, first = [], 1000 * version
        for name, parameter in self.model.named_parameters():
            made.append(
                (
                    name,
                    torch.arange(first, first + parameter.numel(), dtype=torch.float32).view(
                        parameter.shape
                    ),
                )
            )
            first += parameter.numel()
        return made

    def look_after(self) -> None:
        """The work of training while it waits for rollouts."""
        if self.bridge.server_restarted():
            self.bridge.keep_serving(lambda: None)

    def until_served(self, servers: list[LightServer]) -> None:
        until(lambda: all(server.serves(self.version) for server in servers))


@contextlib.contextmanager
def training(servers: list[HeldServer], port: int, **options: Any) -> Iterator[Trainer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(port))
        trainer = Trainer(servers, **options)
        try:
            yield trainer
        finally:
            trainer.bridge.close()


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    folder = tmp_path_factory.mktemp("parameters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder))
        one = Starter(folder)
        yield one
        one.close()


@pytest.fixture(scope="module")
def servers(starter: Starter, free_port: Callable[[], int]) -> list[LightServer]:
    found = [LightServer(starter, free_port()) for _ in range(2)]
    for server in found:
        server.start()
    return found


@pytest.fixture(scope="module")
def holder(
    starter: Starter, model: Path, servers: list[LightServer], free_port: Callable[[], int]
) -> HeldServer:
    named = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    server = HeldServer(starter, free_port(), model=model, more=("--vllm-servers", named))
    server.start()
    return server


@pytest.fixture(scope="module")
def trainer(holder: HeldServer, free_port: Callable[[], int]) -> Iterator[Trainer]:
    with training([holder], free_port()) as one:
        yield one


def test_what_is_pushed_reaches_all_servers(
    trainer: Trainer, holder: HeldServer, servers: list[LightServer]
) -> None:
    assert holder.get("/weights")["serving"] is False  # type: ignore[index]
    trainer.step()
    trainer.until_served(servers)
    trainer.step()
    trainer.until_served(servers)
    assert [server.get("/weights")["weight_epoch"] for server in servers] == [5, 5]  # type: ignore[index]
    assert [row["standing"] for row in holder.get("/fleet")["servers"]] == ["good", "good"]  # type: ignore[index]
    sound(servers)
    log = (holder.starter.folder / "parameter-server.log").read_text()
    assert "The weights are read where they are by 2 of 2 receivers" in log
    assert not any(
        "lockstep-weights" in Path(f"/proc/{server.pid}/maps").read_text() for server in servers
    )
    (path,) = holder.starter.folder.glob(f"timeline-parameter-server-*-{holder.port}.jsonl")
    spans = [span for span in map(json.loads, path.read_text().splitlines()) if "what" in span]
    assert [span["version"] for span in spans if span["what"] == "push"] == [1, 2]
    assert 1 in [
        span["version"] for span in spans if span["what"] == "pull"
    ]  # of 2 it may not have been written yet


def test_a_push_waits_for_no_vllm_server(
    starter: Starter, model: Path, free_port: Callable[[], int]
) -> None:
    """The parameter server itself waits for this one far longer than a push may take."""
    server = LightServer(starter, free_port(), timeout=LONG)
    server.start()
    named = ("--vllm-servers", f"127.0.0.1:{server.port}")
    waits = ("--server-patience", str(LONG), "--bridge-timeout", str(LONG))
    holder = HeldServer(starter, free_port(), model=model, more=(*named, *waits))
    holder.start()
    with training([holder], free_port()) as trainer:
        trainer.step()
        trainer.until_served([server])
        server.fault("receive", "slow")
        trainer.step()
        until(lambda: "receiving" in str(server.state()["ranks"]))
        server.signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                trainer.step()
            (row,) = holder.get("/fleet")["servers"]  # type: ignore[index]
            assert row["standing"] == "good", "the pushes did not wait until it was left out"
        finally:
            server.signal(signal.SIGCONT)
        trainer.until_served([server])
    sound([server])
    for process in (holder, server):
        process.kill()


def test_a_stopped_or_slow_server_holds_up_no_other(
    trainer: Trainer, servers: list[LightServer]
) -> None:
    servers[0].signal(signal.SIGSTOP)
    try:
        trainer.step()
        trainer.until_served(servers[1:])
    finally:
        servers[0].signal(signal.SIGCONT)
    trainer.until_served(servers)
    servers[0].fault("receive", "slow")
    trainer.step()
    trainer.until_served(servers)
    sound(servers)


def test_a_server_that_is_restarted_or_lies_gets_its_weights_without_the_trainer(
    trainer: Trainer, holder: HeldServer, servers: list[LightServer]
) -> None:
    servers[1].kill()
    servers[1].start()
    trainer.until_served(servers)
    servers[1].fault("commit", "lie")
    trainer.step()
    trainer.until_served(servers)
    assert servers[1].state()["last_error"] == ""
    sound(servers)


def test_what_came_with_a_falsified_checksum_is_not_handed_out(
    trainer: Trainer,
    holder: HeldServer,
    servers: list[LightServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, failures = WeightStream.send, holder.state()["failures"]

    def falsify(self: WeightStream, cohort: Any, lost: Any) -> list[str]:
        monkeypatch.setattr(WeightStream, "send", send)
        return ["falsified" for _ in send(self, cohort, lost)]

    monkeypatch.setattr(WeightStream, "send", falsify)
    trainer.step()  # the second try is right
    assert holder.state()["failures"] == failures + 1
    trainer.until_served(servers)
    sound(servers)


def test_the_last_good_version_is_handed_out_when_a_push_fails_while_an_older_one_is_under_way(
    trainer: Trainer,
    holder: HeldServer,
    servers: list[LightServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first push takes the place beside what is being sent, the second takes the first one's,
    and is spoilt.
    """
    trainer.until_served(servers)
    for server in servers:
        server.fault("receive", "slow")
    send, found = WeightStream.send, list[Any]()

    def observed(self: WeightStream, cohort: Any, lost: Any) -> list[str]:
        found.append(holder.get("/weights"))
        monkeypatch.setattr(WeightStream, "send", send)
        return send(self, cohort, lost)

    def falsify(self: WeightStream, cohort: Any, lost: Any) -> list[str]:
        monkeypatch.setattr(WeightStream, "send", observed)
        return ["falsified" for _ in send(self, cohort, lost)]

    trainer.step()
    until(lambda: any("receiving" in str(server.state()["ranks"]) for server in servers))
    trainer.step()
    monkeypatch.setattr(WeightStream, "send", falsify)
    trainer.step()
    (told,) = found  # between the spoilt push and the next
    assert (told["serving"], told["trouble"]) == (True, "")
    assert trainer.version - told["weight_version"] in (
        1,
        2,
    )  # 1 if the older one had arrived before
    trainer.until_served(servers)
    sound(servers)


@pytest.mark.parametrize("dies", ["", "push begins", "push ends", "pull"])
def test_a_parameter_server_that_is_killed_takes_the_next_push(
    trainer: Trainer, holder: HeldServer, servers: list[LightServer], dies: str
) -> None:
    version = trainer.version
    holder.kill()
    assert all(server.serves(version) for server in servers)  # they go on with what they have
    holder.start(dies)
    assert holder.get("/weights")["trouble"].startswith(
        "the weights are not whole: no trainer has pushed"
    )  # type: ignore[index]
    if dies:
        again = threading.Thread(
            target=lambda: (
                until(lambda: holder.get("/weights") is None),
                holder.kill(),
                holder.start(),
            )
        )
        again.start()
        trainer.step()
        again.join(SOON)
    else:
        assert trainer.bridge.server_restarted() or until(trainer.bridge.server_restarted) is None
    until(lambda: (trainer.look_after(), holder.serves(trainer.version))[1])
    trainer.step()
    trainer.until_served(servers)
    sound(servers)


def test_a_trainer_that_is_killed_in_a_push_is_followed_by_one_of_another_epoch(
    trainer: Trainer, holder: HeldServer, servers: list[LightServer], free_port: Callable[[], int]
) -> None:
    told = {
        "do": "train", "ports": [holder.port], "rendezvous": free_port(), "transfer": "overlapped", "bucket": 0,
        "folder": str(holder.starter.folder), "fault": {"version": 2, "at": "commit", "signal": signal.SIGKILL},
    }  # fmt: skip
    pid = holder.starter.tell(**told)["pid"]
    assert holder.starter.tell(do="wait", pid=pid)["status"] == -signal.SIGKILL
    until(lambda: holder.state()["state"] == "serving")
    assert holder.serves(1)  # what the killed one had pushed before, and nothing of its version 2
    until(lambda: all(server.serves(1) for server in servers))
    servers[0].kill()
    servers[0].start()
    until(lambda: servers[0].serves(1))
    with training([holder], free_port(), epoch=6) as second:
        second.step()
        second.step()
        second.until_served(servers)
        assert {server.state()["weight_epoch"] for server in servers} == {6}
    sound(servers)


def test_a_trainer_of_another_model_is_refused(
    holder: HeldServer, free_port: Callable[[], int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.fleet_server.CONFIG", CONFIG | {"num_hidden_layers": 2})
        with (
            pytest.raises(BridgeError, match=r"model.layers.1.*the trainer has it, vLLM does not"),
            training([holder], free_port()),
        ):
            pass


def test_shards_hold_rows_each_and_push_and_pull_have_their_own_pace(
    starter: Starter, model: Path, servers: list[LightServer], free_port: Callable[[], int]
) -> None:
    """Two shards that hand out every other version, to a trainer that pushes every third step and
    one server of two.
    """
    late = LightServer(starter, free_port())
    named = f"127.0.0.1:{free_port()},127.0.0.1:{late.port}"
    holder = HeldServer(
        starter,
        free_port(),
        model=model,
        more=("--vllm-servers", named, "--part", "2/2", "--pull-every", "2"),
    )
    holder.start(ranks=2, rendezvous=free_port())
    until(lambda: [row["url"] for row in holder.get("/fleet")["servers"]] == [late.url])  # type: ignore[index]
    assert len(holder.get("/bridge/info")["ranks"]) == 2  # type: ignore[index]
    with training([holder], free_port(), push_every=3, last=7) as trainer:
        pushed = []
        for version in range(7):
            trainer.step(different=True)
            pushed.append(holder.state()["weight_version"])
            if version == 1:
                late.start()
            if version:  # what is pushed while the one before is handed out takes its place
                due = max(handed for handed in (1, 3, 6) if handed <= pushed[-1])
                until(lambda due=due: late.serves(due))  # type: ignore[misc]
        assert pushed == [1, 1, 3, 3, 3, 6, 7]
        manifest, whole = (
            held_manifest(Geometry.from_config(CONFIG), torch.float32, torch.device("cpu")),
            dict(trainer.parts(6)),
        )
        vllms = [
            ManifestEntry(spec, "float32", "cpu")
            for spec in plan_shards(Geometry.from_config(CONFIG), 0, 1)
        ]
        layout, _ = flat_layout(replace(manifest, entries=tuple(vllms)))
        expected = weights_checksum(
            (item.name, source_view(item, whole[item.name])) for item in layout
        )
        assert late.state()["checksums"] == [expected]
        late.kill()
        late.start()  # at once, and with the newest
        until(lambda: late.serves(7))


def test_two_parameter_servers_share_the_servers_and_one_that_joins_by_the_service(
    starter: Starter, model: Path, free_port: Callable[[], int]
) -> None:
    found = [LightServer(starter, free_port()) for _ in range(3)]
    for server in found:
        server.start()
    shown: dict[str, list[str]] = {}

    def fleet(request: Request) -> Answer:
        """The rollout service's POST /fleet, which wants one server."""
        shown[request.json["by"]] = [row["url"] for row in request.json["servers"]]
        return 200, {"wanted": [found[2].url], "left": []}

    with HttpServer(fleet) as service:
        named = ",".join(f"127.0.0.1:{server.port}" for server in found[:2])
        more = ("--vllm-servers", named, "--atropos-url", service.url)
        holders = [
            HeldServer(starter, free_port(), model=model, more=(*more, "--part", f"{part}/2"))
            for part in (1, 2)
        ]
        for holder in holders:
            holder.start()
        with training(holders, free_port()) as trainer:
            trainer.step()
            trainer.until_served(found)
            until(
                lambda: (
                    sorted(url for urls in shown.values() for url in urls)
                    == sorted(one.url for one in found)
                )
            )
            holders[0].signal(signal.SIGSTOP)
            trainer.step()  # the other one has it
            until(lambda: found[1].serves(trainer.version))
            assert found[0].serves(1)
            holders[0].signal(signal.SIGCONT)
            until(lambda: (trainer.look_after(), found[0].serves(trainer.version))[1])
            served = trainer.version
            holders[0].kill()
            trainer.step()  # the other one has it
            until(lambda: found[1].serves(trainer.version))
            assert found[0].serves(served)
            holders[0].start()
            until(lambda: (trainer.look_after(), found[0].serves(trainer.version))[1])
            trainer.until_served(found)
        service.shutdown()
    sound(found)
    for process in (*holders, *found):
        process.kill()


def test_of_a_deterministic_trainer_only_servers_with_its_kernels_get_weights(
    starter: Starter, model: Path, free_port: Callable[[], int]
) -> None:
    kernels = {"linear": "cublaslt 130100", "plan": "parts 1", "rotary_table": "0a"}
    same = {"provenance": kernels, "rotary_table": "0a", "checks": 3}
    other = same | {"provenance": kernels | {"plan": "parts 2"}}
    servers = [
        LightServer(starter, free_port(), deterministic=report) for report in (same, other, None)
    ]
    for server in servers:
        server.start()
    named = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    holder = HeldServer(starter, free_port(), model=model, more=("--vllm-servers", named))
    holder.start()

    def reasons() -> list[str]:
        table = holder.get("/fleet")
        assert table is not None
        return [row["reason"] for row in table["servers"]]

    with training([holder], free_port(), kernels=kernels) as trainer:
        trainer.step()
        trainer.until_served(servers[:1])
        until(lambda: all(reasons()[1:]))
        until(lambda: "has not been asked yet" not in reasons())
        trainer.step()
        trainer.until_served(servers[:1])
    first, second, third = reasons()
    assert first == ""
    assert "plan: 'parts 1' here, 'parts 2' there" in second
    assert "is not in deterministic mode; start it with --deterministic" in third
    assert [server.get("/weights")["weight_version"] for server in servers] == [2, 0, 0]  # type: ignore[index]
    with training([holder], free_port(), epoch=6) as ordinary:
        ordinary.step()
        for server in servers[1:]:
            server.kill()
            server.start()
        ordinary.until_served(servers)
