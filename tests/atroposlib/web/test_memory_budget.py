"""The budgets of bodies: nothing is lost, nothing is overdrawn, first come first served; and how
large gzip is unpacked.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.types import Message

from atroposlib.web import middleware
from atroposlib.web.middleware import (
    ANSWERS_AT_ONCE,
    SMALL_BODY,
    Bodies,
    Budget,
    Budgets,
    HTTPRefusal,
    NoSpaceError,
    decompress,
    unpacked_size,
)
from tests.atroposlib.service.conftest import Service, group
from tests.atroposlib.service.killed_service import until

Step = tuple[str, int]


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "give", "cancel"]), st.integers(1, 12)), max_size=40
    )
)
async def test_a_budget_serves_in_order_and_is_never_overdrawn(steps: list[Step]) -> None:
    """Compared with a list of requests that is gone through from the front."""
    most = 10

    budget = Budget(most, "bytes")
    held: list[int] = []
    waiting: list[tuple[int, asyncio.Task[int]]] = []
    for what, number in steps:
        if what == "take":
            waiting.append((min(number, most), asyncio.create_task(budget.take(number, 60))))
        elif what == "give" and held:
            budget.give(held.pop(number % len(held)))
        elif what == "cancel" and waiting:
            _, task = waiting.pop(number % len(waiting))
            task.cancel()
            await asyncio.wait([task])
        while waiting and sum(held) + waiting[0][0] <= most:
            count, task = waiting.pop(0)
            async with asyncio.timeout(60):
                assert await task == count
            held.append(count)
        await asyncio.sleep(0)
        assert budget.taken == sum(held)
        assert not any(task.done() for _, task in waiting), "nobody overtakes"
    for _, task in waiting:
        task.cancel()
    if waiting:
        await asyncio.wait([task for _, task in waiting])
    for count in held:
        budget.give(count)
    assert budget.taken == 0


async def test_who_waits_for_too_long_is_refused_and_leaves_its_place() -> None:
    budget = Budget(10, "bytes")
    await budget.take(8)
    small = asyncio.create_task(budget.take(2, 60))
    with pytest.raises(NoSpaceError, match="this request needs 5"):
        await budget.take(5, 0.01)
    assert await small == 2
    assert budget.taken == 10


@given(
    st.lists(st.binary(max_size=300), min_size=1, max_size=4),
    st.integers(0, 5),
    st.integers(1, 600),
)
def test_counting_gzip_finds_what_unpacking_finds(
    parts: list[bytes], zeros: int, most: int
) -> None:
    packed = b"".join(gzip.compress(part) for part in parts) + b"\0" * zeros
    whole = b"".join(parts)
    assert unpacked_size(packed, most) == min(len(whole), most)
    assert asyncio.run(decompress(packed, most)) == whole[:most]
    if len(whole) < most:
        with pytest.raises(zlib.error):
            unpacked_size(packed.rstrip(b"\0")[:-9], most)


def asking(*chunks: bytes) -> Callable[[], Awaitable[Message]]:
    """A `receive` that brings a body in pieces."""
    left = list(chunks)

    async def receive() -> Message:
        chunk = left.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(left)}

    return receive


MIB = 1 << 20
MOST = 8 * MIB
BOMB = gzip.compress(b"\0" * 6 * MIB)


@pytest.mark.parametrize(
    ("headers", "chunks", "large", "small"),
    [
        ({"content-length": str(3 * MIB)}, [b"x" * 3 * MIB], 3 * MIB, 0),
        ({}, [b"x" * MIB] * 3, 3 * MIB, 0),
        (
            {"content-encoding": "gzip", "content-length": str(len(BOMB))},
            [BOMB],
            6 * MIB,
            SMALL_BODY,
        ),
        ({"content-length": "100000"}, [b"x" * 100_000], 0, 100_000),
        ({"content-length": "100"}, [b"x" * 100], 0, 0),
    ],
)
async def test_a_body_takes_what_it_is_long(
    headers: dict[str, str], chunks: list[bytes], large: int, small: int
) -> None:
    budgets = Budgets(MOST)
    async with budgets.shared() as share:
        body = await Bodies(budgets, 60).read(Headers(headers), asking(*chunks), MOST, share)
        assert len(body) == large or large == 0
        assert (budgets.large.taken, budgets.small.taken, budgets.packed.taken) == (
            large,
            small,
            0,
        )
    assert budgets.large.taken == budgets.small.taken == 0


async def test_gzip_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = 0
    inflate = middleware._inflate

    def watched(packed: bytes, most: int) -> bytes:
        nonlocal longest
        unpacked = inflate(packed, most)
        longest = max(longest, len(unpacked))
        return unpacked

    monkeypatch.setattr(middleware, "_inflate", watched)
    bomb = gzip.compress(b"\0" * (MOST + 1))
    budgets = Budgets(MOST)
    headers = Headers({"content-encoding": "gzip", "content-length": str(len(bomb))})
    async with budgets.shared() as share:
        with pytest.raises(HTTPRefusal) as refused:
            await Bodies(budgets, 60).read(headers, asking(bomb), MOST, share)
    assert refused.value.status == 413
    assert budgets.large.taken == 0
    assert longest <= SMALL_BODY + 1


async def test_large_answers_of_one_path_take_turns() -> None:
    budgets = Budgets(MOST, seconds=0.01)
    entered = [budgets.answering("/latest_example") for _ in range(ANSWERS_AT_ONCE)]
    for turn in entered:
        await turn.__aenter__()
    with pytest.raises(NoSpaceError, match="answers to /latest_example"):
        async with budgets.answering("/latest_example"):
            pass
    async with budgets.answering("/batch"):
        pass  # others do not wait for them
    for turn in entered:
        await turn.__aexit__(None, None, None)
    async with budgets.answering("/latest_example"):
        pass


def test_small_requests_are_answered_while_large_bodies_have_all_the_space(tmp_path: Path) -> None:
    service = Service(
        tmp_path, "--store", "memory", "--max-body-bytes", "2M", "--request-timeout", "120"
    ).start()
    service.begin(batch_size=4)
    head = f"POST /scored_data HTTP/1.1\r\nhost: localhost\r\ncontent-length: {2 << 20}\r\n\r\n".encode()
    started = threading.Barrier(3)
    over = threading.Event()

    def stall() -> None:
        with socket.create_connection(("127.0.0.1", service.port)) as client:
            client.sendall(head + b" " * 1000)
            started.wait(60)
            over.wait(120)

    stalling = [threading.Thread(target=stall) for _ in range(2)]
    for thread in stalling:
        thread.start()
    started.wait(60)
    answers: list[httpx.Response] = []

    def post() -> None:
        body = b'{"pad":"' + b" " * (3 << 19) + b'"}'
        answers.append(httpx.post(f"{service.http.base_url}/scored_data", content=body, timeout=60))

    posting = threading.Thread(target=post)
    posting.start()
    for mark in range(5):
        service.post("/scored_data", group(mark=mark))
        assert service.get("/batch")["batch"] is not None
    assert not answers, "the large post waits for space"
    over.set()  # two bodies that never came give their space back
    until(lambda: bool(answers), "the large post is read")
    posting.join(60)
    assert answers[0].status_code == 422, answers[0].text
    for thread in stalling:
        thread.join(60)
