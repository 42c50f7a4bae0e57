"""A trainer joins the server whose layout it has asked for, and opens that one's memory alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.errors import BridgeError
from example_trainer.vllm_client import ServerRefused
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.single_copy import SingleCopyBridge, read_handles
from tests.http_server import Answer, HttpServer, Request
from vllm_patching.protocol.manifest import Manifest, ManifestEntry
from vllm_patching.protocol.messages import OCCUPIED
from vllm_patching.transport.shared_memory import export_to_shared_memory
from vllm_patching.weights.sharding import ShardSpec, Slice

URL = "http://localhost:9001"


def info(path: Path, instance: str = "mine") -> dict[str, Any]:
    return {"config_path": str(path), "instance": instance, "hostname": "here"}


def write(path: Path, instance: str) -> Path:
    path.write_text(
        json.dumps(
            {
                "instance": instance,
                "port": 9002,
                "ranks": [{"handles": {"kind": "shm", "path": instance}}],
            }
        )
    )
    return path


def test_the_servers_own_handles_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "config.json", "mine")
    assert read_handles(info(path), URL, 0) == {"kind": "shm", "path": "mine"}


def test_another_servers_handles_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "config.json", "theirs")
    with pytest.raises(
        BridgeError,
        match=rf"{path} is of another server \(instance theirs, port 9002\) than {URL} .*mine",
    ):
        read_handles(info(path), URL, 0)


@pytest.mark.parametrize("content", ["[]", '{"port": 9001}'])
def test_a_file_that_names_no_instance_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BridgeError, match="is of another server"):
        read_handles(info(tmp_path / "config.json"), URL, 0)


class Linear(torch.nn.Module):
    """A model of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3))


MANIFEST = Manifest(
    0,
    1,
    (ManifestEntry(ShardSpec("weight", (2, 3), (2, 3), (Slice(0, 0, 0, 2),)), "float32", "cpu"),),
).to_json()


@pytest.fixture
def restarting(tmp_path: Path) -> Iterator[BridgeServer]:
    """/bridge/info is answered by one instance, and everything after it by the next one."""

    def answer(request: Request) -> Answer:
        if request.method == "POST":
            return 200, {"instance": "next", "epoch": 1, "follows_writes": False}
        facts = {"tp_degree": 1, "ranks": [MANIFEST], "model": "m"}
        return 200, info(tmp_path / "config.json") | facts

    with HttpServer(answer) as server:
        client = BridgeServer("127.0.0.1", server.port, 60.0)
        yield client
        client.close()


def test_an_answer_of_another_instance_is_no_joining(restarting: BridgeServer) -> None:
    restarting.wait_for_info()
    with pytest.raises(
        BridgeError, match=r"is instance next, and .* was instance mine .*restarted since"
    ):
        restarting.init("broadcast", {})


def occupied(tries: int, status: int = OCCUPIED) -> HttpServer:
    """A server that refuses so many tries to join."""
    left = [tries]

    def answer(request: Request) -> Answer:
        left[0] -= 1
        if left[0] >= 0:
            return status, {"error": "b cannot join now: a is in an update to version 3"}
        return 200, {"instance": "mine", "epoch": 7}

    return HttpServer(answer)


def joining(server: HttpServer, pauses: list[float], seconds: float = 60.0) -> BridgeServer:
    return BridgeServer("127.0.0.1", server.port, 60.0, None, seconds, pauses.append)


def test_a_server_in_the_update_of_another_trainer_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pauses = list[float]()
    with occupied(7) as server:
        client = joining(server, pauses)
        assert client.init("single_copy", {})["epoch"] == 7
        client.close()
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    reason = "refused /bridge/init: b cannot join now: a is in an update to version 3"
    lines = [line for line in caplog.messages if "Waiting to join" in line]
    assert lines == [
        f"[Bridge] Waiting to join the vLLM server at {client.url}: {client.url} {reason}"
    ]


def test_a_server_that_stays_in_the_update_of_another_trainer_is_given_up() -> None:
    with occupied(10**9) as server:
        client = joining(server, [], 0.05)
        with pytest.raises(
            BridgeError, match=r"a is in an update to version 3; .*--service-timeout.*--resume auto"
        ):
            client.init("broadcast", {})
        client.close()


def test_other_refusals_and_trainers_that_must_not_wait_end_at_once() -> None:
    for status, may_wait in ((409, True), (OCCUPIED, False)):
        pauses = list[float]()
        with occupied(1, status) as server:
            client = joining(server, pauses)
            with pytest.raises(ServerRefused, match="b cannot join now"):
                client.init("broadcast", {}, may_wait=lambda wait=may_wait: wait)  # type: ignore[misc]
            client.close()
        assert not pauses


def test_memory_of_a_server_that_was_restarted_meanwhile_never_becomes_the_trainers(
    restarting: BridgeServer, tmp_path: Path
) -> None:
    handles = export_to_shared_memory({"weight": torch.nn.Parameter(torch.zeros(2, 3))}, "test")
    (tmp_path / "config.json").write_text(
        json.dumps({"instance": "mine", "port": 9001, "ranks": [{"handles": handles}]})
    )
    model = Linear()
    before = model.weight.data_ptr()
    try:
        with pytest.raises(BridgeError, match="is instance next"):
            SingleCopyBridge(restarting).connect(model)
    finally:
        Path(handles["path"]).unlink()
    assert model.weight.data_ptr() == before
    assert torch.equal(model.weight.data, torch.ones(2, 3))
