"""The status by which an environment paces itself, over HTTP against the real process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from .conftest import Service, environment, group, trainer


def test_status_env(service: Service) -> None:
    env_id = service.begin()
    service.post("/register-env", environment(weight=3.0, min_batch_allocation=0.25))
    service.post("/scored_data", group(env_id=env_id))
    answer = service.status_env(env_id).json()
    expected = {
        "current_step": 0,
        "queue_size": 1,
        "unallocated_fraction": 0.75,
        "self_queue_size": 1,
        "max_group_size": 4,
        "env_weight": 0.25,
    }
    assert expected.items() <= answer.items()
    assert service.get("/status-env", env_id=env_id) == answer


def test_status_env_can_wait_for_the_trainer(service: Service) -> None:
    env_id = service.begin(max_staleness=0, ack_batches=True)
    told = service.status_env(env_id).json()

    def after(act: Callable[[], Any]) -> dict[str, Any]:
        """The status of an environment that waits, beside other work."""
        asked = {"env_id": env_id, "moves": told["moves"], "wait": 30}
        url = service.http.base_url.join("/status-env")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(lambda: httpx.request("GET", url, json=asked, timeout=60))
            act()
            found: dict[str, Any] = answer.result(20).json()  # sooner than it would be without
        assert found["moves"] == told["moves"] + 1
        return found

    service.post("/scored_data_list", [group(env_id=env_id)] * 2)
    assert service.status_env(env_id).json()["moves"] == told["moves"], (
        "what environments do is no move"
    )
    batches: list[dict[str, Any]] = []
    told = after(lambda: batches.append(service.get("/batch")))
    assert (told["groups_wanted"], told["current_step"]) == (0, 1)
    told = after(
        lambda: service.post(
            "/batch/ack", {"batch_id": batches[0]["batch_id"], "weight_version": 1}
        )
    )
    assert told["groups_wanted"] == 2
    uuids: list[int] = []
    told = after(lambda: uuids.append(service.post("/register", trainer())["uuid"]))
    assert after(lambda: service.post("/run/end", {"uuid": uuids[0]}))["run_ended"]


def test_status_env_counts_in_groups_of_the_environments_own_size(service: Service) -> None:
    small = service.begin(environment(group_size=2))
    large = service.post("/register-env", environment(group_size=6))["env_id"]
    for _ in range(4):
        service.post("/scored_data", group(2, env_id=small))
    sizes = [
        (answer["queue_size"], answer["self_queue_size"])
        for answer in (service.status_env(env_id).json() for env_id in (small, large))
    ]
    assert sizes == [(4, 4), (1, 0)]
