"""Stores what the calls change: everything that waits at a time goes into one transaction, and
costs one fsync.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from atroposlib.service.records import Changes
from atroposlib.service.store import Store, StoreError

logger = logging.getLogger(__name__)


class Committer:
    """Commits changes in their order, one transaction after the other.

    Args:
        store: where to.
        timeout: seconds that a caller waits at most.
        committed: called with the seconds that a transaction took.
        failed: called when a transaction failed, before those who wait for it hear so. What was
            given since then is forgotten, since it was made from a state that never was.
    """

    def __init__(
        self,
        store: Store,
        timeout: float,
        committed: Callable[[float], None],
        failed: Callable[[StoreError], None],
    ) -> None:
        self.store, self.timeout = store, timeout
        self._tell_committed, self._tell_failed = committed, failed
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-store")
        self._waiting: list[Changes] = []
        self._next: asyncio.Future[None] | None = None
        """Resolves when what waits now is stored."""
        self._current: asyncio.Future[None] | None = None
        """Resolves when what is being written now is stored."""
        self._task: asyncio.Task[None] | None = None

    async def store_all(self, changes: Changes) -> None:
        """Wait until these changes are stored, and all that were given before.

        A call that changed nothing has seen what others changed, and its answer promises that: a
        post that is retried while the first one is still being written, a batch that is asked for
        again. So it waits for the others.

        Raises:
            StoreError: they could not be stored, or not within the time limit.
        """
        if not self.store.durable:
            if changes:
                self.store.commit([changes])
            return
        if changes:
            self._waiting.append(changes)
            if self._next is None:
                self._next = asyncio.get_running_loop().create_future()
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._commit_all())
        newest = self._next or self._current
        if newest is None:
            return
        try:
            async with asyncio.timeout(self.timeout):
                await asyncio.shield(
                    newest
                )  # a client that goes away does not take back what others share
        except TimeoutError:
            raise StoreError(
                f"the store did not answer within {self.timeout:g} s; look at the disk it is on"
            ) from None

    async def _commit_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            together, self._waiting = self._waiting, []
            self._current, self._next = self._next, None
            started = time.perf_counter()
            try:
                await loop.run_in_executor(self._writer, self.store.commit, together)
            except StoreError as error:
                self._fail(error)
            except Exception as error:  # whatever it is, those who wait must hear of it
                logger.exception("the store failed in a way that it does not know")
                self._fail(
                    StoreError(
                        f"nothing was stored: {type(error).__name__}: {error}; see the service's log"
                    )
                )
            else:
                self._resolve(None)
                self._tell_committed(time.perf_counter() - started)

    def _fail(self, error: StoreError) -> None:
        self._waiting = []
        self._tell_failed(error)
        self._resolve(error)
        self._current, self._next = self._next, None
        self._resolve(error)

    def _resolve(self, error: StoreError | None) -> None:
        future, self._current = self._current, None
        if future is None:
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # whoever waited may be gone

    async def close(self) -> bool:
        """Wait for what is under way.

        Returns whether all of it was stored within the time limit.
        """
        late: set[asyncio.Task[None]] = set()
        if self._task is not None:
            _, late = await asyncio.wait([self._task], timeout=self.timeout)
        self._writer.shutdown(wait=False)
        return not late
