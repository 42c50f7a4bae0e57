"""A real rollout service that is stopped (SIGSTOP): its callers name it while they wait, and
nothing is lost or doubled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from atroposlib import service_client
from atroposlib.service_client import RolloutServiceClient
from atroposlib.utils import waiting
from example_trainer.batch.client import FetchedBatch, RolloutClient
from example_trainer.child_processes.processes import wait_until
from example_trainer.errors import RolloutServiceError
from tests.conftest import Processes
from tests.example_trainer.batch.registration import REGISTRATION, group


def post(url: str, numbers: list[int]) -> None:
    """Post groups as an environment does, all at once."""

    async def run() -> None:
        client = RolloutServiceClient(url, 60.0)
        bodies = [group(number) | {"idempotency_key": f"key-{number}"} for number in numbers]
        await asyncio.gather(*(client.post("/scored_data", body) for body in bodies))
        await client.close()

    asyncio.run(run())


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that pass several times while the service is stopped."""
    monkeypatch.setattr(service_client, "REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(service_client, "LOG_EVERY", 0.5)
    monkeypatch.setattr(waiting, "LOG_EVERY", 0.5)
    monkeypatch.setattr(service_client, "WATCH_SECONDS", 0.1)


def test_a_stopped_service_is_named_by_all_callers_and_nothing_is_lost_or_doubled(
    processes: Processes,
    free_port: Callable[[], int],
    client_of: Callable[..., RolloutClient],
    short_deadlines: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    service = processes.start_service(port)
    client = client_of(url)
    client.register(REGISTRATION)
    post(url, [1])
    first = client.next_batch()
    os.kill(service.command_pid(), signal.SIGSTOP)

    def acknowledge_and_go_on() -> list[FetchedBatch]:
        client.acknowledge(first.lease, 4)
        found = []
        for version in (5, 6, 7):
            found.append(client.next_batch())
            client.acknowledge(found[-1].lease, version)
        return found

    def logged(*parts: str) -> None:
        def probe() -> str | None:
            found = [line for line in caplog.messages if all(part in line for part in parts)]
            return None if found else f"{parts} are in none of {caplog.messages[-5:]}"

        wait_until("the line", probe, 60)

    with ThreadPoolExecutor() as pool:
        trainer, environment = pool.submit(acknowledge_and_go_on), pool.submit(post, url, [2, 3, 4])
        logged(
            f"Waiting for the rollout service at {url} for ", "(POST /batch/ack: no answer so far)"
        )
        logged(
            f"Waiting for the rollout service at {url} for ",
            "(POST /batch/ack: ReadTimeout: timed out)",
        )
        logged(
            f"Waiting for the rollout service at {url} for ",
            "(POST /scored_data: no answer so far)",
        )
        os.kill(service.command_pid(), signal.SIGCONT)
        environment.result(60)
        batches = trainer.result(60)
    assert sorted(one["tokens"][0][1] for batch in batches for one in batch.groups) == [2, 3, 4]
    logged(f"the rollout service at {url}: there after ")
    told = httpx.get(f"{url}/stats", timeout=60).json()
    assert (told["trainer_version"], told["queue"]["held_groups"]) == (7, 0)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A port that takes connections and requests, and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_one_line_for_all_threads_that_wait(
    silent_server: str,
    client_of: Callable[..., RolloutClient],
    short_deadlines: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, begun = client_of(silent_server, service_timeout=2.0), time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(client.queue_size) for _ in range(4)]
    assert all(isinstance(wait.exception(), RolloutServiceError) for wait in waits)
    said = caplog.text.count("Waiting for the rollout service")
    most = 1 + (time.monotonic() - begun) / service_client.LOG_EVERY
    assert 0 < said <= most


def test_the_end_of_a_run_waits_for_a_stopped_service_for_its_own_deadline(
    silent_server: str,
    client_of: Callable[..., RolloutClient],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A request's deadline of 60 s does not lengthen a wait of less."""
    monkeypatch.setattr("example_trainer.batch.client._END_SECONDS", 1.5)
    client_of(silent_server).end_run()
    (seconds,) = re.findall(
        r"POST /run/end: ReadTimeout: timed out for (\d+) s, giving", caplog.text
    )
    assert 2 <= int(seconds) < 60


async def test_a_caller_that_was_stopped_itself_does_not_blame_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    patience = waiting.Patience(
        "s", 1800.0, RuntimeError, logging.getLogger(), longest_attempt=125.0
    )  # type: ignore[arg-type]
    now[0] = 4000.0
    patience.check("no answer")
    assert patience.waited == 125.0
    for _ in range(14):
        now[0] += 125.0
        if patience.waited < 1800.0:
            patience.check("no answer")
    with pytest.raises(RuntimeError, match=r"s: no answer for 1875 s, giving up"):
        patience.check("no answer")
