"""Random requests and bytes on the service: no fault of its own."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import raw_fuzz
from tests.atroposlib.service.conftest import Service, environment, group, trainer
from tests.atroposlib.service.killed_service import until
from tests.fuzz_size import LONG_SECONDS, fuzz_inputs, fuzz_seed
from tests.generated_requests import operations_of, send_generated
from tests.raw_fuzz import faults_in
from tests.raw_requests import Target

pytestmark = pytest.mark.nightly
TENTHS = {
    "/scored_data": 3,
    "/scored_data_list": 1,
    "/register": 2,
    "/register-env": 1,
    "the rest": 3,
}


"""Shares of the inputs, by route."""


def with_right_lengths(case: Any) -> None:
    """Give half of the groups sequences that fit together: generated ones never do.

    Their other content stays.
    """
    for entry in case.body if isinstance(case.body, list) else [case.body]:
        if isinstance(entry, dict) and "tokens" in entry and len(str(entry)) % 2:
            entry.update(group(2))
            for name in [
                name
                for name, value in entry.items()
                if isinstance(value, list) and name not in group()
            ]:
                entry[name] = [*entry[name], None, None][:2]


@pytest.mark.timeout(LONG_SECONDS)
@pytest.mark.parametrize("path", TENTHS)
def test_no_request_breaks_the_service(shared_service: Service, path: str) -> None:
    url = f"http://127.0.0.1:{shared_service.port}/openapi.json"
    operations = operations_of(
        url, lambda found: (found if found in TENTHS else "the rest") == path
    )
    statuses = send_generated(
        operations, fuzz_inputs(500) * TENTHS[path] // 10, fuzz_seed(), with_right_lengths
    )
    print(f"{path}: {statuses.total()} requests: {dict(sorted(statuses.items()))}")
    assert faults_in(shared_service.log) == []


def test_after_all_that_it_still_works(service: Service) -> None:
    service.begin(batch_size=4)
    service.post("/scored_data", group())
    assert service.get("/batch")["batch"] is not None


COUNT_TASKS = """
import asyncio, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: print(f"tasks: {len(asyncio.all_tasks())}", file=sys.stderr, flush=True))
"""


"""Has the service write the number of its tasks to its log at each SIGUSR1."""


PAST_WARM_UP = 8


"""Files that the service may open after the first requests, such as the files of the archive of
rollouts.
"""


SERVER = {
    "url": "http://127.0.0.1:9",
    "standing": "good",
    "weight_version": 1,
    "weight_epoch": 0,
    "since": 1.0,
    "reason": "",
}


EVALUATION = {
    "name": "held out",
    "metrics": {"accuracy": 0.5},
    "env_id": 0,
    "weight_version": 1,
    "idempotency_key": "a key",
}


REFERENCE = {"worker": "one", "model": "m", "max_tokens": 4096, "seconds": 10}
FULL_GROUP = group(
    weight_versions=[0] * 4,
    weight_version_spans=[[[0, 3]]] * 4,
    sampling_params=[{"temperature": 1.0, "top_k": 20}] * 4,
    finish_reasons=["stop"] * 4,
    messages=[[{"role": "user", "content": "Say 1."}]] * 4,
    overrides=[{"set_advantage_to_zero": False}] * 4,
    idempotency_key="another key",
    env_id=0,
)


READ = (
    "/",
    "/status",
    "/batch",
    "/stats",
    "/metrics",
    "/info",
    "/wandb_info",
    "/latest_example",
    "/fleet",
    "/reference",
)


READ += ("/evaluations?after=0", "/batch/set-aside", "/openapi.json", "/ui", "/reset_data")


TARGETS = [
    *(
        Target("GET", path)
        for path in (
            "/",
            "/status",
            "/batch",
            "/stats",
            "/metrics",
            "/info",
            "/wandb_info",
            "/latest_example",
        )
    ),
    *(
        Target("GET", path)
        for path in (
            "/fleet",
            "/reference",
            "/evaluations?after=0",
            "/batch/set-aside",
            "/openapi.json",
            "/ui",
        )
    ),
    Target(
        "POST",
        "/register",
        trainer(ack_batches=True, max_staleness=3, log_dir="logs", positions={"a": 1}),
    ),
    Target("POST", "/register-env", environment(min_batch_allocation=0.5, stream="a")),
    Target("POST", "/disconnect-env", {"env_id": 1}),
    Target("GET", "/status-env", {"env_id": 0, "moves": 0, "wait": 0.1}),
    *[Target("POST", "/scored_data", FULL_GROUP), Target("POST", "/scored_data", group(length=40))]
    * 3,
    Target("POST", "/scored_data_list", [FULL_GROUP, group(env_id=0)]),
    Target("POST", "/batch/ack", {"batch_id": 1, "weight_version": 1, "report": {"loss": 0.5}}),
    Target("POST", "/batch/report", {"batch_id": 1, "error": "a reason"}),
    Target("POST", "/weight-epoch", {"asked": 3, "run": "r"}),
    Target("POST", "/run/end", {"uuid": 5}),
    Target("POST", "/reference/lease", REFERENCE),
    Target(
        "POST",
        "/reference/done",
        {"worker": "one", "groups": [{"id": 1, "ref_logprobs": [[0.0, -1.0]]}]},
    ),
    Target("POST", "/evaluations", EVALUATION),
    Target("POST", "/fleet", {"servers": [SERVER], "by": "a publisher"}),
    Target("POST", "/fleet/join", {"url": "http://127.0.0.1:9"}),
    Target("POST", "/fleet/leave", {"url": "http://127.0.0.1:9"}),
    Target("POST", "/ui/sign-in", {"key": "x"}),
]


@pytest.fixture
def counted_service(tmp_path: Path) -> Iterator[Service]:
    """A service that writes the number of its tasks to its log when it gets SIGUSR1."""
    (tmp_path / "sitecustomize.py").write_text(COUNT_TASKS)
    flags = (
        "--store",
        str(tmp_path / "run.db"),
        "--request-timeout",
        "3",
        "--max-queue-groups",
        "2000",
    )
    service = Service(tmp_path, *flags, environ={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}).start()
    yield service
    assert service.signal(signal.SIGTERM) == 0, service.log.read_text()[-2000:]


def tasks_of(service: Service) -> int:
    """Count the tasks in the service's event loop."""
    counted = len(re.findall(r"^tasks: ", service.log.read_text(), re.MULTILINE))
    service.process.send_signal(signal.SIGUSR1)
    counts: list[str] = []

    def written() -> bool:
        counts[:] = re.findall(r"^tasks: (\d+)$", service.log.read_text(), re.MULTILINE)
        return len(counts) > counted

    until(written, "the service counts its tasks")
    return int(counts[-1])


def post_until_taken(service: Service, body: dict[str, Any]) -> None:
    """Post a group again while a busy machine needs longer than the service allows."""
    until(
        lambda: service.http.post("/scored_data", json=body).status_code == 200,
        "the service takes a group",
    )


@pytest.mark.timeout(LONG_SECONDS)
def test_random_bytes_do_not_break_the_service(counted_service: Service) -> None:
    service, inputs, seed = counted_service, fuzz_inputs(300), fuzz_seed()
    service.begin(batch_size=8)
    # Above 1 MiB a process of its own reads it.
    post_until_taken(service, group(8, 30_000))
    service.get("/batch")
    pid = service.process.pid
    files, tasks = raw_fuzz.open_files(pid), tasks_of(service)
    outcome = raw_fuzz.run(("127.0.0.1", service.port), TARGETS, seed, range(inputs))
    print(f"{inputs} inputs: {dict(sorted(outcome.statuses.items()))}")
    assert outcome.faults == [], "\n".join(outcome.faults[:5])
    assert raw_fuzz.faults_in(service.log) == [], f"seed {seed}"
    assert {200, 400, 404, 422} <= outcome.statuses.keys(), (
        "the inputs reach the routes, and are wrong in several ways"
    )
    until(
        lambda: raw_fuzz.open_files(pid) <= files + PAST_WARM_UP,
        f"seed {seed}: files are closed ({files} before)",
    )
    until(lambda: tasks_of(service) <= tasks, f"seed {seed}: tasks end ({tasks} before)")
    service.http.get("/reset_data")
    service.begin(batch_size=4)
    service.post("/scored_data", group())
    assert service.get("/batch")["batch"] is not None
