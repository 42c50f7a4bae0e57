"""Machines of their own, each with its network and names. There are a trainer and a vLLM server
typed as in docs/several-machines.md, and a trainer with light servers whose links are cut, slow or
late.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from example_trainer.child_processes.processes import http_probe
from example_trainer.errors import BridgeError
from example_trainer.launcher import roles
from example_trainer.models.decoder import Decoder
from example_trainer.models.hf_checkpoint import load_model
from example_trainer.weight_bridge.base import SyncReport
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import BridgeServer
from tests import fleet_server
from tests.conftest import ROOT, Processes
from tests.e2e.bridge_helpers import made_up_group, new_weights
from tests.e2e.conftest import BRIDGE_TIMEOUT, FORKED_ENGINES, SERVER_SECONDS, trainer_command
from tests.e2e.two_hosts import NOWHERE, Host, Network, NoNamespaces, hosts
from tests.fleet_trainer import Trainer, training
from tests.light_servers import SOON, LightServer, Starter, bring_back, get_json, sound, until
from vllm_patching.protocol.checksum import weights_checksum
from vllm_patching.protocol.manifest import Manifest, flat_layout, source_view

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(300)]
PORT = 9001


"""The documented one: each host has all ports for itself."""


MODEL = "Qwen/Qwen3-1.7B"
KEY = "some-long-random-word"


def commands() -> dict[str, str]:
    """The shell lines of the section on two hosts, by the host that they are for; those for both
    come first on each.
    """
    page = (ROOT / "docs" / "several-machines.md").read_text(encoding="utf-8")
    section = page.split("## Trainer and servers on different hosts", 1)[1].split("\n## ", 1)[0]
    both, server, trainer = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    assert f"VLLM_API_KEY={KEY}" in both
    assert f"--vllm-servers server-host:{PORT}" in trainer
    return {"server-host": both + server, "trainer-host": both + trainer}


@dataclass
class TwoHosts:
    """A trainer's host, and a server's with vLLM on it."""

    network: Network
    processes: Processes
    folder: Path
    model: Path

    @property
    def trainer(self) -> Host:
        return self.network.hosts["trainer-host"]

    @property
    def server(self) -> Host:
        return self.network.hosts["server-host"]

    @property
    def url(self) -> str:
        return f"http://{self.server.address}:{PORT}"

    def type(self, host: Host, changes: dict[str, str]) -> Path:
        """Run a host's commands there with another model and a few more flags; returns the folder
        that their logs are in.
        """
        lines = commands()[host.name]
        for old, new in {
            MODEL: str(self.model),
            "python ": f"{sys.executable} ",
            **changes,
        }.items():
            assert old in lines
            lines = lines.replace(old, new)
        folder = self.folder / host.name
        folder.mkdir()
        for name in ("atroposlib", "example_trainer", "vllm_patching"):
            (folder / name).symlink_to(ROOT / name)
        # A folder that the other host cannot see: its own memory file system, and this folder of
        # its own.
        environment = {
            "LOGDIR": str(host.folder),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": None,
            "MASTER_PORT": None,
        }
        environment |= FORKED_ENGINES
        self.processes.start(
            host.name, host.command("bash", "-c", f"{lines}\nwait", directory=folder), environment
        )
        return folder

    def state(self, asking: Host | None = None) -> dict[str, Any]:
        """/bridge/state, from a host: by default the trainer's."""
        headers = {"Authorization": f"Bearer {KEY}"}

        answer: dict[str, Any] = (asking or self.trainer).calling(
            lambda: get_json(f"{self.url}/bridge/state", headers)
        )
        return answer

    def wait_until(self, what: str, true: Callable[[], bool]) -> None:
        self.processes.wait_until(what, lambda: None if true() else "not yet", SOON)


@pytest.fixture(scope="module")
def two(
    module_processes: Processes, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoHosts]:
    folder = tmp_path_factory.mktemp("hosts")
    try:
        with hosts(folder, "trainer-host", "server-host") as network:
            two = TwoHosts(network, module_processes, folder, tiny_model)
            flags = f" --port {PORT} --bridge-timeout {BRIDGE_TIMEOUT:g} --max-model-len 256"
            two.type(two.server, {f" --port {PORT}": flags})
            probe = http_probe(f"{two.url}/health_generate")
            module_processes.wait_until("vLLM", lambda: two.trainer.calling(probe), SERVER_SECONDS)
            with module_processes.supervisor:
                yield two
    except NoNamespaces as error:
        pytest.skip(f"two hosts cannot be made here: {error}")


def size_of(model: Decoder) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@contextmanager
def trainers_half(
    two: TwoHosts,
    free_port: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    startup_timeout: float = 5.0,
) -> Iterator[tuple[BroadcastBridge, Decoder, int]]:
    """The bridge of a trainer on its host, not connected; its model, and its MASTER_PORT.

    MASTER_ADDR is not set. A trainer that cannot reach its server gives it up after
    `startup_timeout` seconds beyond the update's deadline.
    """
    port = free_port()
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", str(port))
    client = BridgeServer(
        two.server.address, PORT, BRIDGE_TIMEOUT, api_key=KEY, startup_timeout=startup_timeout
    )
    bridge = BroadcastBridge(client, "overlapped")
    try:
        yield bridge, load_model(str(two.model), torch.float32), port
    finally:
        two.trainer.calling(bridge.close)


@pytest.mark.parametrize("wrong", ["loopback", "nowhere", "firewall"])
def test_an_address_that_the_server_cannot_reach_is_named_with_what_to_set(
    two: TwoHosts, wrong: str, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainers_half(two, free_port, monkeypatch) as (bridge, model, port), ExitStack() as stack:
        if wrong == "firewall":
            stack.enter_context(two.network.firewall(two.trainer, port))
            tried = f"{two.trainer.address}:{port}"
        else:
            address = {"loopback": "localhost", "nowhere": NOWHERE}[wrong]
            monkeypatch.setenv("MASTER_ADDR", address)
            tried = address if wrong == "loopback" else f"{address}:{port}"
        started = time.monotonic()

        def join() -> None:
            bridge.connect(model)
            bridge.sync(0, lambda: None)

        with pytest.raises(BridgeError) as error:
            two.trainer.calling(join)
        assert time.monotonic() - started < SOON, "the deadline, and what a busy machine adds"
    wanted = [tried, two.server.address]
    if wrong == "loopback":
        wanted += [f"Set MASTER_ADDR={two.trainer.address}"]
    else:
        wanted += ["set MASTER_ADDR", "no answer within", "MASTER_PORT"]
    wanted += ["server-host"] if wrong == "firewall" else []
    for part in wanted:
        assert part in str(error.value)


def test_a_closed_port_of_the_server_is_named(
    two: TwoHosts, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        trainers_half(two, free_port, monkeypatch) as (bridge, model, _),
        two.network.firewall(two.server, PORT),
        pytest.raises(BridgeError, match=re.escape(two.url)),
    ):
        two.trainer.calling(lambda: bridge.connect(model))


def test_an_update_goes_on_when_its_link_is_back(
    two: TwoHosts, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is found without MASTER_ADDR; the server's own name means 127.0.1.1 there, which
    no other host can reach.
    """
    with trainers_half(two, free_port, monkeypatch, SOON) as (bridge, model, _):

        def sync(version: int) -> SyncReport:
            return two.trainer.calling(lambda: bridge.sync(version, new_weights(model, version)))

        two.trainer.calling(lambda: bridge.connect(model))
        assert sync(0).checksum in two.state()["checksums"]
        reports: list[SyncReport] = []
        update = threading.Thread(target=lambda: reports.append(sync(1)), daemon=True)
        with two.network.slowed(two.server, 4.0):
            before = two.network.bytes_to(two.server)
            update.start()
            two.wait_until(
                "a quarter is sent",
                lambda: two.network.bytes_to(two.server) - before > size_of(model) / 4,
            )
            two.network.cut(two.server)
            update.join(2)
            assert update.is_alive()
            assert two.state(two.server)["weight_version"] == 0
            two.network.heal(two.server)
            update.join(SOON)
        assert not update.is_alive()
        state = two.state()
        assert (state["weight_version"], state["checksums"]) == (1, [reports[0].checksum])


def test_the_documented_commands_train(two: TwoHosts) -> None:
    tiny = " --gradient-accumulation-steps 4 --seq-len 64 --num-threads 1 --batch-size 1 --training-steps 2"
    folder = two.type(two.trainer, {" --batch-size 4 --training-steps 100": tiny})
    service = "http://127.0.0.1:8000"
    two.wait_until("the service", lambda: two.trainer.calling(http_probe(service)) is None)
    for number in range(2):
        body = made_up_group(number)
        two.trainer.calling(
            lambda body=body: httpx.post(
                f"{service}/scored_data", json=body, timeout=120
            ).raise_for_status()
        )
    two.wait_until(
        "the last step", lambda: "Step 2/2" in (folder / "trainer.log").read_text(errors="replace")
    )
    two.wait_until("its weights", lambda: two.state()["weight_version"] == 2)
    log = (two.folder / "server-host" / "vllm.log").read_text(errors="replace")
    assert "Serving weight version 2" in log


BUCKET = 192 << 10


"""Bytes; the model is eight times as large."""


SMALL_BUFFERS = "4096 16384 65536"


"""For what is on its way in TCP: little, so that who is slow is felt by the sender."""


SERVERS = ("server-a", "server-b")


@dataclass
class Hosts:
    """A trainer's host, and two more with a server on each."""

    network: Network
    servers: dict[str, LightServer]
    free_port: Callable[[], int]

    @property
    def trainer(self) -> Host:
        return self.network.hosts["trainer-host"]

    @contextmanager
    def training(self, transfer: str, **options: Any) -> Iterator[Trainer]:
        """State of all servers, from the trainer's host.

        One that came late, on a machine that is busy, is waited for.
        """
        with ExitStack() as stack:
            places = [server.place for server in self.servers.values()]
            block = training(places, transfer, self.free_port(), bucket=BUCKET, **options)
            trainer = self.trainer.calling(lambda: stack.enter_context(block))
            for server in self.servers.values():
                self.trainer.calling(partial(bring_back, trainer, server))
            yield trainer


@pytest.fixture(scope="module")
def three(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, free_port: Callable[[], int]
) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(fleet_server, "CONFIG", fleet_server.CONFIG)
        fleet_server.take_shapes_of(tiny_model)
        try:
            network = stack.enter_context(hosts(folder, "trainer-host", *SERVERS))
            network.hosts["trainer-host"].run("sysctl", "-qw", f"net.ipv4.tcp_wmem={SMALL_BUFFERS}")
        except NoNamespaces as error:
            pytest.skip(f"hosts cannot be made here: {error}")
        servers = {}
        for name in SERVERS:
            host = network.hosts[name]
            starter = Starter(folder / name, host.command(directory=ROOT))
            stack.callback(starter.close)
            asking = network.hosts["trainer-host"].calling
            servers[name] = LightServer(starter, PORT, host.address, BUCKET, asking, tiny_model)
        yield Hosts(network, servers, free_port)


@pytest.fixture
def servers(three: Hosts) -> list[LightServer]:
    """Both, running."""
    for server in three.servers.values():
        if not server.pid:
            server.start()
    return list(three.servers.values())


def test_a_fleet_grows_under_a_real_trainer(
    three: Hosts, processes: Processes, tiny_model: Path, tmp_path: Path
) -> None:
    """It waits for servers on two hosts, takes a third one in while it waits for rollouts, and
    sends its last step to all.
    """
    first, second = (
        replace(server, bucket=0) for server in three.servers.values()
    )  # as the trainer's
    first.start()
    service, on_trainer = "http://127.0.0.1:8000", three.trainer.calling
    start, host = processes.start, three.trainer
    words = roles.service("127.0.0.1", 8000, store=tmp_path / "rollouts.db")
    start("service", host.command(*words, directory=ROOT))
    command = roles.anywhere(
        trainer_command(
            tiny_model,
            service,
            tmp_path,
            bridge="broadcast",
            vllm_servers=f"server-a:{PORT},server-b:{PORT}",
            server_patience=1,
            training_steps=2,
            batch_size=1,
            gradient_accumulation_steps=4,
            seq_len=64,
            num_threads=1,
        )
    )
    environment = {"NUM_INFERENCE_NODES": "2", "MASTER_ADDR": None, "MASTER_PORT": None}
    trainer = start(
        "trainer", host.command(*command, directory=tmp_path), environment, may_finish=True
    )

    def post(path: str, body: Any) -> None:
        on_trainer(
            lambda: httpx.post(
                service + path, json=body, timeout=SOON, trust_env=False
            ).raise_for_status()
        )

    processes.wait_until("the service", lambda: on_trainer(http_probe(service)), 180)
    post("/scored_data", made_up_group(0))
    processes.wait_for_text(trainer, "Waiting for the vLLM server at http://server-b", 120)
    time.sleep(3)  # for longer than one server keeps the others waiting
    assert first.state()["epoch"] == 0, "it has begun with the servers of one host"
    second.start()
    processes.wait_for_text(trainer, "Step 1/2", 120)
    third = LightServer(first.starter, PORT + 1, first.address, 0, on_trainer, tiny_model)
    third.start()
    post("/fleet/join", {"url": third.url})
    processes.wait_for_text(trainer, f"[Fleet] {third.url} joined: serves version 1", SOON)
    post("/scored_data", made_up_group(1))
    assert "Training complete: 2 steps" in processes.finish(trainer, 120)
    trained = checksum_at(first, tmp_path / "checkpoints" / "step_2")
    for server in (first, second, third):
        assert (server.state()["weight_version"], server.state()["checksums"]) == (2, [trained])
        server.kill()


def checksum_at(server: LightServer, checkpoint: Path) -> str:
    """Return the checksum of a checkpoint's weights as a server holds them."""
    parameters = dict(load_model(str(checkpoint), torch.float32).named_parameters())
    info = server.get("/bridge/info")
    assert info is not None
    layout, _ = flat_layout(Manifest.from_json(info["ranks"][0]))
    return weights_checksum(
        (item.name, source_view(item, parameters[item.name])) for item in layout
    )


@pytest.mark.parametrize(
    ("transfer", "when"),
    [("direct", "in an update"), ("overlapped", "in an update"), ("direct", "between updates")],
)
def test_a_server_that_is_cut_off_for_long_is_right_again_soon_after(
    three: Hosts,
    servers: list[LightServer],
    transfer: str,
    when: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No host learns that it is cut off: its connections stay open at both ends."""
    caplog.set_level("INFO")
    far, near = three.network.hosts["server-b"], servers[0]
    cut_off = servers[1]
    with three.training(transfer) as trainer:
        if when == "in an update":
            with three.network.slowed(far, 8.0):
                before = three.network.bytes_to(far)
                update = threading.Thread(target=lambda: three.trainer.calling(trainer.step))
                update.start()
                until(lambda: three.network.bytes_to(far) - before > 2 * BUCKET)
                three.network.cut(far)
                update.join(SOON)
                assert not update.is_alive()
        else:
            three.network.cut(far)
            until(lambda: f"{cut_off.url} away: does not answer" in caplog.text)
            three.trainer.calling(trainer.step)
        assert near.serves(2)
        assert re.search(
            rf"\[Fleet\] {cut_off.url} (away|quarantined): .*; training goes on with 1 of 2 servers",
            caplog.text,
        )
        three.trainer.calling(trainer.step)  # without it
        assert near.serves(3)
        three.network.heal(far)
        three.trainer.calling(lambda: bring_back(trainer, cut_off))
        assert f"[Fleet] {cut_off.url} is back: serves version 3 after " in caplog.text
        three.trainer.calling(trainer.step)
        assert all(server.serves(4) for server in servers)
        sound(servers)


@pytest.mark.parametrize("transfer", ["direct", "overlapped"])
def test_a_slow_server_is_waited_for_by_name_or_left_out(
    three: Hosts, servers: list[LightServer], transfer: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    slow, far = servers[1], three.network.hosts["server-b"]
    with three.training(transfer, patience=5.0) as trainer:
        with three.network.slowed(
            far, 1.5
        ):  # a bucket takes a second, and the others are two ahead; the model eight
            three.trainer.calling(trainer.step)
            assert all(server.serves(2) for server in servers)
            waits = rf"version 2 is on its way for \d+ s, waiting for {slow.url} \(has [0-9.]+ MB\); .*; until \d\d:"
            assert re.search(rf"\[Fleet\] {waits}", caplog.text)
        with three.network.slowed(far, 0.1):  # a bucket takes longer than any deadline
            three.trainer.calling(trainer.step)
        assert servers[0].serves(3)
        assert re.search(
            rf"\[Fleet\] {slow.url} (away|quarantined): .*; training goes on with 1 of 2 servers",
            caplog.text,
        )
        three.trainer.calling(lambda: bring_back(trainer, slow))
        sound(servers)
