"""SingleCopyBridge with a server that keeps the protocol: whose weights are summed up, and when,
wherever the masters are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.deterministic.pairing import Pairing
from example_trainer.errors import BridgeError
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from tests.http_server import Answer, HttpServer, Request
from vllm_patching.protocol.checksum import weights_checksum
from vllm_patching.protocol.manifest import Manifest, ManifestEntry
from vllm_patching.transport.shared_memory import export_to_shared_memory
from vllm_patching.weights.sharding import ShardSpec, Slice

MANIFEST = Manifest(
    0,
    1,
    (ManifestEntry(ShardSpec("weight", (2, 3), (2, 3), (Slice(0, 0, 0, 2),)), "float32", "cpu"),),
)


class Server(HttpServer):
    """Shares one weight, checks the values of a commit, and remembers the steps in their order."""

    def __init__(self, folder: Path) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))
        self.handles = export_to_shared_memory({"weight": self.weight}, "test")
        self.config = folder / "config.json"
        self.config.write_text(
            json.dumps({"instance": "one", "port": 1, "ranks": [{"handles": self.handles}]})
        )
        self.steps: list[str] = []
        self.facts: dict[str, Any] = {}
        self.joined_with: dict[str, str] | None = None
        """Kernels that the trainer named as it joined."""
        self.not_finite = ""
        self.hangs_for = 0
        """Looks at its state for which its engine still makes no progress."""
        super().__init__(self.step)

    def step(self, request: Request) -> Answer:
        step, body = request.path.rpartition("/")[2], request.json
        if step == "info":
            return 200, {
                "instance": "one", "config_path": str(self.config), "hostname": "here", "model": "m", "tp_degree": 1,
                "ranks": [MANIFEST.to_json()],
            } | self.facts  # fmt: skip
        if step == "weights":
            return 200, {"serving": self.hangs_for <= 0, "trouble": "the engine does not answer"}
        if step == "state":
            told = "the engine does not answer" if self.hangs_for > 0 else ""
            self.hangs_for -= 1
            state = {"healthy": not told, "trouble": told, "engine_trouble": told}
            return 200, {"instance": "one", "engine_dead": False, "last_error": ""} | state
        self.steps.append(step)
        if step == "init":
            self.joined_with = body.get("kernels")
        if self.hangs_for > 0 and step == "begin":
            return 503, {"error": "the engine does not answer"}
        if step == "begin":
            return 200, {"lease": {"id": "lease", "deadline": time.monotonic() + 60}}
        if step == "commit" and body["checksums"] != [
            weights_checksum([("weight", self.weight.detach())])
        ]:
            return 409, {"error": "another checksum"}
        return 200, {
            "instance": "one",
            "epoch": 1,
            "follows_writes": False,
            "seconds": {"resume": 0.0},
        }


class OneWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as server:
        yield server
        Path(server.handles["path"]).unlink()


@pytest.fixture
def joined(server: Server) -> Iterator[tuple[SingleCopyBridge, OneWeight]]:
    model = OneWeight()
    bridge = SingleCopyBridge(BridgeServer("127.0.0.1", server.server_address[1], 60.0))
    bridge.connect(model)
    yield bridge, model
    bridge.close()


@pytest.fixture
def unjoined(server: Server) -> Iterator[SingleCopyBridge]:
    bridge = SingleCopyBridge(
        BridgeServer("127.0.0.1", server.server_address[1], 60.0), device=torch.device("cpu")
    )
    yield bridge
    bridge.close()


def test_a_server_that_fits_is_accepted_before_a_model_is_there(unjoined: SingleCopyBridge) -> None:
    assert unjoined.serving_dtype() is torch.float32
    unjoined.require_shapes({"weight": ((2, 3), "float32")})


def test_a_server_with_other_kernels_is_not_joined(
    server: Server, unjoined: SingleCopyBridge
) -> None:
    kernels = {"linear": "cublaslt", "plan": "parts 1", "rotary_table": "0a"}
    report = {"provenance": kernels, "rotary_table": "0a", "checks": 3, "seconds": 1.5}
    server.facts["deterministic"] = report | {"provenance": kernels | {"plan": "parts 2"}}
    unjoined.require_kernels(kernels, Pairing(kernels))
    model = OneWeight()
    with pytest.raises(BridgeError, match="plan: 'parts 1' here, 'parts 2' there"):
        unjoined.connect(model)
    assert server.steps == []
    server.facts["deterministic"] = report
    unjoined.connect(model)
    assert server.steps == ["init"]
    assert server.joined_with == kernels


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"replicas": 2}, r"has 2 replicas \(--data-parallel-size\)"),
        (
            {"tp_degree": 2},
            "vLLM's 2 ranks, and this trainer has 1: start it without torchrun, or with `torchrun",
        ),
        (
            {"config_path": "/nowhere.json"},
            r"cannot read /nowhere.json, where .* keeps the handles",
        ),
        ({"instance": "two"}, r"is of another server \(instance one"),
    ],
)
def test_a_server_whose_memory_cannot_be_shared_is_refused_before_a_model_is_loaded(
    server: Server, unjoined: SingleCopyBridge, facts: dict[str, Any], told: str
) -> None:
    server.facts = facts
    with pytest.raises(BridgeError, match=told) as refused:
        unjoined.serving_dtype()
    assert "\n" not in str(refused.value)
    assert server.steps == [], "nothing was asked of it but what it is"


def test_weights_on_another_gpu_are_refused_before_a_model_is_loaded(
    server: Server, unjoined: SingleCopyBridge
) -> None:
    server.handles = server.handles | {"gpu_uuid": "abc"}
    server.config.write_text(
        json.dumps({"instance": "one", "port": 1, "ranks": [{"handles": server.handles}]})
    )
    with pytest.raises(
        BridgeError,
        match=r"vLLM's rank 0 are on GPU abc, and trainer rank 0 computes on cpu\. Give both equal",
    ):
        unjoined.serving_dtype()


def test_another_model_is_refused_before_it_is_loaded(unjoined: SingleCopyBridge) -> None:
    unjoined.serving_dtype()
    with pytest.raises(
        BridgeError,
        match=r"1 parameter\(s\) differ .* which serves m: weight: .*bfloat16 .* same model",
    ):
        unjoined.require_shapes({"weight": ((2, 3), "bfloat16")})


def new(model: OneWeight, value: float) -> Any:
    def write() -> None:
        model.weight.data.fill_(value)

    return write


@pytest.mark.parametrize("device", ["cpu", "meta", None])
def test_wherever_the_masters_are_the_server_is_told_the_sums_of_what_is_written(
    server: Server, joined: tuple[SingleCopyBridge, OneWeight], device: str | None
) -> None:
    """`meta` is another device than the weights', with nothing that could be read, as host memory
    is to a GPU's kernel.
    """
    bridge, model = joined
    masters = None if device is None else {"weight": torch.full((2, 3), 5.0, device=device)}
    report = bridge.sync(1, new(model, 5.0), masters)
    assert report.checksum == weights_checksum([("weight", torch.full((2, 3), 5.0))])
    assert torch.equal(server.weight.detach(), torch.full((2, 3), 5.0))
    assert server.steps == ["init", "begin", "commit"]
    assert list(report.seconds) == (
        ["checksum", "begin", "write", "commit"]
        if device == "cpu"
        else ["begin", "write", "checksum", "commit"]
    )


def test_what_is_not_finite_in_masters_at_hand_is_never_written(
    server: Server, joined: tuple[SingleCopyBridge, OneWeight]
) -> None:
    bridge, model = joined
    with pytest.raises(BridgeError, match="version 1 is not sent: weight holds NaN"):
        bridge.sync(1, new(model, float("nan")), {"weight": torch.full((2, 3), float("nan"))})
    assert server.steps == ["init"]
    assert torch.isfinite(server.weight).all()


def test_a_server_whose_engine_hangs_is_waited_for_and_named(
    server: Server, joined: tuple[SingleCopyBridge, OneWeight], caplog: pytest.LogCaptureFixture
) -> None:
    bridge, model = joined
    bridge._server.sleep = lambda seconds: None
    assert bridge.server_trouble() == ""
    server.hangs_for = 5
    assert (
        bridge.server_trouble()
        == f"http://127.0.0.1:{server.server_address[1]} (the engine does not answer)"
    )
    bridge.sync(1, new(model, 5.0))
    assert torch.equal(server.weight.detach(), torch.full((2, 3), 5.0))
    assert server.steps[0] == "init"
    assert server.steps[-2:] == ["begin", "commit"]
    assert "waiting for vLLM's engine: the engine does not answer" in caplog.text
    assert bridge.server_trouble() == ""


def test_a_server_whose_engine_hangs_for_too_long_ends_the_training(
    server: Server, joined: tuple[SingleCopyBridge, OneWeight]
) -> None:
    bridge, model = joined
    bridge._server.sleep, bridge._server.startup_timeout = (lambda seconds: None), 0.05
    server.hangs_for = 10**9
    with pytest.raises(BridgeError, match=r"still after 0\.05 s: the engine does not answer"):
        bridge.sync(1, new(model, 5.0))


def test_a_write_that_fails_gives_the_lease_back(
    server: Server, joined: tuple[SingleCopyBridge, OneWeight]
) -> None:
    bridge, _ = joined

    def fails() -> None:
        raise RuntimeError("the bus is gone")

    with pytest.raises(RuntimeError, match="the bus is gone"):
        bridge.sync(1, fails)
    assert server.steps == ["init", "begin", "abort"]
