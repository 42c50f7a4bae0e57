"""The client against the real rollout service, which is killed, restarted, and asked by two."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest

from example_trainer.batch import client as rollout_client
from example_trainer.batch.client import FetchedBatch, RolloutClient
from example_trainer.child_processes.processes import wait_until
from example_trainer.errors import RolloutServiceError
from tests.conftest import Processes
from tests.example_trainer.batch.registration import REGISTRATION, group


def test_batches_arrive_are_acknowledged_and_survive_a_trainer(
    processes: Processes, free_port: Callable[[], int], client_of: Callable[..., RolloutClient]
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    processes.start_service(port)
    client = client_of(url)
    client.register(REGISTRATION)
    for number in (5, 6, 7):
        httpx.post(f"{url}/scored_data", json=group(number), timeout=60).raise_for_status()
    first = client.next_batch()
    assert [one["tokens"][0][1] for one in first.groups] == [5]
    assert first.queue_size == client.queue_size() == 2
    client.acknowledge(first.lease, 4)
    assert client.next_batch().groups[0]["tokens"][0][1] == 6
    client.close()  # dies with the second batch in its hands
    again = client_of(url)
    again.register(REGISTRATION)
    second = again.next_batch()
    assert second.groups[0]["tokens"][0][1] == 6
    again.acknowledge(second.lease, 5)
    third = again.next_batch()
    assert (third.groups[0]["tokens"][0][1], third.environments) == (7, {})
    asked = {"desired_name": "sums", "weight": 1.0, "group_size": 2, "max_token_length": 64}
    env_id = (
        httpx.post(f"{url}/register-env", json=asked, timeout=60)
        .raise_for_status()
        .json()["env_id"]
    )
    httpx.post(
        f"{url}/scored_data", json=group(8) | {"env_id": env_id}, timeout=60
    ).raise_for_status()
    assert again.next_batch().environments == {str(env_id): "sums"}
    again.close()
    reusing = client_of(url)
    reusing.register(
        replace(REGISTRATION, max_staleness=9, replay={"policy": "fifo", "max_reuse": 2, "seed": 0})
    )
    seen = []
    for version in range(4, 8):
        batch = reusing.next_batch()
        seen.append((batch.groups[0]["tokens"][0][1], batch.uses))
        reusing.acknowledge(batch.lease, version)
    assert seen == [(7, [0]), (8, [0]), (7, [1]), (8, [1])], "what was left, and all of it again"


def test_the_waiting_line_names_what_is_missing(
    processes: Processes,
    free_port: Callable[[], int],
    client_of: Callable[..., RolloutClient],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The waits of one trainer: without an environment, with one that posts nothing, and with one
    whose posts are refused.
    """
    monkeypatch.setattr(rollout_client, "LOG_EVERY", 0.1)
    caplog.set_level(logging.INFO)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    processes.start_service(port)
    client = client_of(url)
    client.register(REGISTRATION)
    found: list[FetchedBatch] = []
    waiting = threading.Thread(target=lambda: found.append(client.next_batch()), daemon=True)
    waiting.start()

    def wait_for_line(*parts: str) -> None:
        def probe() -> str | None:
            lines = [
                line for line in caplog.messages if line.startswith("Waiting for a batch for ")
            ]
            return (
                None
                if any(all(part in line for part in parts) for line in lines)
                else f"{parts} are in none of {lines[-3:]}"
            )

        wait_until("the waiting line", probe, 60)

    wait_for_line(" s: 0 of 2 sequences are queued; no environment is registered: start one")
    asked = {"desired_name": "sums", "weight": 1.0, "group_size": 2, "max_token_length": 64}
    env_id = (
        httpx.post(f"{url}/register-env", json=asked, timeout=60)
        .raise_for_status()
        .json()["env_id"]
    )
    wait_for_line(
        " s: 0 of 2 sequences are queued; sums_0 is registered and has posted no group for "
    )
    bad = group(8) | {"env_id": env_id, "scores": [1.0]}
    assert httpx.post(f"{url}/scored_data", json=bad, timeout=60).status_code == 422
    wait_for_line(
        "1 post was refused since the last batch, the last one because: scores has 1 entries for 2 sequences"
    )
    httpx.post(
        f"{url}/scored_data", json=group(8) | {"env_id": env_id}, timeout=60
    ).raise_for_status()
    waiting.join(60)
    assert len(found) == 1


def test_a_service_that_is_restarted_empty_is_registered_with_again(
    processes: Processes,
    free_port: Callable[[], int],
    client_of: Callable[..., RolloutClient],
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    service = processes.start_service(port)
    client = client_of(url, batch_timeout=60, service_timeout=60)
    client.register(REGISTRATION)
    httpx.post(f"{url}/scored_data", json=group(5), timeout=60).raise_for_status()
    held = client.next_batch()
    processes.kill(service)
    found: list[FetchedBatch] = []
    waiting = threading.Thread(
        target=lambda: found.append(client.next_batch()), daemon=True
    )  # ahead of the training
    waiting.start()
    processes.start_service(port, "--new-run")

    def registered() -> str | None:
        size = httpx.get(f"{url}/info", timeout=60).json()["batch_size"]
        return None if size == REGISTRATION.batch_size else f"batch_size is {size}"

    def asked() -> str | None:
        return None if "Registering with the rollout service" in caplog.text else "it has not asked"

    processes.wait_until("the trainer to find out", asked, seconds=180)
    assert httpx.get(f"{url}/info", timeout=60).json()["batch_size"] == -1, (
        "it would be counted one version too young"
    )
    client.acknowledge(held.lease, 4)
    processes.wait_until("the trainer to register again", registered, seconds=180)
    assert httpx.get(f"{url}/stats", timeout=60).json()["trainer_version"] == 4
    httpx.post(f"{url}/scored_data", json=group(9), timeout=60).raise_for_status()
    waiting.join(timeout=120)
    assert not waiting.is_alive()
    assert found[0].groups[0]["tokens"][0][1] == 9
    assert "could not be acknowledged" in caplog.text
    assert "Waiting for the rollout service" in caplog.text


def test_two_trainers_do_not_share_batches(
    processes: Processes, free_port: Callable[[], int], client_of: Callable[..., RolloutClient]
) -> None:
    port = free_port()
    processes.start_service(port)
    old, new = client_of(f"http://127.0.0.1:{port}"), client_of(f"http://127.0.0.1:{port}")
    old.register(REGISTRATION)
    new.register(REGISTRATION)
    with pytest.raises(RolloutServiceError, match=r"409: .*another trainer has registered since"):
        old.next_batch()


def test_a_key_that_is_needed_is_asked_for(
    processes: Processes, free_port: Callable[[], int], client_of: Callable[..., RolloutClient]
) -> None:
    port = free_port()
    processes.start_service(port, "--api-key", "sesame", "--host", "127.0.0.1")
    with pytest.raises(
        RolloutServiceError, match=r"refuses this trainer \(401\); give --atropos-api-key"
    ):
        client_of(f"http://127.0.0.1:{port}").register(REGISTRATION)
    client_of(f"http://127.0.0.1:{port}", api_key="sesame").register(REGISTRATION)
