"""The rollout service between the routes and the rules: it runs one call on the queue, stores what that changed, and only
then lets the answer go out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from atroposlib.api.metrics import Metrics
from atroposlib.api.rollout_queue import RolloutQueue
from atroposlib.api.state import NOBODY, Changes, Draft, Lease, Limits, Receipt
from atroposlib.api.store import Store, StoreError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class RolloutService:
    """One queue and its store. Every method runs on the event loop that made it."""

    def __init__(self, store: Store, limits: Limits | None = None, commit_timeout: float = 30.0) -> None:
        self.store = store
        self.limits = limits or Limits()
        self.commit_timeout = commit_timeout
        self.clock = time.monotonic  # never the wall clock: it may jump
        self.queue = RolloutQueue(self.limits, store.load(), self.clock())
        self.metrics = Metrics(lambda: self.queue)
        self.latest: bytes | None = None
        self._broken: StoreError | None = None
        self._mending: asyncio.Task[None] | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-store")
        self._waiting: list[Changes] = []
        self._committed: asyncio.Future[None] | None = None
        """Resolves when what waits now is stored."""
        self._committing: asyncio.Task[None] | None = None

    async def run(self, call: Callable[[RolloutQueue], T]) -> T:
        """Run `call` on the queue and return its result once everything it changed is stored.

        Raises:
            StoreError: it could not be stored; the queue is again as the store has it.
        """
        if self._broken is not None:
            self._mend(self._broken)
            raise self._broken
        result = call(self.queue)
        await self._store(self.queue.take_changes())
        return result

    async def _store(self, changes: Changes) -> None:
        """Wait until the changes are stored, together with all others that wait by then."""
        if not changes:
            return
        if not self.store.durable:
            self.store.commit([changes])
            return
        self._waiting.append(changes)
        if self._committed is None:
            self._committed = asyncio.get_running_loop().create_future()
        committed = self._committed
        if self._committing is None or self._committing.done():
            self._committing = asyncio.create_task(self._commit_all())
        try:
            async with asyncio.timeout(self.commit_timeout):
                await asyncio.shield(committed)  # a client that goes away does not take back what others share
        except TimeoutError:
            raise StoreError(f"the store did not answer within {self.commit_timeout:g} s; look at the disk it is on") from None

    async def _commit_all(self) -> None:
        while self._waiting:
            together, self._waiting = self._waiting, []
            committed, self._committed = self._committed, None
            assert committed is not None
            started = time.perf_counter()
            try:
                await asyncio.get_running_loop().run_in_executor(self._writer, self.store.commit, together)
            except StoreError as error:
                self._mend(error)
                # What came after was made from a state that never was.
                for future in (committed, self._committed):
                    if future is not None:
                        future.set_exception(error)
                        future.exception()  # whoever waited may be gone
                self._waiting, self._committed = [], None
            else:
                committed.set_result(None)
                self.metrics.commit_seconds.observe(time.perf_counter() - started)

    def _mend(self, error: StoreError) -> None:
        """What the queue did since the last commit did not happen: take over the store's view of it."""
        if self._mending is not None and not self._mending.done():
            return
        self._broken = error
        logger.error("refusing data: %s", error)
        self._mending = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        try:
            snapshot = await asyncio.to_thread(self.store.load)
        except StoreError as error:
            self._broken = error  # every request says so; the next one may try again
            logger.error("%s", error)
        else:
            self.queue = RolloutQueue(self.limits, snapshot, self.clock())
            self._broken = None
            logger.warning("the queue is as the store has it: %d groups", self.queue.held_groups)

    async def post(self, drafts: list[Draft], placed: Callable[[], None]) -> list[Receipt]:
        """Accept groups, all or none of them. `placed` is called when they have their place in the queue."""
        now = self.clock()

        def call(queue: RolloutQueue) -> list[Receipt]:
            queue.check(drafts)
            receipts = [queue.add(draft, now) for draft in drafts]
            placed()
            return receipts

        receipts = await self.run(call)
        if drafts:
            self.latest = drafts[-1].body
        for draft, receipt in zip(drafts, receipts, strict=True):
            self.metrics.posted(draft, receipt)
        return receipts

    async def batch(self, received: int | None, uuid: int | None) -> tuple[Lease, bytes] | None:
        """A batch and its JSON answer. The caller must say with `delivered` how sending it went."""
        now = self.clock()

        def call(queue: RolloutQueue) -> Lease | None:
            lease = queue.next_batch(now, received, uuid)
            if lease is not None:
                queue.sending(lease)
            return lease

        lease = await self.run(call)
        if lease is None:
            return None
        try:
            seqs = [group.seq for group in lease.groups]
            bodies = self.store.bodies_at_hand(seqs)
            if bodies is None:
                bodies = await asyncio.to_thread(self.store.bodies, seqs)
        except BaseException:
            self.queue.sent(lease, complete=False)
            raise
        self.metrics.handed_out(lease)
        return lease, b'{"batch":[' + b",".join(bodies) + b'],"batch_id":' + str(lease.batch_id).encode() + b"}"

    async def delivered(self, lease: Lease, complete: bool) -> None:
        """Note whether the answer that carried the lease went out whole."""
        await self.run(lambda queue: queue.sent(lease, complete))

    def stats(self) -> dict[str, Any]:
        """What waits, what is leased, what was dropped and why, and who is behind; for people and scripts."""
        queue, now = self.queue, self.clock()
        trainer = queue.registration
        return {
            "current_step": queue.current_step,
            "trainer_version": queue.trainer_version(),
            "sampling_version": queue.sampling_version(),
            "max_staleness": trainer.max_staleness if trainer else None,
            "waiting_because": queue.waiting,
            "queue": {
                "groups": queue.lines.groups,
                "sequences": queue.lines.total_sequences(),
                "buffered_groups": sum(len(buffer) for buffer in queue.buffers.values()),
                "held_groups": queue.held_groups,
                "held_bytes": queue.held_bytes,
                "max_groups": self.limits.max_groups,
                "max_bytes": self.limits.max_bytes,
                "oldest_version": min((group.version for group in queue.lines), default=None),
            },
            "leases": [
                {"batch_id": lease.batch_id, "groups": len(lease.groups), "sent": lease.sent, "returned": lease.returned}
                for lease in queue.leases.values()
            ],
            "dropped": [
                {"reason": reason, "longest_up_to": bucket, "groups": count}
                for (reason, bucket), count in sorted(queue.drops.items())
            ],
            "environments": [
                {
                    "env_id": environment.env_id,
                    "wandb_name": environment.wandb_name,
                    "connected": environment.connected,
                    "weight": environment.weight,
                    "groups_accepted": environment.accepted,
                    "groups_queued": len(queue.lines.by_line[environment.env_id]),
                    "groups_buffered": len(queue.buffers.get(environment.env_id, [])),
                    "groups_wanted": queue.groups_wanted(environment.env_id, now),
                    "seconds_silent": round(now - queue.registry.last_seen[environment.env_id], 1),
                }
                for environment in queue.registry.by_id.values()
                if environment.env_id != NOBODY
            ],
        }

    async def close(self) -> None:
        """Store what is under way and close the store."""
        under_way = [task for task in (self._committing, self._mending) if task is not None]
        if under_way:
            _, late = await asyncio.wait(under_way, timeout=self.commit_timeout)
            if late:
                logger.error("the store did not answer within %g s; what it was given last may be lost", self.commit_timeout)
        self._writer.shutdown(wait=False)
        await asyncio.to_thread(self.store.close, True)
