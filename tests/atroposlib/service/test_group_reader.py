"""Large bodies are read in another process: the service stays there for others, whatever becomes of
that process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from atroposlib.service.group_reader import (
    IN_A_PROCESS_FROM,
    GroupReader,
    ReaderError,
    TooComplexError,
    read_groups,
)
from atroposlib.service.schemas import InvalidRequestError
from atroposlib.utils import processes
from example_trainer.child_processes.guard import descendants, parents
from tests.atroposlib.service.conftest import Service, group, marks


@pytest.fixture
def reader() -> Iterator[GroupReader]:
    made = GroupReader()
    yield made
    made.close()


def child_of(reader: GroupReader) -> int:
    """Return the id of the process that waits for the next body."""
    (child,) = reader._calls._idle
    (process,) = processes._processes(child)
    assert process.pid is not None
    return process.pid


def large(**fields: object) -> bytes:
    body = json.dumps(group(mark=70000, length=30_000, **fields)).encode()
    assert len(body) > IN_A_PROCESS_FROM
    return body


async def test_it_finds_what_is_found_at_once(reader: GroupReader) -> None:
    one = large(
        weight_versions=[1, 2, 3, 3], weight_epochs=[7, 7, 8, 8], env_id=3, idempotency_key="k"
    )
    listed = b"[" + one + b"," + large(advantages=[]) + b"]"

    for body, many in ((one, False), (listed, True), (b" " + one, False)):
        assert await reader.read(body, many) == read_groups(body, many)
    assert child_of(reader)


async def test_it_refuses_what_is_refused_at_once(reader: GroupReader) -> None:
    for body in (
        large(scores=[0.0, 1.0, float("nan"), 2.0]),
        large()[:-1],
        large(masks=[[-100] * 30_000] * 4),
    ):
        with pytest.raises(InvalidRequestError) as here:
            read_groups(body, many=False)
        with pytest.raises(InvalidRequestError) as there:
            await reader.read(body, many=False)
        assert there.value.errors == here.value.errors


async def test_a_child_that_is_killed_costs_no_post(reader: GroupReader) -> None:
    await reader.read(large(), many=False)
    killed = child_of(reader)
    os.kill(killed, signal.SIGKILL)
    while killed in parents():
        await asyncio.sleep(0)
    assert len(await reader.read(large(), many=False)) == 1
    assert child_of(reader) != killed


async def test_nor_does_one_whose_death_nobody_has_noticed_yet(reader: GroupReader) -> None:
    await reader.read(large(), many=False)
    for _ in range(5):
        os.kill(child_of(reader), signal.SIGKILL)
        assert len(await reader.read(large(), many=False)) == 1


async def test_a_child_that_does_not_answer_is_not_waited_for_for_ever(
    reader: GroupReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reader.read(large(), many=False)
    os.kill(child_of(reader), signal.SIGSTOP)
    monkeypatch.setattr(processes, "START_SECONDS", 0.2)
    with pytest.raises(ReaderError, match=r"ended or took longer than 60 s"):
        await reader.read(large(), many=False)
    assert not reader._calls._idle
    assert not reader._calls._busy


async def test_a_body_that_needs_too_much_memory_is_refused_and_the_next_one_is_read() -> None:
    reader = GroupReader(max_body=1 << 20)
    lists = (
        b'{"tokens":[[1,2]],"masks":[[-100,2]],"scores":[1],"pad":['
        + b",".join([b"[]"] * (5 << 20))
        + b"]}"
    )
    with pytest.raises(
        TooComplexError, match=r"more than 276 MiB of memory.*Post fewer groups at once"
    ):
        await reader.read(lists, many=False)
    assert len(await reader.read(large(), many=False)) == 1
    reader.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_others_are_served_meanwhile_and_no_child_is_left(
    tmp_path: Path, end: signal.Signals
) -> None:
    service = Service(tmp_path, "--store", "memory").start()
    service.begin(batch_size=4)
    assert service.process is not None
    assert service.http.post("/scored_data", content=large()).status_code == 200
    children = descendants(service.process.pid)
    child = max(
        children, key=lambda pid: b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(child, signal.SIGSTOP)  # a body that takes as long to read as we like
    answers: list[httpx.Response] = []

    def post() -> None:
        with httpx.Client(base_url=service.http.base_url, timeout=60) as http:
            answers.append(http.post("/scored_data", content=large()))

    posting = threading.Thread(target=post)
    posting.start()
    for mark in range(5):
        assert service.post("/scored_data", group(mark=mark)) == {"status": "received"}
        assert service.get("/status")["queue_size"] == mark + 2
    assert not answers
    os.kill(child, signal.SIGCONT)
    posting.join(60)
    assert answers[0].status_code == 200
    assert [marks(service.get("/batch")["batch"]) for _ in range(7)] == [
        [70000],
        [0],
        [1],
        [2],
        [3],
        [4],
        [70000],
    ]
    service.signal(end)
    deadline = time.monotonic() + 60
    while parents().keys() & set(children):
        assert time.monotonic() < deadline, "the child outlives the service"
        time.sleep(0.02)
