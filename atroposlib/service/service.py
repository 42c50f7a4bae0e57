"""The rollout service between the routes and the rules. It runs one call on the queue, stores what
that changed, and only then lets the answer go out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import orjson

from atroposlib.service import metrics
from atroposlib.service.fleet import FleetStatus
from atroposlib.service.group_reader import NO_REFERENCE, unreadable, with_reference
from atroposlib.service.metrics import Metrics
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import MISSING, NOBODY, Lease, Limits, Receipt, ValidatedGroup
from atroposlib.service.scheduling import is_plain
from atroposlib.service.store import Changes, DamagedError, PostSpace, Store, StoreError

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class HandOut:
    """A batch on its way to a trainer."""

    lease: Lease
    body: bytes
    """The JSON answer."""
    complete: bool = False
    """All of the answer was sent. The sender sets it."""


class Recorder(Protocol):
    """A recorder of rollouts for people. The service calls it after a commit.

    It neither waits nor raises.
    """

    def model(self, name: str | None) -> None:
        """Take the model that a trainer names in its registration."""

    def posted(self, groups: Sequence[tuple[int, str, bytes]]) -> None:
        """Take accepted groups: sequence number, name of the environment, body of each."""

    def reported(self, seqs: Sequence[int], report: Any) -> None:
        """Take the trainer's report on the tokens of a batch of these groups, in the order in which
        it got them.
        """

    def another_run(self) -> None:
        """Begin another run: later groups and reports belong to it."""

    def stats(self) -> Mapping[str, int]:
        """Return the groups that were `recorded` and `left_out` since the service began."""

    def close(self) -> None:
        """Write what waits, within a deadline."""


def _refuse_unreadable(bodies: Sequence[tuple[int, bytes]]) -> None:
    reasons = {seq: reason for seq, body in bodies if (reason := unreadable(body))}
    if reasons:
        what = "; ".join(f"group {seq}: {reason}" for seq, reason in reasons.items())
        raise DamagedError(
            f"an earlier version stored groups that trainers cannot read: {what}", list(reasons)
        )


def _with_groups(bodies: Sequence[bytes], content: Mapping[str, Any]) -> bytes:
    """Return an object as JSON, with the bodies of groups as `batch` in front.

    A batch may have many megabytes, so the bytes are copied only once.
    """
    parts = [b'{"batch":[']
    for body in bodies:
        parts += (body, b",")
    parts[max(1, len(parts) - 1) :] = [b"],", orjson.dumps(content)[1:]]
    return b"".join(parts)


class RolloutService:
    """One queue and its store. Every method runs on the event loop that made it.

    Attributes:
        recorder: gets groups and reports; None without one.
        trainer_activity: counts the trainer's actions, on which environments wait.
    """

    def __init__(
        self,
        store: Store,
        limits: Limits | None = None,
        commit_timeout: float = 30.0,
        recorder: Recorder | None = None,
    ) -> None:
        self.store, self.recorder = store, recorder
        self.limits = limits or Limits()
        self.clock = time.monotonic  # never the wall clock: it may jump
        self.queue = RolloutQueue(self.limits, store.load(), self.clock())
        self._checked_from = self.queue.next_seq
        """Groups below this number were stored by an earlier start, perhaps of a version that
        accepted more."""
        self.post_space = PostSpace(store)
        self.metrics = Metrics(lambda: self.queue, self.post_space)
        self.latest: bytes | None = None
        self.fleet_status = FleetStatus()
        self.keyed = False
        """Every request needs the service's key, so only holders of the key send addresses."""
        self.trainer_activity = TrainerActivity()
        self.trainer_called = self.clock()
        """Time of the trainer's last request, or of this service's start."""
        self.trainer_publishes = False
        """The trainer publishes its servers every few seconds, whatever else it does."""
        self._broken: StoreError | None = None
        self._reloading: asyncio.Task[None] | None = None
        self.committer = Committer(
            store,
            commit_timeout,
            self._note_commit,
            self._reload_after_commit_failure,
        )

    def require_key(self, keyed: bool) -> None:
        """Note that every request needs the service's key, or that none does."""
        self.keyed = keyed
        if keyed and self.queue.fleet.unkeyed:
            logger.warning(
                "%s asked to join before this service had a key, and may be anyone's: POST /fleet/join once more",
                ", ".join(self.queue.fleet.unkeyed),
            )

    async def run(self, call: Callable[[RolloutQueue], T]) -> T:
        """Run `call` on the queue and return its result once everything that it changed or saw is
        stored.

        Raises:
            StoreError: it could not be stored; the queue is again as the store has it.
        """
        if self._broken is not None:
            self._reload_after_commit_failure(self._broken)
            raise self._broken
        result = call(self.queue)
        for line in self.queue.news:
            logger.warning("%s", line)
        self.queue.news.clear()
        await self.committer.store_all(self.queue.take_changes())
        return result

    def note_trainer_call(self, publishes: bool | None = None) -> None:
        """Note a request of the trainer.

        Args:
            publishes: the trainer publishes its servers. False for a new trainer; None for no news.
        """
        self.trainer_called = self.clock()
        if publishes is not None:
            self.trainer_publishes = publishes

    def _note_commit(self, seconds: float) -> None:
        self.post_space.failure = None
        self.metrics.commit_seconds.observe(seconds)

    def _reload_after_commit_failure(self, error: StoreError) -> None:
        """Undo everything since the last commit by reloading the queue from the store."""
        if self._reloading is not None and not self._reloading.done():
            return
        self._broken = error
        self.post_space.failure = str(error)
        logger.error("refusing data: %s", error)
        self._reloading = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        try:
            snapshot = await asyncio.to_thread(self.store.load)
        except StoreError as error:
            self._broken = error  # each request gets it; the next one may try again
            logger.error("%s", error)
        except Exception as error:
            self._broken = StoreError(
                f"the store could not be read: {type(error).__name__}: {error}; see the service's log"
            )
            logger.exception("the store could not be read")
        else:
            self.queue = RolloutQueue(self.limits, snapshot, self.clock())
            self._broken = None
            logger.warning("the queue is as the store has it: %d groups", self.queue.held_groups)

    async def post(self, groups: list[ValidatedGroup]) -> list[Receipt]:
        """Accept groups, all or none of them, in the order of the calls."""
        now = self.clock()
        accepted: list[tuple[int, str, bytes]] = []

        def call(queue: RolloutQueue) -> list[Receipt]:
            queue.check(groups)
            receipts = []
            for group in groups:
                seq = queue.next_seq
                receipts.append(queue.add(group, now))
                if queue.next_seq > seq:
                    accepted.append(
                        (
                            seq,
                            queue.registry.by_id[queue.registry.line_of(group.env_id)].desired_name,
                            group.body,
                        )
                    )
            return receipts

        receipts = await self.run(call)
        if self.recorder is not None:
            self.recorder.posted(accepted)
        if groups:
            self.latest = groups[-1].body
        for group, receipt in zip(groups, receipts, strict=True):
            self.metrics.posted(group, receipt)
        return receipts

    def handed_out(self, batch_id: int | None) -> list[int]:
        """Return the sequence numbers of a batch's groups, in the order in which the trainer got
        them. The list is empty if the trainer does not have the batch.
        """
        if batch_id is None or batch_id not in self.queue.leases:
            return []
        groups = self.queue.leases[batch_id].groups
        return [group.seq for group in self.queue.streams.in_order(groups)]

    def reported(self, seqs: Sequence[int], report: Any) -> None:
        """Hand the trainer's report on a batch to the recorder."""
        if self.recorder is not None and seqs and report is not None:
            self.recorder.reported(seqs, report)

    @asynccontextmanager
    async def handing_out(
        self, received: int | None, uuid: int | None
    ) -> AsyncIterator[HandOut | None]:
        """Yield a batch while it is sent, or None if there is none yet.

        At the end of the block the batch no longer counts as being sent. This holds after a stalled
        commit, at the request's time limit, and if the client disconnects. The trainer then gets it
        again, unless the block has set `complete`.
        """
        now = self.clock()
        on_its_way: list[Lease] = []

        def take(queue: RolloutQueue) -> None:
            lease = queue.next_batch(now, received, uuid)
            if lease is not None:
                queue.sending(lease)
                on_its_way.append(lease)

        hand_out = None
        try:
            while hand_out is None:
                await self.run(take)
                if not on_its_way:
                    break
                hand_out = await self._read(on_its_way[0])
                if hand_out is None:
                    await self._sent(on_its_way.pop(), complete=False)
            if hand_out is not None:
                self.metrics.handed_out(hand_out.lease)
                self.trainer_activity.count()
            yield hand_out
        finally:
            for lease in on_its_way:
                await self._sent(lease, hand_out is not None and hand_out.complete)

    async def _sent(self, lease: Lease, complete: bool) -> None:
        if not complete:
            self.queue.sent(lease, complete=False)  # nothing to store, and so nothing to wait for
            return
        try:
            await self.run(lambda queue: queue.sent(lease, complete=True))
        except StoreError as error:
            logger.error(
                "batch %d went out, but that is not stored and it may be sent again: %s",
                lease.batch_id,
                error,
            )

    async def _read(self, lease: Lease) -> HandOut | None:
        """Return the JSON answer for a batch; None if it was dissolved because of damaged bodies."""
        groups = self.queue.streams.in_order(lease.groups)
        seqs = [group.seq for group in groups]
        positions = self.queue.streams.after(lease.groups)
        try:
            bodies = await self.bodies(seqs)
        except DamagedError as error:
            damaged = error.seqs
            dropped = await self.run(lambda queue: queue.drop_damaged(lease, damaged))
            if dropped:
                logger.error(
                    "%s; dropped %d groups of batch %d, and forming it again",
                    error,
                    dropped,
                    lease.batch_id,
                )
            return None
        for at, group in enumerate(groups):
            if group.reference == MISSING and not bodies[at].endswith(
                NO_REFERENCE
            ):  # of a reference that no longer counts
                bodies[at] = with_reference(bodies[at])
        names = {
            str(line): self.queue.registry.by_id[line].desired_name
            for line in {group.line for group in lease.groups}
        }
        names.pop(str(NOBODY), None)
        content: dict[str, Any] = {"batch_id": lease.batch_id, "environments": names}
        if not is_plain(self.queue.replay):
            content["uses"] = [group.uses for group in groups]
        if positions:
            content["positions"] = positions
        return HandOut(lease, _with_groups(bodies, content))

    async def bodies(self, seqs: Sequence[int]) -> list[bytes]:
        """Return the bodies of groups, in the order of the numbers.

        Raises:
            DamagedError: some of them are damaged or gone, or an earlier version stored what
                trainers cannot read.
            StoreError: they cannot be read.
        """
        bodies = self.store.bodies_at_hand(seqs)
        if bodies is None:
            bodies = await asyncio.to_thread(self.store.bodies, seqs)
        earlier = [
            (seq, body) for seq, body in zip(seqs, bodies, strict=True) if seq < self._checked_from
        ]
        if earlier:
            await asyncio.to_thread(_refuse_unreadable, earlier)
        return bodies

    def name_set_aside(self) -> None:
        """Name in the log the batches that were set aside just now."""
        for line in self.queue.take_set_aside():
            logger.error("%s", line)

    async def set_aside_body(self, batch_id: int) -> bytes | None:
        """A batch that was set aside, as JSON with its groups as they were posted; None if there is
        none of this number.
        """
        lease, reason = self.queue.failures.batches.get(batch_id, (None, ""))
        if lease is None:
            return None
        bodies = await self.bodies([group.seq for group in lease.groups])
        return _with_groups(bodies, {"batch_id": batch_id, "reason": reason})

    def stats(self) -> dict[str, Any]:
        """Return the figures of GET /stats: waiting, leased and dropped groups, and the state of each
        environment.
        """
        queue, now = self.queue, self.clock()
        trainer = queue.registration
        return {
            "current_step": queue.current_step,
            "trainer_version": queue.trainer_version(),
            "sampling_version": queue.sampling_version(),
            "max_staleness": trainer.max_staleness if trainer else None,
            "weight_epoch": trainer.weight_epoch if trainer else None,
            "run_ended": queue.ended,
            "batches_skipped": queue.batches_skipped,
            "batches_set_aside": queue.failures.total,
            "replay": {
                **queue.replay.model_dump(),
                "uses": queue.uses,
                "groups_used": queue.groups_used,
                "waiting_to_be_used_again": queue.lines.used_groups,
            },
            "waiting_because": queue.waiting,
            "store": self.post_space.figures(),
            "queue": metrics.backlog(queue),
            "leases": metrics.leases(queue),
            "dropped": [
                {"reason": reason, "longest_up_to": bucket, "groups": count}
                for (reason, bucket), count in sorted(queue.drops.items())
            ],
            "environments": [
                one | {"groups_wanted": queue.groups_wanted(one["env_id"], now)}
                for one in metrics.environments(queue, now)
            ],
        }

    async def close(self) -> None:
        """Store what is under way and close the store."""
        if not await self.committer.close():
            logger.error(
                "the store did not answer within %g s; what it was given last may be lost",
                self.committer.timeout,
            )
        if self._reloading is not None:
            await asyncio.wait([self._reloading], timeout=self.committer.timeout)
        await asyncio.to_thread(self.store.close)
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)


class Committer:
    """Commits changes in their order, one transaction after the other.

    All changes that wait at a time go into one transaction, and cost one fsync.

    Args:
        store: where to.
        timeout: seconds that a caller waits at most.
        committed: called with the seconds that a transaction took.
        failed: called when a transaction failed, before its callers get the error. Later changes
            are dropped, because they were made from a state that was not stored.
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

        A call that changed nothing has seen what others changed, and its answer promises that.
        Examples are a post that is retried while the first one is still being written, and a
        repeated request for a batch. So it waits for the others.

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
            except Exception as error:  # each caller that waits must get an error
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
            future.exception()  # no caller may be left to retrieve it

    async def close(self) -> bool:
        """Wait for what is under way.

        Returns whether all of it was stored within the time limit.
        """
        late: set[asyncio.Task[None]] = set()
        if self._task is not None:
            _, late = await asyncio.wait([self._task], timeout=self.timeout)
        self._writer.shutdown(wait=False)
        return not late


class TrainerActivity:
    """Counts registrations, batches taken, acknowledgements and ends of runs.

    Attributes:
        number: of actions since this service began.
    """

    def __init__(self) -> None:
        self.number = 0
        self._next = asyncio.Event()

    def count(self) -> None:
        """Count an action, and wake everything that waits for one."""
        self.number += 1
        self._next.set()
        self._next = asyncio.Event()

    async def wait_for_change(self, number: int, seconds: float) -> None:
        """Wait until the count differs from `number`, for at most so many seconds.

        A count from before a restart of the service may equal the present one by chance. Then the
        wait lasts `seconds`.
        """
        if number != self.number:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._next.wait()
        except TimeoutError:
            return
