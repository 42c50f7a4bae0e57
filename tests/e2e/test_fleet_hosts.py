"""A trainer and light servers on three hosts: links that are cut for long, that are slow, and
servers that come later.
"""

from __future__ import annotations

import re
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
from example_trainer.launcher import roles
from example_trainer.models.hf_checkpoint import load_model
from tests import fleet_server
from tests.conftest import ROOT, Processes
from tests.e2e.bridge_helpers import made_up_group
from tests.e2e.conftest import trainer_command
from tests.e2e.two_hosts import Host, Network, NoNamespaces, hosts
from tests.fleet_trainer import Trainer, training
from tests.light_servers import SOON, LightServer, Starter, bring_back, sound, until
from vllm_patching.protocol.checksum import weights_checksum
from vllm_patching.protocol.manifest import Manifest, flat_layout, source_view

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(300)]

PORT = 9001
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
    parameters = dict(
        load_model(str(tmp_path / "checkpoints" / "step_2"), torch.float32).named_parameters()
    )
    info = first.get("/bridge/info")
    assert info is not None
    layout, _ = flat_layout(Manifest.from_json(info["ranks"][0]))
    trained = weights_checksum(
        (item.name, source_view(item, parameters[item.name])) for item in layout
    )
    for server in (first, second, third):
        assert (server.state()["weight_version"], server.state()["checksums"]) == (2, [trained])
        server.kill()


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
