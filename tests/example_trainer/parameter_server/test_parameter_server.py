"""Trainer, parameter server and light vLLM servers: what is pushed arrives, whoever of them is killed, slow or late."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from example_trainer.weight_bridge.parameter_server import ParameterServerBridge
from example_trainer.weight_bridge.server import ParameterServer
from tests.fleet_server import GEOMETRY, tiny_model
from tests.fleet_trainer import PATIENCE, TIMEOUT
from tests.light_servers import SOON, LightServer, Starter, sound, until
from vllm_patching.protocol.timeline import VARIABLE


@dataclass
class HeldServer(LightServer):
    """A parameter server's process."""

    model: Path = Path()
    more: tuple[str, ...] = ()

    def start(self) -> None:
        arguments = [
            "--model-name", str(self.model), "--port", str(self.port), "--device", "cpu", "--bridge-timeout", str(TIMEOUT),
            "--server-patience", str(PATIENCE), "--log-dir", str(self.starter.folder), *self.more,
        ]  # fmt: skip
        told = self.starter.tell(**{"do": "parameter server", "arguments": arguments, "folder": str(self.starter.folder)})
        self.pid = told["pid"]
        until(lambda: self.get("/weights") is not None)


class Trainer:
    """Weights of version v are v everywhere."""

    def __init__(self, servers: list[HeldServer], epoch: int = 5, push_every: int = 1, last: int = 1000) -> None:
        self.model = tiny_model(full=True)
        clients = [ParameterServer("127.0.0.1", server.port, TIMEOUT, None, SOON, time.sleep, epoch) for server in servers]
        self.bridge = ParameterServerBridge(clients, None, 1, PATIENCE, push_every, last, None)
        self.bridge.serving_dtype()
        self.bridge.connect(self.model)
        self.version = 0

    def step(self) -> float:
        """One push. Returns the seconds that it took."""
        self.version += 1
        begun = time.monotonic()
        self.bridge.sync(self.version, self.write)
        return time.monotonic() - begun

    def write(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.fill_(float(self.version))

    def until_served(self, servers: list[LightServer]) -> None:
        until(lambda: all(server.serves(self.version) for server in servers))


@contextlib.contextmanager
def training(servers: list[HeldServer], port: int, **options: int) -> Iterator[Trainer]:
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
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    g, folder = GEOMETRY, tmp_path_factory.mktemp("model")
    config = {
        "model_type": g.model_type, "num_hidden_layers": g.num_layers, "hidden_size": g.hidden_size,
        "intermediate_size": g.intermediate_size, "num_attention_heads": g.num_heads, "num_key_value_heads": g.num_kv_heads,
        "head_dim": g.head_dim, "vocab_size": g.vocab_size, "tie_word_embeddings": g.tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def servers(starter: Starter, free_port: Callable[[], int]) -> list[LightServer]:
    found = [LightServer(starter, free_port()) for _ in range(2)]
    for server in found:
        server.start()
    return found


@pytest.fixture(scope="module")
def holder(starter: Starter, model: Path, servers: list[LightServer], free_port: Callable[[], int]) -> HeldServer:
    named = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    server = HeldServer(starter, free_port(), model=model, more=("--vllm-servers", named))
    server.start()
    return server


@pytest.fixture(scope="module")
def trainer(holder: HeldServer, free_port: Callable[[], int]) -> Iterator[Trainer]:
    with training([holder], free_port()) as one:
        yield one


def test_what_is_pushed_reaches_all_servers(trainer: Trainer, holder: HeldServer, servers: list[LightServer]) -> None:
    assert holder.get("/weights")["serving"] is False  # type: ignore[index]
    trainer.step()
    trainer.until_served(servers)
    trainer.step()
    trainer.until_served(servers)
    assert [server.get("/weights")["weight_epoch"] for server in servers] == [5, 5]  # type: ignore[index]
    assert [row["standing"] for row in holder.get("/fleet")["servers"]] == ["good", "good"]  # type: ignore[index]
    sound(servers)
    (path,) = holder.starter.folder.glob(f"timeline-parameter-server-*-{holder.port}.jsonl")
    spans = [span for span in map(json.loads, path.read_text().splitlines()) if "what" in span]
    assert [span["version"] for span in spans if span["what"] == "push"] == [1, 2]
    assert 1 in [span["version"] for span in spans if span["what"] == "pull"]  # of 2 it may not have been written yet


def test_a_push_waits_for_no_vllm_server(trainer: Trainer, servers: list[LightServer]) -> None:
    servers[0].signal(signal.SIGSTOP)
    try:
        assert max(trainer.step() for _ in range(3)) < PATIENCE
        trainer.until_served(servers[1:])
    finally:
        servers[0].signal(signal.SIGCONT)
    trainer.until_served(servers)
    servers[0].fault("receive", "slow")
    assert max(trainer.step() for _ in range(3)) < PATIENCE
    trainer.until_served(servers)
    sound(servers)
