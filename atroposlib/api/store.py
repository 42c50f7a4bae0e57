"""Where the rollout service keeps its state. A store applies `Changes` in the order in which they are submitted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

from atroposlib.api.state import Changes, Snapshot


class StoreError(RuntimeError):
    """The store could not keep or give back what it was asked to. The message names the file and the remedy."""


class Store(ABC):
    """Keeps groups, leases and registrations.

    Used by one thread: `load`, then any number of `submit` and `bodies`, then `close`.
    """

    durable: bool = False
    """What was submitted survives the death of the process once its future has resolved."""

    @abstractmethod
    def load(self) -> Snapshot:
        """Everything that was stored, but for the bodies. Also makes a store that has failed usable again.

        Raises:
            StoreError: the store cannot be read.
        """

    @abstractmethod
    def submit(self, changes: Changes) -> Future[None]:
        """Store the changes, all or none of them.

        The future resolves when they are stored. If it fails, with a StoreError, everything submitted after it fails
        too until `load` is called: what is stored is always what was submitted up to some point.
        """

    def bodies_at_hand(self, seqs: Sequence[int]) -> list[bytes] | None:
        """The same as `bodies` if that needs no disk, else None. Called on the thread that submits."""
        return None

    @abstractmethod
    def bodies(self, seqs: Sequence[int]) -> list[bytes]:
        """The JSON bodies of groups that are stored, in the order asked for. May be called from another thread.

        Raises:
            StoreError: one of them cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Store what was submitted and let go of the file."""


class MemoryStore(Store):
    """Keeps the bodies in memory, and nothing beyond the life of the process."""

    def __init__(self) -> None:
        self._bodies: dict[int, bytes] = {}

    def load(self) -> Snapshot:
        """Nothing: a memory store starts empty."""
        return Snapshot()

    def submit(self, changes: Changes) -> Future[None]:
        """Keep new bodies and let go of removed ones."""
        if changes.wipe:
            self._bodies.clear()
        for group, body, _ in changes.added:
            self._bodies[group.seq] = body
        for seq in changes.removed:
            self._bodies.pop(seq, None)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def bodies(self, seqs: Sequence[int]) -> list[bytes]:
        """Bodies by sequence number."""
        return [self._bodies[seq] for seq in seqs]

    bodies_at_hand = bodies

    def close(self) -> None:
        """Nothing to do."""
