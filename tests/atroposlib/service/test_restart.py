"""The state of the service after a restart, and the answers to a trainer of another run.

Real processes.
"""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from .conftest import ROOT, Service, environment, free_port, group, marks, trainer

Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts services on one port and in one folder, one after the other."""
    port = free_port()
    started: list[Service] = []

    def run(*flags: str) -> Service:
        service = Service(tmp_path, *flags, port=port, environ={"PYTHONPATH": str(ROOT)})
        service.cwd = tmp_path
        started.append(service)
        return service.start()

    yield run
    for service in started:
        service.signal(signal.SIGKILL)


def registration(**fields: Any) -> dict[str, Any]:
    """A trainer that has come to version 1."""
    return trainer(
        **{
            "batch_size": 4,
            "ack_batches": True,
            "model": "m",
            "max_staleness": 5,
            "starting_step": 1,
            **fields,
        }
    )


def begin(service: Service) -> None:
    """A run with something of everything: a batch that is out, a queue, a buffer, a key, an
    environment.
    """
    service.post("/register", registration(starting_step=0))
    service.get("/batch")
    service.post("/register-env", environment())
    for mark in range(4):
        service.post("/scored_data", group(mark=mark, env_id=0, weight_versions=[1] * 4))
    service.post(
        "/scored_data", group(2, mark=9, env_id=0, idempotency_key="nine", weight_versions=[1, 1])
    )
    batch = service.get("/batch")
    service.post("/batch/ack", {"batch_id": batch["batch_id"], "weight_version": 1})
    assert marks(service.get("/batch")["batch"]) == [1]
    # That a batch has been sent is written down after it was sent; a kill before that would have it
    # sent again, as it should.
    deadline = time.monotonic() + 60
    while not sent_on_disk(service):
        assert time.monotonic() < deadline, service.log.read_text()[-2000:]
        time.sleep(0.01)


def sent_on_disk(service: Service) -> bool:
    """A run on Ray that is killed whole and started again equals an undisturbed run, bit for bit,
    on a GPU.
    """
    found = (
        path for path in service.cwd.rglob("*.db") if not path.parent.name.endswith("observed")
    )
    [path] = [path for path in found if ".previous" not in path.name]
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as store:
        newest = "SELECT record FROM records WHERE kind = 'lease' ORDER BY id DESC LIMIT 1"
        return bool(orjson.loads(store.execute(newest).fetchone()[0])["sent"])


def lasting(service: Service) -> dict[str, Any]:
    """Return /stats without the time since an environment has spoken, and without the disk, which
    other programs fill.
    """
    stats: dict[str, Any] = service.get("/stats")
    for entry in stats["environments"]:
        del entry["seconds_silent"]
    del stats["store"]["free_bytes"]
    return stats


def is_new(service: Service) -> bool:
    return (
        service.get("/status") == {"current_step": 0, "queue_size": 0}
        and service.get("/info")["batch_size"] == -1
    )


def test_the_same_command_goes_on_however_the_service_ended_until_its_trainer_ends_the_run(
    start: Start,
) -> None:
    service = start()
    assert is_new(service)
    begin(service)
    before = lasting(service)
    for how in (
        signal.SIGKILL,
        signal.SIGTERM,
        signal.SIGINT,
    ):  # a crash, a scheduler that preempts or reboots, a person
        service.signal(how)
        service = start()
        assert lasting(service) == before
        assert "which has not ended (--new-run begins a new one)" in service.log.read_text()
    assert service.status_env(0).status_code == 200, "the environment is known still"
    assert marks(service.get("/batch")["batch"]) == [1], "the batch that was out is the trainer's"
    assert (
        service.post(
            "/scored_data",
            group(2, mark=9, env_id=0, idempotency_key="nine", weight_versions=[1, 1]),
        )["status"]
        == "buffered"
    )
    assert lasting(service) == before, "the group was posted before"

    refused = service.http.post("/run/end", json={"uuid": 1})
    assert refused.status_code == 409, "only the trainer that is registered may say so"
    assert service.http.post("/run/end", json={}).status_code == 422
    uuid = service.post("/register", registration())["uuid"]
    for _ in range(2):
        assert service.post("/run/end", {"uuid": uuid}) == {"status": "success"}
    assert service.get("/stats")["run_ended"]
    assert service.status_env(0).json()["run_ended"]
    service.signal(signal.SIGKILL)
    service = start()
    assert is_new(service)
    name = Path("runs") / f"rollouts-{service.port}.db"
    previous = name.with_suffix(".previous.db")
    log = service.log.read_text()
    assert (
        f"because the trainer of the last one reported its end (--store {name} would have gone on"
        in log
    )
    assert (
        f"4 groups of the last run are kept in {previous}; to continue that run, pass --store {previous}"
        in log
    )
    service.signal(signal.SIGTERM)
    service = start("--store", str(previous))
    assert marks(service.get("/batch")["batch"]) == [1]
    service.post("/register", registration())
    assert not service.get("/stats")["run_ended"], (
        "a trainer that has more to do goes on with its run"
    )


def test_a_named_store_goes_on_after_a_stop_too_unless_told_otherwise(
    start: Start, tmp_path: Path
) -> None:
    service = start("--store", "run.db")
    begin(service)
    before = lasting(service)
    service.signal(signal.SIGTERM)
    service = start("--store", "run.db")
    assert lasting(service) == before
    service.signal(signal.SIGKILL)
    service = start("--store", "run.db", "--new-run")
    assert is_new(service)
    assert "beginning a new run, because of --new-run" in service.log.read_text()
    assert (tmp_path / "run.previous.db").exists()


def test_a_crash_of_everything_does_not_feed_the_next_run_with_the_last_ones_rollouts(
    start: Start,
) -> None:
    """`kill -9` of all processes, and the same commands again: the service goes on, but the trainer
    is at step 0.
    """
    service = start()
    begin(service)
    service.signal(signal.SIGKILL)
    service = start()
    service.post("/register", registration(starting_step=0))
    assert service.get("/batch") == {"batch": None}
    stats = service.get("/stats")
    assert (
        sum(entry["groups"] for entry in stats["dropped"] if entry["reason"] == "ahead_of_trainer")
        == 4
    )
    assert stats["queue"]["held_groups"] == 0
    assert "dropped 4 groups that this trainer's weights did not sample" in service.log.read_text()
    late = service.post("/scored_data", group(mark=5, env_id=0, weight_versions=[1] * 4))
    assert late["status"] == "received", "one ahead may be what the trainer is sending now"


def test_a_trainer_that_starts_learns_what_the_last_run_has_saved(start: Start) -> None:
    def last_run() -> Any:
        return service.post("/weight-epoch", {}).get("last_run")

    service = start()
    assert last_run() is None
    uuid = service.post(
        "/register", registration(run="a", starting_step=0, save_checkpoint_interval=2)
    )["uuid"]
    service.get("/batch")
    for step, saved in enumerate((None, 2, 2, 4), start=1):
        service.post("/scored_data", group(mark=step))
        batch = service.get("/batch")
        service.post("/batch/ack", {"batch_id": batch["batch_id"], "weight_version": step})
        service.signal(signal.SIGKILL)
        service = start()
        known = last_run()
        assert (known and known["saved_step"]) == saved
    assert known == {"run": "a", "checkpoint_dir": "checkpoints", "saved_step": 4}
    service.post("/run/end", {"uuid": uuid})
    assert last_run() is None, "an ended run is not continued"
    resumed = {"weight_epoch": 9, "lives": [[5, 0], [9, 7]], "starting_step": 7}
    service.post("/register", registration(run="b", save_checkpoint_interval=0, **resumed))
    assert last_run()["saved_step"] == 7, "the checkpoint that it began from"


def test_a_trainer_that_resumes_keeps_what_its_weights_sampled(start: Start) -> None:
    service = start()
    begin(service)
    service.signal(signal.SIGKILL)
    service = start()
    service.post("/register", registration())
    assert marks(service.get("/batch")["batch"]) == [1]
    assert service.get("/stats")["dropped"] == []
    service.post("/register", registration(model="another"))
    assert service.get("/batch") == {"batch": None}
    assert service.post("/register-env", environment())["status"] == "success"


def test_a_weight_epoch_is_given_once_however_the_service_ends(start: Start) -> None:
    service = start()
    given = [
        service.post("/weight-epoch", {"asked": asked, "run": "a"})["weight_epoch"]
        for asked in (900, 100)
    ]
    service.signal(signal.SIGKILL)
    service = start()
    given.append(service.post("/weight-epoch", {"asked": 100, "run": "a"})["weight_epoch"])
    service.http.get("/reset_data").raise_for_status()
    given.append(service.post("/weight-epoch", {})["weight_epoch"])
    assert given == [900, 901, 902, 903]
    answer = service.post(
        "/register", registration(weight_epoch=902, run="a", lives=[[900, 0], [902, 1]])
    )
    assert answer["weight_epoch"] == 902
    assert "weight_epoch" not in service.post("/register", registration()), (
        "the old wire is as it was"
    )
