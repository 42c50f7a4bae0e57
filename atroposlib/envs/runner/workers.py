"""An environment's workers: the number of items in work, the next item, and the end of each.

Every group that is queued at the service or in work here will be trained on later than it was
started. When at most `max_batches_offpolicy` batches are queued or in work, no group is older than
that many optimizer steps when it is taken.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.config import EvalHandlingEnum
from atroposlib.envs.runner.connections import Connections
from atroposlib.envs.runner.exact_resume import ItemPosition, ResumeWindow, current_item
from atroposlib.envs.runner.rollout import Rollouts
from atroposlib.envs.runner.state import Author, RunningItem, RunState, label_of, take_item
from atroposlib.errors import EnvironmentFailure, RolloutFailure
from atroposlib.inference.client import APIServer
from atroposlib.type_definitions import Item

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerLimits:
    """The bounds of the number of workers.

    Attributes:
        max_workers: most items in work, whatever the queue says.
        group_size: sequences that one item yields.
        batch_size: sequences per batch; 0 or less when no trainer has said.
        max_batches_offpolicy: batches that may be queued or in work; below 0 for no bound.
        min_batch_allocation: share of each batch reserved for this environment.
    """

    max_workers: int
    group_size: int
    batch_size: int
    max_batches_offpolicy: int
    min_batch_allocation: float | None = None


@dataclass(frozen=True)
class QueueState:
    """The answer of `/status-env`, sizes in groups.

    Attributes:
        queue_size: groups queued, of all environments.
        self_queue_size: groups queued, of this environment.
        unallocated_fraction: share of a batch that no environment has reserved.
        groups_wanted: how many more groups the service wants from this environment; None when it
            does not say.
    """

    queue_size: int = 0
    self_queue_size: int = 0
    unallocated_fraction: float = 1.0
    groups_wanted: int | None = None


def allowed_workers(limits: WorkerLimits, queue: QueueState) -> int:
    """Items that may be in work now, those already in work included.

    >>> limits = WorkerLimits(max_workers=64, group_size=8, batch_size=64, max_batches_offpolicy=3)
    >>> allowed_workers(limits, QueueState(queue_size=0)), allowed_workers(limits, QueueState(queue_size=20))
    (24, 4)
    """
    if limits.batch_size <= 0:
        return 0
    if limits.max_batches_offpolicy < 0:
        allowed: float = limits.max_workers
    else:
        # On-policy (0) still needs the batch that the trainer waits for.
        batches = max(1, limits.max_batches_offpolicy)
        share = min(1.0, queue.unallocated_fraction + (limits.min_batch_allocation or 0.0))
        allowed = (
            math.ceil(batches * limits.batch_size * share / limits.group_size) - queue.queue_size
        )
        if limits.min_batch_allocation is not None:
            # Other environments' groups may fill the queue; the reserved share is still ours to
            # fill.
            reserved = math.ceil(
                batches * limits.batch_size * limits.min_batch_allocation / limits.group_size
            )
            allowed = max(allowed, reserved - queue.self_queue_size)
    if queue.groups_wanted is not None:
        allowed = min(allowed, queue.groups_wanted)
    return max(0, min(limits.max_workers, int(allowed)))


def workers_during_eval(allowed: int, handling: EvalHandlingEnum, ratio: float) -> int:
    """Return the number of workers that may train while an evaluation runs."""
    if handling is EvalHandlingEnum.STOP_TRAIN:
        return 0
    if handling is EvalHandlingEnum.LIMIT_TRAIN:
        return int(allowed * ratio)
    return allowed


class Workers:
    """Keeps as many items in work as are allowed."""

    def __init__(
        self, state: RunState, connections: Connections, author: Author, rollouts: Rollouts
    ):
        self.state, self.connections, self.author = state, connections, author
        self.rollouts = rollouts
        self.wake = asyncio.Event()
        """Set when a worker has finished."""
        self.fatal: EnvironmentFailure | None = None
        self.failures_in_a_row = 0
        self.busy_when_asked = 0
        self.window: ResumeWindow | None = None
        """With `exact_resume`, the items from which the next batch is made."""
        if self.state.config.exact_resume:
            self.window = ResumeWindow()
        self._items: dict[int, Item] = {}
        self._items_made = 0
        """Calls of `get_next_item` since `setup` that gave an item, with `exact_resume`."""

    @property
    def stream(self) -> str:
        """The service's name for the order of items that this environment serves."""
        return f"{label_of(self.author, self.state.config)} seed {self.state.config.seed}"

    def wanted(self) -> int:
        """Return the number of items that may be in work now."""
        config, status = self.state.config, self.state.status_dict
        allowed = allowed_workers(
            WorkerLimits(
                max_workers=self.state.max_num_workers,
                group_size=config.group_size,
                batch_size=config.batch_size,
                max_batches_offpolicy=config.max_batches_offpolicy,
                min_batch_allocation=config.min_batch_allocation,
            ),
            QueueState(
                queue_size=status.get("queue_size", 0),
                self_queue_size=status.get("self_queue_size", 0),
                unallocated_fraction=status.get("unallocated_fraction", 1.0),
                groups_wanted=status.get("groups_wanted"),
            ),
        )
        if self.state.eval_runner is not None and not self.state.eval_runner.done():
            return workers_during_eval(allowed, config.eval_handling, config.eval_limit_ratio)
        return allowed

    async def add(self) -> None:
        """See `BaseEnv.add_train_workers`."""
        # A worker that has posted since the service was asked is in neither number: with it, a
        # batch would be exceeded.
        missing = self.wanted() - max(len(self.state.workers), self.busy_when_asked)
        self.state.timings["workers_added_per_attempt"].append(max(0, missing))
        for _ in range(missing):
            number, item = await self._next_of_stream()
            if item is None:
                return
            item_id = str(uuid.uuid4())
            position = None
            if self.window is not None:
                self.window.begin(number)
                position = ItemPosition(self.stream, number, self.window.life, self.window)
            worker = asyncio.create_task(self.author.handle_env(item_id), name=f"rollout {item_id}")
            self.state.running_items[item_id] = RunningItem(item, worker, position)
            self.state.workers.add(worker)
            worker.add_done_callback(self._worker_done)

    def _worker_done(self, task: asyncio.Task[Any]) -> None:
        self.state.workers.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, EnvironmentFailure):
            self.fatal = error
        elif error is not None:
            self.fatal = EnvironmentFailure(f"a worker died: {error!r}")
        self.wake.set()

    async def work(self, item_id: str) -> Any:
        """See `BaseEnv.handle_env`."""
        running = self.state.running_items[item_id]
        started = time.monotonic()
        groups, done = None, False
        current_item.set(running.position)
        try:
            groups, _ = await self.rollouts.work_on(running.item, collected=running.mark_collected)
            self.failures_in_a_row, done = 0, True
        except RolloutFailure as failure:
            self.failures_in_a_row += 1
            logger.error("an item was given up: %s (%d in a row)", failure, self.failures_in_a_row)
        finally:
            # An item that was put back is no longer listed, and another worker may have it.
            if (
                self.state.running_items.pop(item_id, None) is not None
                and running.position is not None
            ):
                running.position.window.finish(running.position.number, done)
        outcome = "failed_task_duration"
        if groups is not None:
            outcome = "succeeded_task_duration"
        for name in ("task_duration", outcome):
            self.state.timings[name].append(time.monotonic() - started)
        return groups

    def put_back(self, item_id: str) -> None:
        """Stop an item's worker. The item is worked on again later."""
        running = self.state.running_items.pop(item_id)
        running.worker.cancel()
        self.state.workers.discard(running.worker)
        if running.position is None:
            self.state.backlog.append(running.item)
        else:
            running.position.window.finish(running.position.number, done=False)

    def check_health(self) -> None:
        """End on what a retry cannot mend."""
        if self.fatal is not None:
            raise self.fatal
        for server in self.connections.server.servers:
            if isinstance(server, APIServer) and server.pool.failure is not None:
                raise server.pool.failure
        limit = self.state.config.max_consecutive_failures
        if 0 < limit <= self.failures_in_a_row:
            raise EnvironmentFailure(
                f"the last {self.failures_in_a_row} items all failed ({self.state.drops}): see the tracebacks above, "
                "or raise --env.max_consecutive_failures"
            )

    # ---- which item comes next
    # ------------------------------------------------------------------------------------------

    async def item_by_counting(self, number: int) -> Item:
        """See `BaseEnv.item_at`."""
        if number < self._items_made:
            await self.author.setup()
            self._items_made = 0
        item = None
        while self._items_made <= number:
            if (item := await self.author.get_next_item()) is None:
                return None
            self._items_made += 1
        return item

    async def _next_of_stream(self) -> tuple[int, Item]:
        """The item to begin now, and its number; None in place of an item when there is none for
        now.
        """
        window = self.window
        if window is None:
            return -1, await take_item(self.state, self.author)
        while True:
            number = window.next_number()
            if number not in self._items:
                self._items[number] = await self.author.item_at(number)
            if number == window.next_number():  # else a lower one has failed meanwhile
                item = self._items[number]
                if item is None:
                    del self._items[number]
                return number, item

    def heed_position(self, status: Mapping[str, Any]) -> None:
        """With `exact_resume`, go where the service says that the stream of items stands.

        Raises:
            EnvironmentFailure: the run cannot be resumed exactly.
        """
        window = self.window
        if window is None:
            return
        if status.get("max_staleness") != 0:
            raise EnvironmentFailure(
                f"--env.exact_resume needs a trainer that takes no older rollouts, and this one's max_staleness is "
                f"{status.get('max_staleness')}: start it with --max-staleness 0 or --deterministic"
            )
        if "version" not in status.get("stream", {}):
            raise EnvironmentFailure(
                f"--env.exact_resume: the rollout service at {self.state.config.rollout_server_url} "
                "keeps no positions of items; start the one of this version, or leave the flag out"
            )
        if reason := status["stream"].get("inexact"):
            raise EnvironmentFailure(f"--env.exact_resume: {reason}, or leave the flag out")
        if window.update(status["stream"]):
            for item_id in list(self.state.running_items):
                self.put_back(item_id)
            logger.debug(
                "the stream of items stands at item %d, %d settled",
                window.first,
                len(status["stream"]["settled"]),
            )
        self._items = {
            number: item for number, item in self._items.items() if number >= window.first
        }
