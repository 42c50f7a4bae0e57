"""A trainer's process that is killed or stopped in the middle of an update, and servers that come
while one is made.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.child_processes.guard import parents
from example_trainer.errors import BridgeError
from tests.conftest import ROOT, Processes
from tests.example_trainer.weight_bridge.cohort_world import BUCKET_BYTES, DENSE
from tests.fleet_trainer import training
from tests.geometries import config_of
from tests.light_servers import SOON, Devices, LightServer, Starter, bring_back, sound, until

# early among the others (tests/conftest.py): they take long
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

BUCKET = 2048
"""Bytes: the tiny model goes in several."""


@pytest.fixture(scope="module")
def devices() -> Devices:
    """tests/gpu/test_fleet_senders.py has others."""
    return Devices()


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    one = Starter(tmp_path_factory.mktemp("fleet"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def servers(devices: Devices, starter: Starter, free_port: Callable[[], int]) -> list[LightServer]:
    found = [
        LightServer(starter, free_port(), bucket=BUCKET, device=device)
        for device in devices.servers[:2]
    ]
    for server in found:
        server.start()
    return found


@pytest.mark.parametrize(
    ("transfer", "where", "keeps_serving"),
    [
        ("overlapped", {"buckets": 0}, True),
        ("overlapped", {"buckets": 1}, True),
        ("overlapped", {"at": "commit"}, True),
        ("direct", {"buckets": 0}, True),  # not one byte has been written
        ("direct", {"buckets": 1}, False),
        ("direct", {"at": "commit"}, False),
    ],
)
def test_a_trainer_that_is_killed_in_an_update_leaves_nothing_mixed_behind(
    devices: Devices,
    servers: list[LightServer],
    starter: Starter,
    free_port: Callable[[], int],
    transfer: str,
    where: dict[str, Any],
    keeps_serving: bool,
) -> None:
    """Its servers serve what they served before, or nothing until there is another trainer, which
    finds them usable.
    """
    fault = {"version": 3, "signal": signal.SIGKILL, **where}
    options: dict[str, Any] = {"bucket": BUCKET, "device": devices.trainer}
    told = {
        "ports": [server.port for server in servers],
        "rendezvous": free_port(),
        "folder": str(starter.folder),
    }
    trainer = starter.tell(do="train", transfer=transfer, fault=fault, **options, **told)["pid"]
    assert starter.tell(do="wait", pid=trainer)["status"] == -signal.SIGKILL
    for server in servers:
        until(lambda server=server: server.state()["target_version"] is None)  # type: ignore[misc]
        state = server.state()
        assert (state["weight_version"], state["healthy"]) == (2, keeps_serving), state
        assert server.serves(2) == keeps_serving
        assert state["engine"] == ("running" if keeps_serving else "paused")
        # That it has ended; or that its connections have broken, where its process takes its time
        # on a busy machine.
        assert re.search("has ended|has gone", state["last_error"]), state
    sound(servers)
    with training(
        [server.place for server in servers], transfer, free_port(), patience=SOON, **options
    ) as other:
        assert all(server.serves(1) for server in servers), (
            "the next trainer begins with its own first version"
        )
        other.step()
        assert all(server.serves(2) for server in servers)
    sound(servers)


@pytest.mark.parametrize("transfer", ["overlapped", "direct"])
def test_a_trainer_that_is_killed_in_an_update_and_restarted_at_once_joins(
    devices: Devices,
    servers: list[LightServer],
    starter: Starter,
    free_port: Callable[[], int],
    transfer: str,
) -> None:
    """Each server still holds the update of the dead trainer. The new trainer waits for its end."""
    fault = {"version": 2, "signal": signal.SIGKILL, "buckets": 1}
    options: dict[str, Any] = {"bucket": BUCKET, "device": devices.trainer}
    ports = [server.port for server in servers]
    command = {"ports": ports, "rendezvous": free_port(), "folder": str(starter.folder)}
    places, port = [server.place for server in servers], free_port()
    trainer = starter.tell(do="train", transfer=transfer, fault=fault, **options, **command)["pid"]
    assert starter.tell(do="wait", pid=trainer)["status"] == -signal.SIGKILL
    with training(places, transfer, port, patience=SOON, **options) as other:
        other.step()
        assert all(server.serves(2) for server in servers)
    sound(servers)


@pytest.mark.parametrize(
    ("transfer", "where"),
    [("direct", {"buckets": 1}), ("overlapped", {"buckets": 1}), ("direct", {"at": "commit"})],
)
def test_a_trainer_that_is_stopped_for_too_long_blames_no_server_and_does_the_update_anew(
    devices: Devices,
    starter: Starter,
    free_port: Callable[[], int],
    transfer: str,
    where: dict[str, Any],
) -> None:
    """Its servers have given the update up by then; it logs that they got nothing from it, and
    joins them again.
    """
    few = [
        LightServer(starter, free_port(), bucket=BUCKET, timeout=4.0, device=device)
        for device in devices.servers[:2]
    ]
    for server in few:
        server.start()
    fault = {"version": 3, "signal": signal.SIGSTOP, **where}
    told = {
        "ports": [server.port for server in few],
        "rendezvous": free_port(),
        "folder": str(starter.folder),
    }
    options: dict[str, Any] = {"bucket": BUCKET, "device": devices.trainer, "timeout": 5.0}
    trainer = starter.tell(do="train", transfer=transfer, fault=fault, **options, **told)["pid"]
    for server in few:
        until(lambda server=server: server.state()["gave_up_waiting"] == 3)  # type: ignore[misc]
        assert server.serves(2) == (transfer == "overlapped")
    starter.tell(do="signal", pid=trainer, number=signal.SIGCONT)
    assert starter.tell(do="wait", pid=trainer)["status"] == 0
    for server in few:
        assert server.serves(3)
    sound(few)
    said = (starter.folder / f"trainer-{trainer}.log").read_text()
    for server in few:
        why = rf"{server.port} .*nothing from trainer \S+:{trainer} for 4 s.*: joining it again to send version 3"
        assert re.search(why, said), said
    assert "quarantined" not in said
    assert "away" not in said
    assert "one by one" not in said
    for server in few:
        server.kill()


def test_a_trainer_rank_that_is_late_blames_no_server_and_the_version_is_sent_again(
    devices: Devices,
    starter: Starter,
    free_port: Callable[[], int],
    processes: Processes,
    tmp_path: Path,
) -> None:
    """Two ranks, FSDP2; one is stopped until the servers have given its update up: see
    late_rank.py.
    """
    g = DENSE
    config = config_of(
        "Qwen3", g.num_layers, g.hidden_size, g.intermediate_size, g.num_heads,
        g.num_kv_heads, g.head_dim, g.vocab_size, tie_word_embeddings=g.tie_word_embeddings,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"bucket": BUCKET_BYTES, "model": tmp_path, "timeout": 16.0}
    few = [
        LightServer(starter, free_port(), device=device, **options)
        for device in devices.servers[:2]
    ]
    for server in few:
        server.start()
    script, ports = Path(__file__).with_name("late_rank.py"), [str(server.port) for server in few]
    command = [
        sys.executable,
        "-m",
        "tests.forked_ranks",
        script,
        tmp_path,
        torch.device(devices.trainer).type,
        *ports,
    ]
    trainer = processes.start(
        "ranks", command, environment={"PYTHONPATH": str(ROOT)}, may_finish=True
    )
    for transfer in ("direct", "overlapped"):
        stopped = tmp_path / transfer
        processes.wait_until(
            f"the {transfer} transfer",
            lambda stopped=stopped: None if stopped.exists() else "not yet",
            120,
        )  # type: ignore[misc]
        for server in few:
            until(lambda server=server: server.state()["gave_up_waiting"] == 2)  # type: ignore[misc]
            assert server.serves(1) == (transfer == "overlapped")
        os.kill(int(stopped.read_text()), signal.SIGCONT)
        processes.wait_for_text(trainer, f"version 3 is served after a {transfer} transfer", SOON)
        assert all(server.serves(3) for server in few)
        (tmp_path / f"{transfer} was seen").touch()
    said = processes.finish(trainer, SOON)
    for server in few:
        why = rf"{server.port} gave version 2 up: .*nothing from trainer \S+ for 16 s.*: joining it again to send version 2"
        assert len(re.findall(why, said)) == 2, said
    for wrong in ("quarantined", "away", "one by one"):
        assert wrong not in said
    sound(few)
    for server in few:
        server.kill()


class Wishes:
    """A board with a server on it."""

    def __init__(self) -> None:
        self.wanted: list[str] = []

    def publish(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
        return list(self.wanted), []

    def close(self) -> None:
        return


@pytest.mark.parametrize("transfer", ["direct", "overlapped"])
def test_a_server_that_comes_in_the_middle_of_an_update_waits_for_its_end_and_joins(
    devices: Devices,
    servers: list[LightServer],
    starter: Starter,
    free_port: Callable[[], int],
    transfer: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And another trainer waits there; it is refused after its own deadline."""
    caplog.set_level("INFO")
    wishes, late = (
        Wishes(),
        LightServer(starter, free_port(), bucket=BUCKET, device=devices.servers[2]),
    )
    held, waiting = servers
    options: dict[str, Any] = {"bucket": BUCKET, "device": devices.trainer}
    both = [held.place, waiting.place]
    with training(both, transfer, free_port(), board=wishes, patience=SOON, **options) as trainer:
        held.fault("receive", "stop")
        update = threading.Thread(target=trainer.step)
        update.start()
        until(lambda: waiting.state()["target_version"] == 2)
        with (
            pytest.raises(
                BridgeError,
                match=r"cannot join now: trainer .* is in an update to version 2; .*"
                r"this was so for 1 s \(--service-timeout\): end the other trainer, then start",
            ),
            training([waiting.place], transfer, free_port(), limit=1.0, **options),
        ):
            pass
        assert f"[Bridge] Waiting to join the vLLM server at {waiting.url}: " in caplog.text
        caplog.clear()
        late.start()
        wishes.wanted = [late.url]
        held.signal(signal.SIGCONT)
        update.join(SOON)
        assert all(server.serves(2) for server in servers)
        assert not late.serves(2), "the update was not its own"
        bring_back(trainer, late)
        assert f"[Fleet] {late.url} joined: serves version 2" in caplog.text
        assert "quarantined" not in caplog.text
        trainer.step()
        assert all(server.serves(3) for server in [*servers, late])
        sound([*servers, late])
    late.kill()


def test_no_server_outlives_who_started_it(servers: list[LightServer], starter: Starter) -> None:
    """However tests are broken off: these processes have groups of their own, and hear nothing of
    it. The last test here.
    """
    left = [server.pid for server in servers]
    assert set(left) <= parents().keys()
    starter.process.send_signal(signal.SIGTERM)
    until(lambda: not set(left) & parents().keys())
