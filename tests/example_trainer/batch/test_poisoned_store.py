"""A store of an earlier version holds groups that no trainer can read: they are dropped and named,
and no trainer ends.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from example_trainer.batch.client import RolloutClient
from tests.conftest import Processes
from tests.example_trainer.batch.registration import REGISTRATION, group

pytestmark = pytest.mark.nightly

POISON = b',"answer":' + b"9" * 400 + b"}"


def poison(store: Path, marks: set[int]) -> None:
    """Change the bodies of groups in a store, with right checksums, into what earlier versions
    accepted.
    """
    with sqlite3.connect(store) as connection:
        for seq, body in connection.execute("SELECT seq, body FROM bodies").fetchall():
            if any(f"[1,{mark}]".encode() in body.replace(b" ", b"") for mark in marks):
                changed = body[:-1] + POISON
                connection.execute(
                    "UPDATE bodies SET body = ?, crc = ? WHERE seq = ?",
                    (changed, zlib.crc32(changed), seq),
                )
    connection.close()


def test_no_trainer_ends_and_the_reference_stage_goes_on(
    processes: Processes, free_port: Callable[[], int], client_of: Callable[..., RolloutClient]
) -> None:
    port = free_port()
    url, store = f"http://127.0.0.1:{port}", processes.folder / f"rollouts-{port}.db"
    service = processes.start_service(port)
    client = client_of(url)
    client.register(REGISTRATION)
    for number in (5, 6, 7, 8):
        httpx.post(f"{url}/scored_data", json=group(number), timeout=60).raise_for_status()
    assert client.next_batch().groups[0]["tokens"][0][1] == 5
    client.close()  # this trainer dies with the first batch in its hands
    processes.kill(service)
    poison(store, {5, 7})
    service = processes.start_service(port)
    for _ in range(3):  # lives that die with the batch
        client = client_of(url)
        client.register(REGISTRATION)
        assert client.next_batch().groups[0]["tokens"][0][1] == 6
        client.close()
    log = service.log_path.read_text()
    assert (
        "an earlier version stored groups that trainers cannot read: group 0: number is infinity"
        in log
    )
    # Group 8 waits for a reference now, and so does 7, which cannot be read.
    referenced = replace(REGISTRATION, model="m", ref_logprobs_from_workers=True)
    client = client_of(url)
    client.register(referenced)
    asked = {"worker": "w", "model": "m", "max_tokens": 1000, "seconds": 60}
    leased = httpx.post(f"{url}/reference/lease", json=asked, timeout=60)
    assert leased.status_code == 200, leased.text
    assert sorted(one["tokens"][0][1] for one in leased.json()["groups"])[-1] == 8
    assert 7 not in [one["tokens"][0][1] for one in leased.json()["groups"]]
    dropped = httpx.get(f"{url}/stats", timeout=60).json()["dropped"]
    assert sum(row["groups"] for row in dropped if row["reason"] == "damaged") == 2
