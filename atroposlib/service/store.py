"""The stores of the rollout service: what they take and give back, and the disk space that posts may
take from one.

Posts are refused before they take the space that the store keeps for what empties the queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from atroposlib.service.records import Group

logger = logging.getLogger(__name__)

FRESH_SECONDS = 1.0
"""A measurement of the disk is used for so long, since other programs write there too."""
WAIT_SECONDS = 10.0
"""A post waits for the store to make room no longer than this."""
SLACK_BYTES = 16 << 20
"""Free space below which no post may make the file longer."""
FIXED_BYTES = 2 << 20
"""Bytes of log for the pages that every post touches besides its bodies. Rebuilding the reserve
leaves them free."""


Kind = Literal["state", "environment", "group", "lease", "key", "evaluation"]
RecordKey = tuple[Kind, int | str]
"""Kind and id of a record. There is one state, with the id 0."""


@dataclass(slots=True)
class Changes:
    """Changes for one transaction of the store. The queue collects them, and takes them for each call."""

    wipe: bool = False
    """All that was stored before is removed first."""
    records: dict[RecordKey, Any] = field(default_factory=dict)
    """New and changed records, None for a removed one. `take` encodes them as JSON."""
    bodies: dict[int, bytes | None] = field(default_factory=dict)
    """New bodies of groups by sequence number, None for a removed one."""
    adds_groups: bool = False

    def __bool__(self) -> bool:
        return self.wipe or bool(self.records)

    def add(self, group: Group, body: bytes) -> None:
        """Add a new group."""
        self.records["group", group.seq] = group
        self.bodies[group.seq] = body
        self.adds_groups = True

    def remove(self, group: Group) -> None:
        """Remove a group."""
        self.records["group", group.seq] = self.bodies[group.seq] = None

    def take(self) -> Changes:
        """Return the changes since the last call. A later change of a record does not alter them."""
        encoded = {
            key: None if record is None else orjson.dumps(record)
            for key, record in self.records.items()
        }
        taken = Changes(self.wipe, encoded, self.bodies, self.adds_groups)
        self.wipe = self.adds_groups = False
        self.records, self.bodies = {}, {}
        return taken


@dataclass(slots=True)
class Snapshot:
    """Everything that a store holds, except the bodies.

    Attributes:
        records: by kind and id. A record that was stored later comes later.
    """

    records: dict[str, dict[Any, Any]] = field(default_factory=dict)

    def of(self, kind: Kind) -> dict[Any, Any]:
        """Return the records of a kind by their ids."""
        return self.records.get(kind, {})

    @property
    def state(self) -> dict[str, Any]:
        """The state of the queue; empty in a new store."""
        return self.of("state").get(0, {})

    def groups(self) -> list[Group]:
        """Return the groups in the order of their acceptance."""
        return [
            Group(**record | {"weights": tuple(map(tuple, record["weights"]))})
            for _, record in sorted(self.of("group").items())
        ]


def megabytes(n_bytes: int) -> str:
    """Return a size for people, such as `3.1 MB`."""
    return f"{max(0, n_bytes) / 1e6:,.1f} MB"


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Space for a store, at one moment.

    Attributes:
        path: the store's file.
        free: bytes of the disk that this user may write.
        promised: bytes by which the file will grow when the log is folded into it.
        reusable: bytes of pages in the file that hold nothing.
        reserve: bytes kept for what empties the queue, if they are not used.
        reserve_is_whole: they are allocated.
        reserve_lacks_space: the system refused to allocate them for want of space, though `free`
            may be more: a quota.
        measured: when, in seconds of the monotonic clock.
    """

    path: Path
    free: int
    promised: int
    reusable: int
    reserve: int
    reserve_is_whole: bool
    reserve_lacks_space: bool = False
    measured: float = field(default_factory=time.monotonic)

    def needed_for(self, n_bytes: int) -> int:
        """Free bytes without which a post of this size is refused."""
        logged = n_bytes + n_bytes // 16 + FIXED_BYTES
        growth = max(0, logged - self.reusable)
        return self.promised + logged + (growth + SLACK_BYTES if growth else 0)

    def refusal(self, n_bytes: int) -> str | None:
        """Return the reason to refuse posts of so many bytes; None if there is space."""
        needed, folder = self.needed_for(n_bytes), self.path.absolute().parent
        kept = (
            f"{megabytes(self.reserve)} beyond that are reserved for batches and acknowledgements"
        )
        if not self.reserve_is_whole:
            needed += self.reserve
            kept = f"its reserve of {megabytes(self.reserve)} for batches and acknowledgements is not whole"
        if self.free >= needed and not self.reserve_lacks_space:
            return None
        return (
            f"store {self.path}: {megabytes(self.free)} are free on its disk, {megabytes(needed)} are needed for new groups, "
            f"and {kept}. New groups are refused until there is space: free some in {folder} or elsewhere on that disk"
        )


class StoreError(RuntimeError):
    """The store could not keep or give back what it was asked to.

    The message names the file and the remedy.
    """


class DamagedError(StoreError):
    """The store can no longer give back the bodies of these groups, and never will."""

    def __init__(self, message: str, seqs: Sequence[int]) -> None:
        super().__init__(message)
        self.seqs = frozenset(seqs)


class Store(ABC):
    """Keeps groups, leases and registrations.

    `commit` is called by one thread at a time, `bodies` by any.
    """

    durable: bool = False
    """True if committed data survives the death of the process and of the machine. A store without
    this promise commits at once."""
    space: DiskSpace | None = None
    """The space of its disk when that was last measured; None for a store that needs none."""

    @abstractmethod
    def load(self) -> Snapshot:
        """Everything that was stored, but for the bodies.

        Raises:
            StoreError: the store cannot be read.
        """

    @abstractmethod
    def commit(self, together: Sequence[Changes]) -> None:
        """Store changes, in their order, all or none of them.

        Raises:
            StoreError: none is stored. The store is as it was before.
        """

    def bodies_at_hand(self, seqs: Sequence[int]) -> list[bytes] | None:
        """The same as `bodies` if that needs no disk, else None."""
        return None

    @abstractmethod
    def bodies(self, seqs: Sequence[int]) -> list[bytes]:
        """The JSON bodies of groups that are stored, in the order asked for. May be called from
        another thread.

        Raises:
            DamagedError: some of them are damaged or gone; it names all of those.
            StoreError: they cannot be read.
        """

    def measure(self) -> None:  # noqa: B027 - a store without a file has nothing to do
        """Measure the free space of the disk again.

        May be called from another thread, and waits for no commit.
        """

    def make_room(self) -> None:  # noqa: B027 - a store without a file has nothing to do
        """Give unused space back to the disk, and measure `space` again.

        May be called from another thread.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""


class MemoryStore(Store):
    """Keeps the bodies in memory, and nothing beyond the life of the process."""

    def __init__(self) -> None:
        self._bodies: dict[int, bytes] = {}

    def load(self) -> Snapshot:
        """Nothing: a memory store starts empty."""
        return Snapshot()

    def commit(self, together: Sequence[Changes]) -> None:
        """Keep new bodies and let go of removed ones."""
        for changes in together:
            if changes.wipe:
                self._bodies.clear()
            for seq, body in changes.bodies.items():
                self._bodies.pop(seq, None)
                if body is not None:
                    self._bodies[seq] = body

    def bodies(self, seqs: Sequence[int]) -> list[bytes]:
        """Bodies by sequence number."""
        return [self._bodies[seq] for seq in seqs]

    bodies_at_hand = bodies

    def close(self) -> None:
        """Nothing to do."""


class PostSpace:
    """Space for the posts that are under way, of a store on a disk that may fill.

    Attributes:
        refusing: the reason why the newest post was refused; None if there is space.
        failure: the reason why the newest commit failed; None if it did not.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._under_way = 0
        """Bytes of posts that are being read and stored."""
        self._making: asyncio.Task[None] | None = None
        self._made = -float("inf")
        self.refusing: str | None = None
        self.failure: str | None = None

    async def require(self, n_bytes: int) -> None:
        """Return if there is space for a post of so many bytes besides those under way.

        Raises:
            StoreError: there is not; the message names the file, the free space, the reserve and
                the remedy.
        """
        space = self._store.space
        if space is None:
            return
        if time.monotonic() - space.measured > FRESH_SECONDS:
            await asyncio.to_thread(self._store.measure)
        if self._refusal(n_bytes) is not None:
            await self._make_room()
        refusal = self._refusal(n_bytes)
        if refusal is not None:
            if self.refusing is None:
                logger.error("%s", refusal)
            self.refusing = refusal
            raise StoreError(refusal)
        if self.refusing is not None:
            logger.warning("there is space for new groups again")
        self.refusing = None

    def _refusal(self, n_bytes: int) -> str | None:
        space = self._store.space
        return None if space is None else space.refusal(n_bytes + self._under_way)

    async def _make_room(self) -> None:
        """Have the store give back what it can, once for all posts that wait, and not more often
        than `FRESH_SECONDS`.
        """
        if self._making is None or self._making.done():
            if time.monotonic() - self._made < FRESH_SECONDS:
                return
            self._made = time.monotonic()
            self._making = asyncio.create_task(asyncio.to_thread(self._store.make_room))
        await asyncio.wait(
            [self._making], timeout=WAIT_SECONDS
        )  # a stalled disk refuses this post, too

    @contextmanager
    def taken(self, n_bytes: int) -> Iterator[None]:
        """Count a post as under way while the block runs."""
        self._under_way += n_bytes
        try:
            yield
        finally:
            self._under_way -= n_bytes

    def figures(self) -> dict[str, Any] | None:
        """Return the space as it was last measured, for /stats and the page; None for a store that
        needs none.
        """
        space = self._store.space
        if space is None:
            return None
        return {
            "path": str(space.path),
            "free_bytes": space.free,
            "reserve_bytes": space.reserve,
            "reserve_is_whole": space.reserve_is_whole,
            "refusing_posts": self.refusing or self.failure,
        }
