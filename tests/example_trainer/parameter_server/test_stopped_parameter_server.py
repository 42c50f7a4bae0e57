"""A parameter server that is stopped (SIGSTOP): the trainer and the vLLM servers name it, and go on
after SIGCONT.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.example_trainer.parameter_server.test_parameter_server import (
    HeldServer,
    Trainer,
    training,
)
from tests.light_servers import SOON, LightServer, Starter, sound, until

pytestmark = pytest.mark.nightly

UPDATE_SECONDS = 4.0
"""The bound of a vLLM server's update, after which it gives up a stopped sender."""


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    one = Starter(tmp_path_factory.mktemp("parameters"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def server(starter: Starter, free_port: Callable[[], int]) -> LightServer:
    one = LightServer(starter, free_port(), timeout=UPDATE_SECONDS)
    one.start()
    return one


@pytest.fixture(scope="module")
def holder(
    starter: Starter, model: Path, server: LightServer, free_port: Callable[[], int]
) -> HeldServer:
    one = HeldServer(
        starter, free_port(), model=model, more=("--vllm-servers", f"127.0.0.1:{server.port}")
    )
    one.start()
    return one


@pytest.fixture(scope="module")
def trainer(holder: HeldServer, free_port: Callable[[], int]) -> Iterator[Trainer]:
    with training([holder], free_port()) as one:
        yield one


def test_its_connections_are_bounded_like_those_of_other_servers(holder: HeldServer) -> None:
    with socket.create_connection(("127.0.0.1", holder.port), timeout=60) as connection:
        connection.sendall(
            b"GET /weights HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 300 + b"\r\n"
        )
        assert connection.recv(12) == b"HTTP/1.1 431"


def go_on_when(holder: HeldServer, true: Callable[[], bool]) -> threading.Thread:
    def wait() -> None:
        try:
            until(true)
        finally:
            holder.signal(signal.SIGCONT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_the_trainer_names_it_waits_and_pushes_again(
    trainer: Trainer, holder: HeldServer, server: LightServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trainer.step()
    trainer.until_served([server])
    holder.signal(signal.SIGSTOP)
    again = go_on_when(
        holder,
        lambda: (
            f"[Fleet] waiting for servers: 0 good, --min-servers 1: {holder.url}" in caplog.text
        ),
    )
    trainer.step()
    again.join(SOON)
    assert f"[Fleet] {holder.url} away: " in caplog.text
    trainer.until_served([server])
    assert f"[Fleet] {holder.url} is back: serves version {trainer.version} after " in caplog.text
    caplog.clear()
    holder.signal(signal.SIGSTOP)  # between two pushes, while the trainer waits for rollouts
    until(
        lambda: (
            trainer.look_after(),
            f"[Fleet] {holder.url} away: does not answer" in caplog.text,
        )[1]
    )
    holder.signal(signal.SIGCONT)
    until(lambda: (trainer.look_after(), f"[Fleet] {holder.url} is back: " in caplog.text)[1])
    sound([server])


def test_a_vllm_server_in_the_middle_of_an_update_names_it_and_serves_what_it_had(
    trainer: Trainer, holder: HeldServer, server: LightServer
) -> None:
    trainer.until_served([server])
    before = trainer.version
    server.fault("receive", "slow")
    trainer.step()
    until(lambda: "receiving" in str(server.state()["ranks"]))
    holder.signal(signal.SIGSTOP)
    try:
        until(
            lambda: str(server.state()["last_error"]).startswith("nothing from parameter server ")
        )
        assert server.state()["last_error"].endswith(f" for {UPDATE_SECONDS:g} s")
        assert server.serves(before)
    finally:
        holder.signal(signal.SIGCONT)
    until(lambda: (trainer.look_after(), server.serves(trainer.version))[1])
    sound([server])
