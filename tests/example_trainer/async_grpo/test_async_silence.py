"""Roles that run and do nothing: the driver names them, ends them, and starts them again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import yaml

from example_trainer.async_grpo import actor, service
from example_trainer.async_grpo.actor import Address
from example_trainer.async_grpo.driver import Driver, RunFailed
from example_trainer.async_grpo.restarts import State
from example_trainer.async_grpo.service import ServiceFleet, Silences
from example_trainer.async_grpo.settings import read_settings
from example_trainer.child_processes.processes import wait_until
from tests.conftest import Processes
from tests.e2e.async_roles import light_commands, numbers
from tests.example_trainer.async_grpo.fake_cluster import Bench
from tests.example_trainer.async_grpo.test_async_bad_input import KEYS, ThisMachine
from tests.forked_commands import ForkedProcess

pytestmark = pytest.mark.nightly

KEY = "sesame"


def running(folder: Path, **orchestration: float) -> Bench:
    made = Bench(folder, generators=2, **orchestration)
    made.turn(10)
    assert {keeper.state for keeper in made.driver.keepers.values()} == {State.UP}
    return made


def test_a_silent_environment_is_named_then_ended_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = running(tmp_path)
    active = made.cluster.now
    made.silences.was_active("environment-1", active)
    made.turn(2 * 70)
    assert (
        "[Async] environment-1 has been silent for 60 s, though its process runs; log: "
        in caplog.text
    )
    assert "/logs/environment-1.log; after 300 s it is ended and started again" in caplog.text
    made.silences.was_active("environment-1", made.cluster.now)  # SIGCONT
    made.turn(2 * 299)
    assert made.cluster.stopped == []
    made.turn(2 * 10)
    assert made.cluster.stopped == ["environment-1"]
    assert made.cluster.order.count("environment-1") == 2
    assert made.state("environment-1") is State.UP
    made.turn(2 * 400)
    assert made.cluster.stopped == ["environment-1"], (
        "nothing is known of its second life yet, and the first does not count"
    )
    assert made.cluster.order.count("environment-2") == made.cluster.order.count("trainer") == 1


def test_a_role_that_stands_still_again_and_again_ends_the_run(tmp_path: Path) -> None:
    made = running(tmp_path, restarts=1, steady_seconds=10_000.0)

    def stand_still_at_once(seconds: float) -> None:
        made.sleep(seconds)
        made.silences.was_active("environment-2", made.driver.keepers["environment-2"].since)

    made.driver._sleep = stand_still_at_once
    with pytest.raises(
        RunFailed, match=r"environment-2 has been silent for 300 s, .*; it failed 2 times in a row"
    ):
        made.driver.run()


def test_zero_never_ends_a_silent_role(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = running(tmp_path, silent_seconds=0.0)
    made.silences.was_active("service", made.cluster.now)
    made.turn(2 * 1000)
    assert made.cluster.stopped == []
    assert caplog.text.count("service has been silent for ") == 16
    assert "orchestration.silent_seconds is 0" in caplog.text


@pytest.mark.parametrize("name", ["generator-1", "trainer"])
def test_generators_and_the_trainer_are_not_judged(tmp_path: Path, name: str) -> None:
    made = running(tmp_path)
    made.silences.was_active(name, made.cluster.now)
    made.turn(2 * 1000)
    assert made.cluster.stopped == []


def test_a_driver_that_was_stopped_itself_asks_anew(tmp_path: Path) -> None:
    made = running(tmp_path)
    made.silences.was_active("environment-1", made.cluster.now)
    made.cluster.now += 4000.0
    made.turn(4)
    assert made.cluster.stopped == []


def test_the_service_tells_of_others_and_its_own_silence_is_not_theirs(
    processes: Processes, free_port: Callable[[], int]
) -> None:
    port = free_port()
    service = processes.start_service(port, "--api-key", KEY)
    url = f"http://127.0.0.1:{port}"
    silences, place = Silences(KEY), Address("127.0.0.1", (port,), ())
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as http:
        trainer = {
            "wandb_group": "g",
            "wandb_project": "p",
            "batch_size": 2,
            "max_token_len": 64,
            "checkpoint_dir": "c",
        }
        trainer |= {"save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10}
        http.post("/register", json=trainer).raise_for_status()
        http.get("/batch").raise_for_status()
        asked = {"desired_name": "sums", "weight": 1.0, "group_size": 2, "max_token_length": 64}

        def call(name: str) -> None:
            env_id = http.post("/register-env", json=asked).raise_for_status().json()["env_id"]
            body = {"env_id": env_id, "process": name}
            http.request("GET", "/status-env", json=body).raise_for_status()

        def silence(role: str, seconds: float) -> None:
            def probe() -> str | None:
                silences.round(place, {"service": f"{url}/"})
                found = silences.seconds(role, 0.0)
                return None if found > seconds else f"{found} s"

            wait_until(f"silence of {role}", probe, 120)

        call("environment-1")
        silence("environment-1", 1.0)
        call("environment-1")  # its next life: the row of the first one stays
        call("environment-2")
        silences.round(place, {"service": f"{url}/"})
        silence("environment-1", silences.seconds("environment-1", 0.0))
        os.kill(service.command_pid(), signal.SIGSTOP)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("example_trainer.async_grpo.service.ANSWER_SECONDS", 0.5)
            silence("service", 1.0)
            assert (
                silences.seconds("environment-1", 0.0)
                == silences.seconds("environment-2", 0.0)
                == 0.0
            )
        resumed = time.monotonic()
        os.kill(service.command_pid(), signal.SIGCONT)

        def answers() -> str | None:
            silences.round(place, {"service": f"{url}/"})
            return None if silences.seconds("service", resumed) else "none"

        wait_until("the service's answer", answers, 120)
        assert silences.seconds("environment-1", 0.0) == 0.0, "it may not have called yet"
        silence("environment-1", 0.0)
        lease = {"worker": "reference-1", "model": "m", "max_tokens": 1, "seconds": 60}
        http.post("/reference/lease", json=lease).raise_for_status()
        silence("reference-1", 0.0)


def test_a_real_service_that_is_stopped_is_started_again_on_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside light roles. Nothing that it had accepted is lost, and nothing is trained on twice."""
    monkeypatch.setattr(actor, "ManagedProcess", ForkedProcess)
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(service, "ANSWER_SECONDS", 1.0)
    folder = tmp_path / "run"
    asked = {"device": "cpu", "silent_seconds": 4.0, "restart_delay": 0.1}
    text = {
        "training": {"model_name": "assets/starter_model"},
        "logging": {"folder": str(folder)},
        "orchestration": asked,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(text))
    settings, cluster, key = (
        read_settings(tmp_path / "run.yaml"),
        ThisMachine(),
        KEYS["ROLLOUT_API_KEY"],
    )
    commands = light_commands("generator", "environment", "trainer")(settings, KEYS)
    stopped: list[int] = []

    def trained() -> list[int]:
        return numbers(folder / "trained")

    def stop_the_service_then_end() -> None:
        service = driver.keepers["service"]
        if not stopped and len(trained()) > 2:
            stopped.append(len(trained()))
            (process,) = [
                seat.process._process for seat in cluster.seats if seat.process._name == "service"
            ]
            assert process is not None
            os.kill(process.command_pid(), signal.SIGSTOP)
        if stopped and service.lives > 1 and len(trained()) > stopped[0] + 2:
            (folder / "enough").touch()

    driver = Driver(
        settings,
        cluster,
        KEYS,
        ServiceFleet(key),
        Silences(key),
        stop_the_service_then_end,
        commands,
    )
    for keeper in driver.keepers.values():
        keeper.role = replace(keeper.role, grace=1.0)  # a stopped process uses all of it
    driver.run()
    assert "[Async] service has been silent for " in caplog.text
    assert "orchestration.silent_seconds is 4; it is ended and started again" in caplog.text
    assert sorted(trained()) == sorted(set(trained()))
    assert set(numbers(folder / "accepted-environment-1")) <= set(trained())
