"""200 means durable, whatever happens between the queue and the disk: commits that stall or fail,
calls that are cut short.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.service import routes
from atroposlib.service.app import make_app
from atroposlib.service.group_reader import read_groups
from atroposlib.service.records import QUEUED, ValidatedGroup
from atroposlib.service.service import RolloutService
from atroposlib.service.sqlite_store import SqliteStore
from atroposlib.service.store import Changes, Snapshot, StoreError
from atroposlib.web.middleware import RequestLimits
from tests.atroposlib.service.trainers import registered

from .conftest import group, marks, trainer

SECONDS = 60.0
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


class FaultyStore(SqliteStore):
    """The real store, whose commits wait until they may go on, and then may fail."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.arrived = threading.Semaphore(0)
        self.fault: Exception | None = None

    def commit(self, together: Sequence[Changes]) -> None:
        self.arrived.release()
        assert self.may_go_on.wait(SECONDS)
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        super().commit(together)

    @contextmanager
    def stalled(self) -> Iterator[None]:
        self.may_go_on.clear()
        try:
            yield
        finally:
            self.may_go_on.set()

    async def commit_begins(self) -> None:
        assert await asyncio.to_thread(self.arrived.acquire, timeout=SECONDS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FaultyStore]:
    opened = FaultyStore(tmp_path / "a.db")
    yield opened
    opened.may_go_on.set()
    opened.close()


@asynccontextmanager
async def client_of(
    store: FaultyStore, limits: RequestLimits | None = None, register: bool = True
) -> AsyncIterator[httpx.AsyncClient]:
    """The whole service on this loop, with a trainer that wants four sequences."""
    service = RolloutService(store)
    transport = httpx.ASGITransport(make_app(service, limits), raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=None
    ) as client:
        if register:
            (await client.post("/register", json=trainer(batch_size=4))).raise_for_status()
            (await client.get("/batch")).raise_for_status()
        while store.arrived.acquire(blocking=False):
            pass
        yield client
    store.may_go_on.set()
    await service.committer.close()


async def still_waits(call: Awaitable[Any]) -> None:
    """A call that is not answered, though everything that can happen has happened."""
    for _ in range(200):
        await asyncio.sleep(0)
    assert not asyncio.ensure_future(call).done()


def on_disk(store: FaultyStore) -> Snapshot:
    return store.load()


async def test_a_retried_post_is_not_answered_before_the_first_one_is_stored(
    store: FaultyStore,
) -> None:
    async with client_of(store) as client:
        body = group(mark=1, idempotency_key="k")
        with store.stalled():
            first = asyncio.create_task(client.post("/scored_data", json=body))
            await store.commit_begins()
            again = asyncio.create_task(client.post("/scored_data", json=body))
            await still_waits(again)
            assert not first.done()
        assert (await again).json() == (await first).json() == {"status": "received"}
        assert list(on_disk(store).of("key")) == ["k"]


@pytest.mark.parametrize(
    "fault", [StoreError("the disk is full"), ValueError("of a kind that nobody expected")]
)
async def test_a_retried_post_fails_with_the_first_one(
    store: FaultyStore, fault: Exception
) -> None:
    async with client_of(store) as client:
        body = group(mark=1, idempotency_key="k")
        with store.stalled():
            posts = [asyncio.create_task(client.post("/scored_data", json=body))]
            await store.commit_begins()
            posts.append(asyncio.create_task(client.post("/scored_data", json=body)))
            posts.append(asyncio.create_task(client.post("/scored_data", json=group(mark=2))))
            await still_waits(posts[1])
            store.fault = fault
        for post in posts:
            answer = await post
            assert answer.status_code == 507
            assert str(fault) in answer.json()["detail"]
        while (answer := await client.post("/scored_data", json=body)).status_code == 507:
            await asyncio.sleep(0.01)  # it takes over the store's view
        assert answer.json() == {"status": "received"}
        assert (
            (await client.get("/status")).json()["queue_size"] == len(on_disk(store).groups()) == 1
        )


async def test_a_batch_that_is_asked_for_again_waits_until_its_bodies_are_written(
    store: FaultyStore,
) -> None:
    async with client_of(store) as client:
        store._recent.most_bytes = 0  # or the bodies would be at hand
        with store.stalled():
            post = asyncio.create_task(client.post("/scored_data", json=group(mark=1)))
            await store.commit_begins()
            batches = [
                asyncio.create_task(client.get("/batch", params={"received": 0})) for _ in range(3)
            ]
            await still_waits(batches[2])
        for batch in batches:
            answer = await batch
            assert answer.status_code == 200, answer.text
            assert marks(answer.json()["batch"]) == [1]
        assert (await post).status_code == 200
        assert len(on_disk(store).of("lease")) == 1


Interruption = Callable[
    [httpx.AsyncClient, FaultyStore, RequestLimits, pytest.MonkeyPatch], Awaitable[None]
]


@contextmanager
def hurried(limits: RequestLimits) -> Iterator[None]:
    """Requests have half a second. Only here: on a busy machine any other request may need more."""
    object.__setattr__(limits, "seconds", 0.5)
    try:
        yield
    finally:
        object.__setattr__(limits, "seconds", SECONDS)


async def a_stalled_commit(
    client: httpx.AsyncClient, store: FaultyStore, limits: RequestLimits, _: pytest.MonkeyPatch
) -> None:
    with store.stalled(), hurried(limits):
        assert (await client.get("/batch")).status_code == 503


async def a_failed_commit(
    client: httpx.AsyncClient, store: FaultyStore, _: RequestLimits, __: pytest.MonkeyPatch
) -> None:
    store.fault = StoreError("the disk is full")
    assert (await client.get("/batch")).status_code == 507
    while (await client.post("/scored_data", json=group(2, mark=9))).status_code == 507:
        await asyncio.sleep(0.01)


async def a_cancelled_compression(
    client: httpx.AsyncClient, _: FaultyStore, limits: RequestLimits, patch: pytest.MonkeyPatch
) -> None:
    async def never(body: bytes) -> bytes:
        await asyncio.Event().wait()
        return body

    with patch.context() as patched, hurried(limits):
        patched.setattr(routes, "compress", never)
        assert (await client.get("/batch")).status_code == 503


async def a_client_that_goes_away(
    client: httpx.AsyncClient, store: FaultyStore, _: RequestLimits, __: pytest.MonkeyPatch
) -> None:
    with store.stalled():
        asked = asyncio.create_task(client.get("/batch"))
        await store.commit_begins()
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked


@pytest.mark.parametrize(
    "interruption",
    [a_stalled_commit, a_failed_commit, a_cancelled_compression, a_client_that_goes_away],
)
async def test_a_batch_whose_sending_was_interrupted_comes_again(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, interruption: Interruption
) -> None:
    limits = RequestLimits(seconds=SECONDS)
    async with client_of(store, limits) as client:
        for mark in (1, 2):
            (
                await client.post("/scored_data", json=group(mark=mark, length=300))
            ).raise_for_status()
        while store.arrived.acquire(blocking=False):
            pass
        await interruption(client, store, limits, monkeypatch)
        for expected in ([1], [2]):
            assert marks((await client.get("/batch")).json()["batch"]) == expected


def damage(path: Path, mark: int) -> None:
    """Flip a bit in the body of the group whose tokens are all `mark`."""
    content = bytearray(path.read_bytes())
    place = content.rfind(f"{mark}, {mark}, {mark}, {mark}".replace(" ", "").encode())
    assert place > 0
    content[place] ^= 1
    path.write_bytes(content)


async def test_a_damaged_body_costs_its_group_and_nothing_else(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path / "a.db")
    async with client_of(store) as client:
        for mark in (11111, 22222, 33333, 44444, 55555):
            body = group(2, mark=mark, length=30)
            (await client.post("/scored_data", json=body)).raise_for_status()
    store.close()
    damage(tmp_path / "a.db", 11111)
    store = FaultyStore(tmp_path / "a.db")
    async with client_of(store, register=False) as client:
        answer = await client.get("/batch")
        assert answer.status_code == 200, answer.text
        assert marks(answer.json()["batch"]) == [22222, 33333], (
            "the batch is formed anew, oldest first"
        )
        stats = (await client.get("/stats")).json()
        assert stats["dropped"] == [{"reason": "damaged", "longest_up_to": 32, "groups": 1}]
        assert stats["current_step"] == 1
        assert marks((await client.get("/batch")).json()["batch"]) == [44444, 55555]
    store.close()


async def post_one(service: RolloutService, store: FaultyStore, key: str) -> None:
    (draft,) = read_groups(
        httpx.Request("POST", "http://x", json=group(idempotency_key=key)).content, many=False
    )
    await service.post([draft])
    assert key in on_disk(store).of("key")


async def take_batch(service: RolloutService, store: FaultyStore) -> None:
    async with service.handing_out(0, None) as hand_out:
        if hand_out is not None:
            leases: dict[int, list[int]] = {}
            for held in on_disk(store).groups():
                leases.setdefault(held.place, []).append(held.seq)
            if (
                hand_out.lease.batch_id in service.queue.leases
            ):  # not acknowledged by another trainer in between
                assert leases[hand_out.lease.batch_id] == [
                    held.seq for held in hand_out.lease.groups
                ]
            hand_out.complete = True


async def acknowledge(service: RolloutService, store: FaultyStore) -> None:
    leases = list(service.queue.leases)
    if leases:
        await service.run(lambda queue: queue.ack(leases[0]))
        assert leases[0] not in on_disk(store).of("lease")


async def commits_again(service: RolloutService, store: FaultyStore) -> None:
    """Wait until the store has no fault any more."""
    store.fault = None
    while True:
        with suppress(StoreError):
            await service.run(lambda queue: None)
            break
        await asyncio.sleep(0.001)


def expect_same(queue: Any, snapshot: Any) -> None:
    """Queue and disk hold the same."""
    assert [held.seq for held in queue.lines] == [
        held.seq for held in snapshot.groups() if held.place == QUEUED
    ]
    assert queue.leases.keys() == snapshot.of("lease").keys()
    assert all(lease.sending == 0 for lease in queue.leases.values()), (
        "none is taken to be on its way for ever"
    )
    assert list(queue.keys) == list(snapshot.of("key"))


async def chaos(store: FaultyStore, chance: random.Random) -> None:
    service = RolloutService(store)
    await service.run(
        lambda queue: queue.register(registered(1, "g", "p", 4, 9, "c", 1, 0, 9, ack_batches=True))
    )
    tasks: list[asyncio.Task[None]] = []
    for _ in range(60):
        what = chance.random()
        if what < 0.45:
            tasks.append(
                asyncio.create_task(post_one(service, store, f"key {chance.randrange(12)}"))
            )
        elif what < 0.65:
            tasks.append(asyncio.create_task(take_batch(service, store)))
        elif what < 0.75:
            tasks.append(asyncio.create_task(acknowledge(service, store)))
        elif what < 0.85:
            store.may_go_on.clear()
        elif what < 0.9 and tasks:
            chance.choice(tasks).cancel()
        elif what < 0.95:
            store.fault = chance.choice([StoreError("full"), KeyError("unheard of")])
        else:
            store.may_go_on.set()
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
    store.may_go_on.set()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert result is None or isinstance(result, StoreError | asyncio.CancelledError), repr(
            result
        )
    await commits_again(service, store)
    expect_same(service.queue, on_disk(store))
    await service.committer.close()


async def test_random_faults_leave_nothing_answered_that_is_not_on_the_disk() -> None:
    """Posts, retries, batches and acknowledgements at once, while commits stall and fail as they
    please. An answered client finds on the disk, at that moment, everything that the answer
    promises. In the end queue and disk hold the same.
    """
    for seed in range(40):
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            store = FaultyStore(Path(folder) / "a.db")
            async with asyncio.timeout(3 * SECONDS):
                await chaos(store, random.Random(seed))
            store.close()


async def test_a_call_does_not_wait_for_a_store_for_ever(store: FaultyStore) -> None:
    service = RolloutService(store, commit_timeout=0.05)
    with store.stalled():
        with pytest.raises(StoreError, match=r"did not answer within 0\.05 s"):
            await service.post([ValidatedGroup(b"{}", 1, 1)])
        with pytest.raises(StoreError, match="did not answer"):
            await service.run(lambda queue: None)
    await service.committer.close()
    assert len(on_disk(store).groups()) == 1, "it was stored after all; only nobody was told so"
