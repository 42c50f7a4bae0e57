"""An environment's workers: how many items are in work, which comes next, and what becomes of each."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atroposlib.envs.runner.exact_resume import ItemPosition, ResumeWindow, current_item
from atroposlib.envs.runner.worker_policy import (
    QueueState,
    WorkerLimits,
    allowed_workers,
    workers_during_eval,
)
from atroposlib.errors import EnvironmentFailure, RolloutFailure
from atroposlib.inference.client import APIServer
from atroposlib.type_definitions import Item

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

logger = logging.getLogger(__name__)


@dataclass
class RunningItem:
    """An item in work.

    Attributes:
        item: what `get_next_item` returned.
        worker: the task that works on it.
        position: its position in the order of items, with `exact_resume`.
        collected: True once all its responses are sampled, so that it needs no inference server any
            more.
    """

    item: Item
    worker: asyncio.Task[Any]
    position: ItemPosition | None
    collected: bool = False

    def mark_collected(self) -> None:
        """Record that all responses are sampled."""
        self.collected = True


class Workers:
    """Keeps as many items in work as are wanted.

    Those in work, and those to come, are the environment's attributes.
    """

    def __init__(self, env: "BaseEnv"):
        self.env = env
        self.wake = asyncio.Event()
        """Set when a worker has finished."""
        self.fatal: EnvironmentFailure | None = None
        self.failures_in_a_row = 0
        self.busy_when_asked = 0
        self.window = ResumeWindow() if env.config.exact_resume else None
        """With `exact_resume`, the items from which the next batch is made."""
        self._items: dict[int, Item] = {}
        self._items_made = 0
        """Calls of `get_next_item` since `setup` that gave an item, with `exact_resume`."""

    @property
    def stream(self) -> str:
        """The service's name for the order of items that this environment serves."""
        return f"{self.env._reports.label} seed {self.env.config.seed}"

    def batch_share(self) -> int:
        """See `BaseEnv.derived_batch_size`."""
        config, status = self.env.config, self.env.status_dict
        if not status or config.batch_size <= 0:
            return config.batch_size
        share = status.get("unallocated_fraction", 1.0) + (config.min_batch_allocation or 0.0)
        return int(config.batch_size * min(1.0, share))

    def wanted(self) -> int:
        """Return the number of items that may be in work now."""
        config, status = self.env.config, self.env.status_dict
        allowed = allowed_workers(
            WorkerLimits(
                max_workers=self.env.max_num_workers,
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
        if self.env.eval_runner is not None and not self.env.eval_runner.done():
            return workers_during_eval(allowed, config.eval_handling, config.eval_limit_ratio)
        return allowed

    async def add(self) -> None:
        """See `BaseEnv.add_train_workers`."""
        # A worker that has posted since the service was asked is in neither number: with it, a
        # batch would be exceeded.
        missing = self.wanted() - max(len(self.env.workers), self.busy_when_asked)
        self.env.workers_added_list.append(max(0, missing))
        for _ in range(missing):
            number, item = await self._next_of_stream()
            if item is None:
                return
            item_id = str(uuid.uuid4())
            position = None
            if self.window is not None:
                self.window.begin(number)
                position = ItemPosition(self.stream, number, self.window.life, self.window)
            worker = asyncio.create_task(self.env.handle_env(item_id), name=f"rollout {item_id}")
            self.env.running_items[item_id] = RunningItem(item, worker, position)
            self.env.workers.add(worker)
            worker.add_done_callback(self._worker_done(item))

    def _worker_done(self, item: Any) -> Callable[[asyncio.Task[Any]], None]:
        def done(task: asyncio.Task[Any]) -> None:
            self.env.workers.discard(task)
            if task.cancelled():
                return
            if (error := task.exception()) is not None:
                self.fatal = (
                    error
                    if isinstance(error, EnvironmentFailure)
                    else EnvironmentFailure(f"a worker died: {error!r}")
                )
            elif task.result():
                self.env.last_completed_item = item
            self.wake.set()

        return done

    async def work(self, item_id: str) -> Any:
        """See `BaseEnv.handle_env`."""
        running = self.env.running_items[item_id]
        started = time.monotonic()
        groups, done = None, False
        current_item.set(running.position)
        try:
            groups, _ = await self.env._rollouts.work_on(
                running.item, collected=running.mark_collected
            )
            self.failures_in_a_row, done = 0, True
        except RolloutFailure as failure:
            self.failures_in_a_row += 1
            logger.error("an item was given up: %s (%d in a row)", failure, self.failures_in_a_row)
        finally:
            # An item that was put back is no longer listed, and another worker may have it.
            if (
                self.env.running_items.pop(item_id, None) is not None
                and running.position is not None
            ):
                running.position.window.finish(running.position.number, done)
        duration = time.monotonic() - started
        self.env.task_duration.append(duration)
        self.env.task_successful.append(int(groups is not None))
        (
            self.env.succeeded_task_duration
            if groups is not None
            else self.env.failed_task_duration
        ).append(duration)
        return groups

    def put_back(self, item_id: str) -> None:
        """Stop an item's worker. The item is worked on again later."""
        running = self.env.running_items.pop(item_id)
        running.worker.cancel()
        self.env.workers.discard(running.worker)
        if running.position is None:
            self.env.backlog.append(running.item)
        else:
            running.position.window.finish(running.position.number, done=False)

    def check_health(self) -> None:
        """End on what a retry cannot mend."""
        if self.fatal is not None:
            raise self.fatal
        for server in self.env.server.servers:
            if isinstance(server, APIServer) and server.pool.failure is not None:
                raise server.pool.failure
        limit = self.env.config.max_consecutive_failures
        if 0 < limit <= self.failures_in_a_row:
            raise EnvironmentFailure(
                f"the last {self.failures_in_a_row} items all failed ({self.env.drops}): see the tracebacks above, "
                "or raise --env.max_consecutive_failures"
            )

    # ---- which item comes next
    # ------------------------------------------------------------------------------------------

    async def item_by_counting(self, number: int) -> Item:
        """See `BaseEnv.item_at`."""
        if number < self._items_made:
            await self.env.setup()
            self._items_made = 0
        item = None
        while self._items_made <= number:
            if (item := await self.env.get_next_item()) is None:
                return None
            self._items_made += 1
        return item

    async def _next_of_stream(self) -> tuple[int, Item]:
        """The item to begin now, and its number; None in place of an item when there is none for
        now.
        """
        window = self.window
        if window is None:
            return -1, self.env.backlog.pop() if self.env.backlog else await self.env.next_item()
        while True:
            number = window.next_number()
            if number not in self._items:
                self._items[number] = await self.env.item_at(number)
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
                f"--env.exact_resume: the rollout service at {self.env.config.rollout_server_url} keeps no positions of items; "
                "start the one of this version, or leave the flag out"
            )
        if reason := status["stream"].get("inexact"):
            raise EnvironmentFailure(f"--env.exact_resume: {reason}, or leave the flag out")
        if window.update(status["stream"]):
            for item_id in list(self.env.running_items):
                self.put_back(item_id)
            logger.debug(
                "the stream of items stands at item %d, %d settled",
                window.first,
                len(status["stream"]["settled"]),
            )
        self._items = {
            number: item for number, item in self._items.items() if number >= window.first
        }
