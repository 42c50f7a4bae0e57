"""Where the rollout service keeps its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from atroposlib.service.disk_reserve import DiskSpace
from atroposlib.service.records import Changes, Snapshot


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
    """What was committed survives the death of the process and of the machine. A store that is not
    commits at once."""
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
            StoreError: none is stored. What is stored is as it was before.
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
            for group, body, _ in changes.added:
                self._bodies[group.seq] = body
            self._bodies.update(changes.referenced)
            for seq in changes.removed:
                self._bodies.pop(seq, None)

    def bodies(self, seqs: Sequence[int]) -> list[bytes]:
        """Bodies by sequence number."""
        return [self._bodies[seq] for seq in seqs]

    bodies_at_hand = bodies

    def close(self) -> None:
        """Nothing to do."""


class RecentBodies:
    """The newest bodies, up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._bodies: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def follow(self, changes: Changes) -> None:
        """Keep what was added, let go of what was removed."""
        if changes.wipe:
            self.clear()
        for seq, body in [
            *((group.seq, body) for group, body, _ in changes.added),
            *changes.referenced,
        ]:
            self._bytes += len(body) - len(self._bodies.pop(seq, b""))
            self._bodies[seq] = body
        for seq in changes.removed:
            self._bytes -= len(self._bodies.pop(seq, b""))
        while self._bytes > self.most_bytes:
            self._bytes -= len(self._bodies.popitem(last=False)[1])

    def get(self, seqs: Sequence[int]) -> list[bytes] | None:
        """All of them, or None."""
        bodies = [self._bodies.get(seq) for seq in seqs]
        return [body for body in bodies if body is not None] if None not in bodies else None

    def clear(self) -> None:
        """Let go of all."""
        self._bodies.clear()
        self._bytes = 0
