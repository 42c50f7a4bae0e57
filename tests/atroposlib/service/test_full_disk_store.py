"""A disk that fills: posts are refused before it is full, and the queue drains whatever fills it."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib import service_client
from atroposlib.service.app import make_app
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import ValidatedGroup
from atroposlib.service.service import RolloutService
from atroposlib.service.sqlite_store import PAGE_SIZE, Reserve, SqliteStore
from atroposlib.service.store import (
    FIXED_BYTES,
    SLACK_BYTES,
    Changes,
    DiskSpace,
    MemoryStore,
    PostSpace,
    StoreError,
)
from atroposlib.service_client import RolloutServiceClient
from tests.atroposlib.service.conftest import Service, group, marks, trainer
from tests.atroposlib.service.trainers import registered
from tests.full_disks import FullDisk, fill, small_disk

pytestmark = pytest.mark.nightly

RESERVE = 4 << 20


def space(free: int, whole: bool = True, promised: int = 0, reusable: int = 0) -> DiskSpace:
    return DiskSpace(Path("/disk/rollouts.db"), free, promised, reusable, RESERVE, whole)


@given(
    st.integers(0, 1 << 30),
    st.integers(0, 1 << 27),
    st.integers(0, 1 << 28),
    st.integers(0, 1 << 28),
)
def test_a_post_that_is_taken_leaves_the_disk_space_for_all_that_was_promised(
    free: int, n_bytes: int, promised: int, reusable: int
) -> None:
    now = space(free, True, promised, reusable)
    if now.refusal(n_bytes) is None:
        growth = max(0, n_bytes - reusable)
        assert free >= promised + n_bytes + growth, (
            "its bytes fit into the log, and later into the file"
        )
        assert now.refusal(n_bytes // 2) is None
    if space(free, False, promised, reusable).refusal(n_bytes) is None:
        assert free - RESERVE >= now.needed_for(n_bytes), (
            "a reserve that cannot be allocated is left free"
        )
    assert replace(now, reserve_is_whole=False, reserve_lacks_space=True).refusal(n_bytes), (
        "a quota is used up"
    )


def test_the_refusal_names_file_space_reserve_and_remedy() -> None:
    refusal = space(3_100_000).refusal(1000)
    assert refusal is not None
    for part in (
        "store /disk/rollouts.db",
        "3.1 MB are free",
        "4.2 MB beyond that are reserved",
        "free some in /disk",
    ):
        assert part in refusal
    assert "reserve of 4.2 MB for batches and acknowledgements is not whole" in (
        space(1 << 20, False).refusal(0) or ""
    )


class ScriptedStore(MemoryStore):
    """A store whose disk has the space that the test sets."""

    def __init__(self, free: int, after_making_room: int) -> None:
        super().__init__()
        self.space, self._after = space(free), after_making_room
        self.made_room = 0

    def make_room(self) -> None:
        self.made_room += 1
        self.space = space(self._after)


async def test_posts_that_are_under_way_count_and_room_is_made_before_one_is_refused() -> None:
    room = PostSpace(
        store := ScriptedStore(free=1 << 20, after_making_room=SLACK_BYTES + (30 << 20))
    )
    await room.require(10 << 20)
    assert store.made_room == 1
    with room.taken(10 << 20):
        with pytest.raises(StoreError, match="New groups are refused"):
            await room.require(10 << 20)
        assert room.refusing
    await room.require(10 << 20)
    assert room.refusing is None
    await PostSpace(MemoryStore()).require(1 << 40)


def refuse(number: int, *_: object) -> None:
    raise OSError(number, os.strerror(number))


def test_the_reserve_is_allocated_taken_over_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "a.db-reserve"
    reserve = Reserve(path, RESERVE)
    reserve.build(free=RESERVE + FIXED_BYTES - 1)
    assert not reserve.is_whole
    reserve.build(free=RESERVE + FIXED_BYTES)
    assert reserve.is_whole
    assert path.stat().st_blocks * 512 >= RESERVE
    assert path.stat().st_mode & 0o777 == 0o600
    assert Reserve(path, RESERVE).is_whole
    assert not Reserve(path, 2 * RESERVE).is_whole
    assert reserve.release()
    assert not path.exists()
    assert not reserve.release()
    with pytest.MonkeyPatch.context() as patched:
        for number, lacks in ((errno.EDQUOT, True), (errno.EOPNOTSUPP, False)):
            patched.setattr(os, "posix_fallocate", partial(refuse, number))
            reserve.build(free=RESERVE + SLACK_BYTES)
            assert (reserve.is_whole, reserve.lacks_space) == (False, lacks)
            assert not path.exists()
    os.truncate(shutil.copy(__file__, path), RESERVE)
    assert not Reserve(path, RESERVE).is_whole, "a copy with holes holds no space"


class PagedReserve(Reserve):
    """A reserve of pages of a file that SQLite may not make longer."""

    pages = 40

    def __init__(self) -> None:
        self.size, self.is_whole, self.lacks_space, self.limit = 0, True, False, 1 << 30
        self.path, self.store = Path("none"), None

    def hold(self, store: SqliteStore, spare: int) -> None:
        """Let the file grow by so many pages, and by the reserve when it is released."""
        (pages,) = store._writer.execute("PRAGMA page_count").fetchone()
        self.store, self.limit = store, pages + spare
        store._writer.execute(f"PRAGMA max_page_count = {self.limit}")

    def build(self, free: int) -> None:
        if self.store is not None and not self.is_whole:
            (pages,) = self.store._writer.execute("PRAGMA page_count").fetchone()
            if pages <= self.limit:
                self.store._writer.execute(f"PRAGMA max_page_count = {self.limit}")
                self.is_whole = True

    def release(self) -> bool:
        was, self.is_whole = self.is_whole, False
        if was and self.store is not None:
            self.store._writer.execute(f"PRAGMA max_page_count = {self.limit + self.pages}")
        return was


def opened(path: Path) -> SqliteStore:
    store = SqliteStore(path, reserve=0)
    store._reserve = PagedReserve()
    return store


class SqueezedQueue:
    """A queue on a store whose file may not always grow.

    Attributes:
        accepted, delivered: numbers of groups.
        refused: how many commits of posts were.
    """

    def __init__(self, path: Path, chance: random.Random) -> None:
        self.path, self.chance = path, chance
        self.store, self.queue = opened(path), RolloutQueue()
        self.accepted, self.delivered = set[int](), list[int]()
        self.number = self.refused = 0
        self.queue.register(
            registered(1, "g", "p", 8, 128, "c", 5, 0, 100, max_staleness=None, ack_batches=True)
        )
        assert self.commit()

    def commit(self) -> bool:
        try:
            self.store.commit([self.queue.take_changes()])
        except StoreError:
            self.queue = RolloutQueue(None, self.store.load())
            return False
        return True

    def post(self) -> None:
        """One to four groups in a commit."""
        numbers = range(self.number, self.number + self.chance.randint(1, 4))
        self.number = numbers[-1] + 1
        for one in numbers:
            body = b"%d:" % one + b"x" * self.chance.choice((10, 3000, 300_000))
            self.queue.add(ValidatedGroup(body, 4, 10, None, (), f"k{one}"), 0.0)
        if self.commit():
            self.accepted |= set(numbers)
        else:
            self.refused += 1

    def drain(self) -> None:
        """Hand a batch out."""
        lease = self.queue.next_batch(0.0)
        assert self.commit(), "a batch is handed out whatever the disk"
        if lease is not None:
            numbers = self.numbers(lease.groups)
            self.queue.ack(lease.batch_id)
            assert self.commit(), "and acknowledged"
            self.delivered.extend(numbers)

    def squeeze(self) -> None:
        """Change how long the file may be."""
        pages = self.chance.choice((0, 0, 2, 10))
        self.store._reserve.hold(self.store, pages)  # type: ignore[attr-defined]

    def restart(self) -> None:
        self.store.close()
        self.store = opened(self.path)
        self.queue = RolloutQueue(None, self.store.load())

    def numbers(self, groups: Any) -> list[int]:
        bodies = self.store.bodies([one.seq for one in groups])
        return [int(body.split(b":", 1)[0]) for body in bodies]


@pytest.mark.parametrize("seed", range(4))
def test_a_file_that_may_not_grow_loses_and_doubles_nothing_and_always_drains(
    tmp_path: Path, seed: int
) -> None:
    """An adversary changes how long the file may be; what was accepted is delivered once, and only
    posts are refused.
    """
    squeezed = SqueezedQueue(tmp_path / "a.db", random.Random(seed))
    for _ in range(120):
        do = squeezed.chance.choice(("post", "post", "post", "drain", "squeeze", "restart"))
        getattr(squeezed, do)()
    while squeezed.queue.held_groups >= 2:
        squeezed.drain()
    assert squeezed.refused > 0
    assert len(squeezed.delivered) == len(set(squeezed.delivered))
    left = squeezed.numbers(squeezed.store.load().groups())
    assert set(squeezed.delivered) | set(left) == squeezed.accepted
    squeezed.store.close()


def test_posts_in_one_commit_with_a_batch_never_use_the_reserve(tmp_path: Path) -> None:
    store = opened(tmp_path / "a.db")
    queue = RolloutQueue()
    queue.register(registered(1, "g", "p", 4, 128, "c", 5, 0, 100))
    store.commit([queue.take_changes()])
    store._reserve.hold(store, 0)  # type: ignore[attr-defined]
    queue.add(ValidatedGroup(b"x" * 20 * PAGE_SIZE, 4, 10), 0.0)
    with pytest.raises(
        StoreError, match=r"full; [\d.,]+ MB are free on the disk of .*: free some space"
    ):
        store.commit([queue.take_changes(), Changes()])
    assert store._reserve.is_whole
    assert store.load().groups() == []
    store.close()


def run(test: Callable[[httpx.AsyncClient], Awaitable[None]], store: SqliteStore) -> None:
    async def bounded() -> None:
        service = RolloutService(store)
        transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
        async with (
            asyncio.timeout(120),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            await test(client)
        await service.committer.close()

    asyncio.run(bounded())


def wide(mark: int) -> dict[str, Any]:
    return group(size=4, mark=mark, pad="x" * 700_000)


async def post_until_refused(client: httpx.AsyncClient, accepted: list[int]) -> str:
    while True:
        answer = await client.post("/scored_data", json=wide(len(accepted) + 1))
        if answer.status_code != 200:
            assert answer.status_code == 507
            return str(answer.json()["detail"])
        accepted.append(len(accepted) + 1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, 48) as path:
        yield path


def test_a_full_disk_drains_and_posts_go_on_when_there_is_space(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.service.store.FRESH_SECONDS", 0.0)
    store = SqliteStore(disk / "a.db", RESERVE)
    accepted: list[int] = []

    async def test(client: httpx.AsyncClient) -> None:
        (
            await client.post("/register", json=trainer(batch_size=8, ack_batches=True))
        ).raise_for_status()
        (await client.get("/batch")).raise_for_status()
        refusal = await post_until_refused(client, accepted)
        assert str(disk / "a.db") in refusal
        assert "MB beyond that are reserved" in refusal
        stats = (await client.get("/stats")).json()
        assert stats["store"]["refusing_posts"] == refusal
        assert "507" not in (stats["waiting_because"] or "")
        assert "rollout_store_refusing_posts 1.0" in (await client.get("/metrics")).text
        other = fill(disk)
        assert (await client.post("/scored_data", json=group(mark=99))).status_code == 507, (
            "not the smallest either"
        )
        delivered: list[int] = []
        while batch := (answer := await client.get("/batch")).json()["batch"]:
            delivered += marks(batch)
            ack = await client.post("/batch/ack", json={"batch_id": answer.json()["batch_id"]})
            assert ack.status_code == 200, ack.text
        assert delivered == accepted[: len(delivered)]
        assert len(accepted) - len(delivered) < 2
        before = len(accepted)
        await post_until_refused(client, accepted)
        assert len(accepted) > before, (
            "an empty queue gives its space back, though another program still has the rest"
        )
        other.unlink()
        await post_until_refused(client, accepted)
        assert len(accepted) >= 2 * before - 1, "one group may be left, too few for a batch"
        assert (await client.get("/stats")).json()["store"]["reserve_is_whole"]
        assert (disk / "a.db-reserve").stat().st_blocks * 512 >= RESERVE

    run(test, store)
    store.close()


def test_stats_name_why_groups_are_refused_until_one_is_stored(tmp_path: Path) -> None:
    file, elsewhere = tmp_path / "a.db", tmp_path / "moved.db"
    store = SqliteStore(file)

    async def test(client: httpx.AsyncClient) -> None:
        async def post() -> tuple[int, str | None]:
            status = (await client.post("/scored_data", json=group())).status_code
            return status, (await client.get("/stats")).json()["store"]["refusing_posts"]

        (await client.post("/register", json=trainer())).raise_for_status()
        assert await post() == (200, None)
        file.rename(elsewhere)
        for _ in range(2):
            status, reason = await post()
            assert status == 507
            assert reason is not None
            assert f"{file} is not in its place" in reason
            assert "Put the old file back" in reason
        elsewhere.rename(file)
        async with asyncio.timeout(60):
            while (await post())[0] != 200:  # the queue is being read again
                await asyncio.sleep(0.01)
        assert await post() == (200, None)

    run(test, store)
    store.close()


def test_a_store_that_cannot_begin_is_one_line_and_begins_when_there_is_space(
    full_disk: FullDisk,
) -> None:
    path = full_disk.path / "a.db"
    with (
        full_disk.full(),
        pytest.raises(
            StoreError, match=r"store .*a\.db: .*MB are free on the disk of .*: free some space"
        ),
    ):
        SqliteStore(path, RESERVE)
    store = SqliteStore(path, RESERVE)
    assert store.load().groups() == []
    store.close()


def test_the_reserve_opens_a_store_that_was_killed_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, 128) as disk:
        service = Service(tmp_path, "--store", str(disk / "a.db"), "--no-ui").start()
        service.begin(batch_size=8, ack_batches=True)
        sent = 0
        while service.http.post("/scored_data", json=wide(sent + 1)).status_code == 200:
            sent += 1
        other = fill(disk)
        first = service.get("/batch")["batch"]
        service.signal(signal.SIGKILL)
        service.start()
        delivered: list[int] = []
        while (answer := service.get("/batch"))["batch"]:
            assert delivered or answer["batch"] == first
            delivered += marks(answer["batch"])
            service.post("/batch/ack", {"batch_id": answer["batch_id"]})
        assert delivered == list(range(1, len(delivered) + 1))
        assert sent - len(delivered) < 2
        other.unlink()
        assert service.http.post("/scored_data", json=wide(1)).status_code == 200
        assert service.signal(signal.SIGTERM) == 0
        assert "Traceback" not in service.log.read_text()


COUNT = 36
"""More groups than the disk takes at once."""


async def post_all(client: RolloutServiceClient, numbers: range) -> None:
    for number in numbers:
        answer = await client.post("/scored_data", wide(number) | {"idempotency_key": f"k{number}"})
        assert answer["status"] == "received"


async def train_beside_another_program(service: Service, disk: Path) -> list[int]:
    delivered: list[int] = []
    while len(delivered) < COUNT:
        answer = await asyncio.to_thread(service.http.get, "/batch")
        if answer.json()["batch"] is None:
            await asyncio.sleep(0.05)
            continue
        if len(delivered) in (6, 15):
            other = fill(disk)
            if len(delivered) == 6:
                await asyncio.to_thread(restart, service)
            other.unlink()
        ack = await asyncio.to_thread(
            service.http.post, "/batch/ack", json={"batch_id": answer.json()["batch_id"]}
        )
        assert ack.status_code == 200, ack.text
        delivered += marks(answer.json()["batch"])
    return delivered


def restart(service: Service) -> None:
    service.signal(signal.SIGKILL)
    service.start()


async def post_and_train(service: Service, disk: Path) -> list[int]:
    client = RolloutServiceClient(str(service.http.base_url), timeout=60.0)
    async with asyncio.timeout(120):
        third = COUNT // 3
        posts = [
            asyncio.create_task(post_all(client, range(n * third + 1, (n + 1) * third + 1)))
            for n in range(3)
        ]
        while client._full_since is None:  # the disk does not hold them all
            await asyncio.sleep(0.01)
        delivered = await train_beside_another_program(service, disk)
        await asyncio.gather(*posts)
        await client.close()
    return delivered


def test_environments_wait_while_another_program_has_the_disk_and_nothing_is_lost_or_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More groups than the disk takes at once, another program that fills it twice, and a kill
    while it is full.
    """
    monkeypatch.setattr(service_client, "retry_after", lambda *_, **__: 0.1)
    caplog.set_level("INFO", service_client.__name__)
    with small_disk(tmp_path, 100) as disk:
        service = Service(tmp_path, "--store", str(disk / "a.db"), "--no-ui").start()
        service.begin(batch_size=12, ack_batches=True)
        delivered = asyncio.run(post_and_train(service, disk))
        assert sorted(delivered) == list(range(1, COUNT + 1))
        assert service.get("/batch")["batch"] is None
        assert service.signal(signal.SIGTERM) == 0
        assert "Traceback" not in service.log.read_text()
    lines = re.findall("cannot store data: store|stores data again", "\n".join(caplog.messages))
    # One line for each wait, however many posts were refused in it.
    assert lines[::2] == ["cannot store data: store"] * len(lines[::2]) != []
    assert lines[1::2] == ["stores data again"] * len(lines[1::2])
