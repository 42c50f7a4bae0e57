"""Real servers' processes that are killed, stopped, restarted and made to lie in each phase of an
update.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from example_trainer.errors import BridgeError
from tests.fleet_trainer import TIMEOUT, Trainer, training
from tests.light_servers import SOON, Devices, LightServer, Starter, bring_back, sound, until

# early among the others (tests/conftest.py): they take long
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

BUCKET = 2048
"""Bytes: the tiny model goes in several."""


@pytest.fixture(scope="module")
def devices() -> Devices:
    """tests/gpu/test_fleet_faults.py has others."""
    return Devices()


@pytest.fixture(scope="module")
def servers(
    devices: Devices, tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[list[LightServer]]:
    starter = Starter(tmp_path_factory.mktemp("fleet"))
    found = [
        LightServer(starter, free_port(), bucket=BUCKET, device=device)
        for device in devices.servers
    ]
    for server in found:
        server.start()
    yield found
    starter.close()


def places(servers: list[LightServer]) -> list[tuple[str, int]]:
    return [server.place for server in servers]


@pytest.fixture(scope="module", params=["direct", "overlapped"])
def trainer(
    request: pytest.FixtureRequest,
    devices: Devices,
    servers: list[LightServer],
    free_port: Callable[[], int],
) -> Iterator[Trainer]:
    options: dict[str, Any] = {
        "bucket": BUCKET,
        "device": devices.trainer,
        "patience": devices.patience,
    }
    with training(places(servers), request.param, free_port(), **options) as one:
        yield one


FAULTS = [
    ("", "kill"), ("", "stop"), ("", "restart"),
    ("cohort", "kill"), ("cohort", "stop"), ("cohort", "restart"),
    ("begin", "kill"), ("begin", "stop"), ("begin", "restart"),
    ("receive", "kill"), ("receive", "stop"), ("receive", "slow"), ("receive", "restart"),
    ("commit", "kill"), ("commit", "stop"), ("commit", "restart"), ("commit", "lie"),
]  # fmt: skip


def strike(trainer: Trainer, faulty: LightServer, at: str, do: str) -> threading.Thread | None:
    """Make a server fail. Return the thread that starts it again, if it restarts in the update."""
    if at == "cohort":  # it is formed again
        trainer.bridge._updates._keeper.members[faulty.url].joined = False
        for line in trainer.bridge._lines.values():
            line.leave()
    if (at, do) == ("", "restart"):
        faulty.kill()
        faulty.start()
    elif do == "restart":
        faulty.fault(at, "kill")
        again = threading.Thread(
            target=lambda: (until(lambda: faulty.get("/weights") is None), faulty.start())
        )
        again.start()
        return again
    elif at:
        faulty.fault(at, do)
    else:
        faulty.signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[do])
    return None


@pytest.mark.parametrize(
    ("at", "do", "which"),
    # The first hands its data on to others, where weights travel that way; a server that then waits
    # for it is not to blame.
    [
        *(pytest.param(*fault, 1, id="-".join(fault)) for fault in FAULTS),
        pytest.param("receive", "slow", 0, id="first-slow"),
    ],
)
def test_one_of_three_fails_and_training_does_not_miss_a_step(
    trainer: Trainer,
    servers: list[LightServer],
    at: str,
    do: str,
    which: int,
    caplog: pytest.LogCaptureFixture,
    record_property: Callable[[str, object], None],
) -> None:
    """Record for check_fleet_faults.py the seconds of the update, and until the faulty server
    served the right weights again.
    """
    caplog.set_level("INFO")
    faulty, others = (
        servers[which],
        [server for place, server in enumerate(servers) if place != which],
    )
    again = strike(trainer, faulty, at, do)
    seconds = trainer.step()
    late = ("timed out", f"within {TIMEOUT:g} s")
    assert not any(why in caplog.text for why in late), "nobody waited as long as a server may take"
    assert all(server.serves(trainer.version) for server in others)
    standing = {
        "slow": "quarantined",
        "lie": "quarantined",
        "restart": "(away|quarantined|joining)",
    }.get(do, "away")
    assert re.search(
        rf"\[Fleet\] {faulty.url} {standing}: .*; training goes on with 2 of 3 servers", caplog.text
    )
    if again is not None:
        again.join(SOON)
    elif do == "kill":
        faulty.kill()
        faulty.start()
    elif do == "stop":
        faulty.signal(signal.SIGCONT)
    answers = time.monotonic()
    bring_back(trainer, faulty)
    record_property("update_s", round(seconds, 3))
    record_property("back_s", round(time.monotonic() - answers, 3))
    assert f"[Fleet] {faulty.url} is back: serves version {trainer.version} after " in caplog.text
    trainer.step()
    assert all(server.serves(trainer.version) for server in servers)
    sound(servers)


def test_all_are_gone_and_back(
    trainer: Trainer, servers: list[LightServer], caplog: pytest.LogCaptureFixture
) -> None:
    waits = "[Fleet] waiting for servers: 0 good, --min-servers 1: "
    for server in servers:
        server.kill()
    starter = threading.Thread(
        target=lambda: (until(lambda: waits in caplog.text), [one.start() for one in servers])
    )
    starter.start()
    trainer.step()
    starter.join()
    for server in servers:
        bring_back(trainer, server)
    sound(servers)


def test_one_that_serves_another_version_is_left_out_until_a_full_update(
    trainer: Trainer,
    servers: list[LightServer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its answers are played, at a look of the trainer's; the rest is real."""
    caplog.set_level("INFO")
    faulty = servers[1]
    client = trainer.bridge._keeper.members[faulty.url].server
    look, said = client.look, threading.Event()

    def another_version(path: str, seconds: float) -> dict[str, Any] | None:
        state = look(path, seconds)
        if state is None or said.is_set():
            return state
        said.set()
        return {**state, "weight_version": 7000}

    monkeypatch.setattr(client, "look", another_version)
    told = rf"\[Fleet\] {faulty.url} quarantined: serves version 7000 \(weight epoch 5\) instead of {trainer.version};"
    until(lambda: re.search(told, caplog.text) is not None)
    bring_back(trainer, faulty)
    assert f"[Fleet] {faulty.url} is back: serves version {trainer.version} after " in caplog.text
    sound(servers)


@pytest.mark.parametrize("transfer", ["direct", "overlapped"])
def test_a_second_trainer_takes_over_and_the_first_one_is_told(
    devices: Devices,
    servers: list[LightServer],
    free_port: Callable[[], int],
    transfer: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One of three: the first goes on without it, and leaves it alone until it is restarted.

    All of them: the first ends.
    """
    taken, others = servers[1], [servers[0], servers[2]]
    options: dict[str, Any] = {
        "bucket": BUCKET,
        "port": 0,
        "device": devices.trainer,
        "patience": devices.patience,
    }
    with training(places(servers), transfer, free_port(), **options) as first:
        with training(places([taken]), transfer, free_port(), **options) as second:
            for _ in range(3):
                second.step()
            first.step()
            assert all(server.serves(2) for server in others)
            assert taken.serves(4), "other weights than those of the first"
            assert re.search(
                rf"\[Fleet\] {taken.url} quarantined: trainer \S+ .* has taken it over", caplog.text
            )
            first.look_after()
            assert taken.serves(4)
        taken.kill()
        taken.start()
        bring_back(first, taken)
        with training(places(servers), transfer, free_port(), **options) as second:
            second.step()
            with pytest.raises(BridgeError, match="has taken it over"):
                first.step()
            second.step()
            assert all(server.serves(second.version) for server in servers)
    sound(servers)
