"""A rolling restart under the real fleet of a trainer: bridge, keeper and rollout service, and
servers without vLLM.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from example_trainer.launcher.control import Starter, stop_parts
from example_trainer.launcher.fleet import published_fleet
from example_trainer.launcher.records import SERVICE, Records, read_keys
from example_trainer.launcher.roles import Command
from example_trainer.launcher.rolling import Roller
from example_trainer.launcher.stack import Stack
from tests.example_trainer.launcher.small_stack import SmallStack, small_options

pytestmark = pytest.mark.nightly

SERVES = """
import asyncio, os, pathlib, sys
from tests import fleet_server
fleet_server._stand_in_for_vllm()
os.environ["LOGDIR"] = sys.argv[2]
pathlib.Path(sys.argv[2]).mkdir(exist_ok=True)
asyncio.run(fleet_server._serve(int(sys.argv[1]), pathlib.Path(sys.argv[2]), 20.0))
"""
TRAINS = """
import logging, os, sys, time
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
logging.getLogger("httpx").setLevel(logging.WARNING)
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.service_board import ServiceBoard
from example_trainer.weight_bridge.server import BridgeServer
from tests.fleet_server import tiny_model
service, os.environ["MASTER_PORT"], *ports = sys.argv[1:]
servers = [BridgeServer("localhost", int(port), 60.0, None, 120.0, time.sleep, 5) for port in ports]
board = ServiceBoard(service, os.environ["ROLLOUT_API_KEY"])
bridge, model, version = BroadcastBridge(servers, "direct", patience=2.0, board=board), tiny_model(full=True), 0
bridge.serving_dtype()
bridge.connect(model)
while True:
    version += 1
    bridge.sync(version, lambda: [parameter.data.fill_(float(version)) for parameter in model.parameters()])
    print(f"Step {version}/-", flush=True)
    time.sleep(0.2)
"""


class BridgeStack(SmallStack):
    """The real rollout service, light servers, and a trainer that sends the next weights each 0.2
    s.
    """

    def service(self) -> Command:
        return Stack.service(self)

    def vllm(self, server: int = 0) -> Command:
        name = super().vllm(server).name
        return self._python(
            name, SERVES, self.options.vllm_ports[server], self.folder(server), grace=3.0
        )

    def trainer(self) -> Command:
        return self._python(
            "trainer", TRAINS, self.service_url, self.options.master_port, *self.options.vllm_ports
        )


class PatientStarter(Starter):
    """Light servers have no /health; the trainer waits for them by itself."""

    def wait_for_vllm(self) -> None:
        return


def test_training_goes_on_while_each_server_is_restarted(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    run, ports = tmp_path / "run", tuple(free_port() for _ in range(4))
    stack = BridgeStack(small_options(run, ports, ("service", "vllm", "vllm-2", "trainer")))
    said: list[str] = []

    def steps() -> int:
        return max(
            [
                0,
                *map(
                    int,
                    re.findall(r"^Step (\d+)/", (run / "trainer.log").read_text(), re.MULTILINE),
                ),
            ]
        )

    def standings() -> list[str]:
        fleet = published_fleet(stack.service_url, read_keys(run)[SERVICE])
        return [] if fleet is None else [row.standing for row in fleet.rows]

    def both_are_good(at_least: int) -> None:
        deadline = time.monotonic() + 180
        while steps() < at_least or standings() != ["good", "good"]:
            assert time.monotonic() < deadline, (run / "trainer.log").read_text()
            time.sleep(0.1)

    try:
        PatientStarter(stack, said.append).run()
        both_are_good(at_least=2)
        before = steps()
        Roller(stack, said.append, 180).run(())
        assert steps() > before + 5, "training waited"
        both_are_good(at_least=before + 6)
        for server in range(2):
            assert httpx.get(f"{stack.vllm_url(server)}/test", timeout=60).json()["mixtures"] == []
        log = (run / "trainer.log").read_text()
        assert "Traceback" not in log
        for url in map(stack.vllm_url, range(2)):
            assert re.search(
                rf"\[Fleet\] {url} (away|joining): .*; training goes on with 1 of 2 servers", log
            )
            assert f"[Fleet] {url} is back: serves version " in log
    finally:
        stop_parts(run, Records(run).parts(), said.append)
    assert [line.split()[0] for line in said if "is back" in line] == ["vllm", "vllm-2"]
