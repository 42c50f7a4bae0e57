"""An environment's workers: how many items are in work, which comes next, and what becomes of each."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from atroposlib.envs._runtime.item_window import ItemWindow, exact_place
from atroposlib.envs._runtime.rollouts import RolloutMixin
from atroposlib.envs._runtime.worker_policy import QueueState, WorkerLimits, allowed_workers, workers_during_eval
from atroposlib.errors import EnvironmentFailure, RolloutFailure
from atroposlib.inference.server_baseline import APIServer
from atroposlib.type_definitions import Item

logger = logging.getLogger(__name__)


class WorkersMixin(RolloutMixin):
    """Keeps as many items in work as are wanted."""

    _wake: asyncio.Event | None = None
    _fatal: EnvironmentFailure | None = None
    _failures_in_a_row = 0
    _busy_when_asked = 0
    _items_made = 0
    """Calls of `get_next_item` since `setup` that gave an item, with `exact_resume`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.item_window = ItemWindow() if self.config.exact_resume else None
        self._items: dict[int, Item] = {}

    @property
    def derived_batch_size(self) -> int:
        """Sequences per batch that this environment may fill: what is not reserved, and its own reserve."""
        if not self.status_dict or self.config.batch_size <= 0:
            return self.config.batch_size
        share = self.status_dict.get("unallocated_fraction", 1.0) + (self.config.min_batch_allocation or 0.0)
        return int(self.config.batch_size * min(1.0, share))

    def workers_wanted(self) -> int:
        """How many items may be in work now."""
        config, status = self.config, self.status_dict
        allowed = allowed_workers(
            WorkerLimits(
                max_workers=self.max_num_workers,
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
        if self.eval_runner is not None and not self.eval_runner.done():
            return workers_during_eval(allowed, config.eval_handling, config.eval_limit_ratio)
        return allowed

    async def add_train_workers(self) -> None:
        """Start workers up to the number allowed: the backlog first, then new items."""
        # A worker that has posted since the service was asked is in neither number: with it, a batch would be exceeded.
        missing = self.workers_wanted() - max(len(self.workers), self._busy_when_asked)
        self.workers_added_list.append(max(0, missing))
        for _ in range(missing):
            number, item = await self._next_of_stream()
            if item is None:
                return
            item_id = str(uuid.uuid4())
            place = None
            if self.item_window is not None:
                self.item_window.begin(number)
                place = number, self.item_window.life
            worker = asyncio.create_task(self.handle_env(item_id), name=f"rollout {item_id}")
            self.running_items[item_id] = {
                **{"item": item, "worker": worker, "start_time": time.monotonic(), "collected": False, "place": place}
            }
            self.workers.add(worker)
            worker.add_done_callback(self._worker_done(item))

    def _worker_done(self, item: Any) -> Callable[[asyncio.Task[Any]], None]:
        def done(task: asyncio.Task[Any]) -> None:
            self.workers.discard(task)
            if task.cancelled():
                return
            if (error := task.exception()) is not None:
                self._fatal = (
                    error if isinstance(error, EnvironmentFailure) else EnvironmentFailure(f"a worker died: {error!r}")
                )
            elif task.result():
                self.last_completed_item = item
            self._wake_up()

        return done

    def _wake_up(self) -> None:
        if self._wake is not None:
            self._wake.set()

    async def handle_env(self, item_uuid: str) -> Any:
        """One item from start to end. Returns its groups, or None when there are none.

        Raises:
            EnvironmentFailure: something that only a person can mend; what is wrong with one item ends that item only.
        """
        running = self.running_items[item_uuid]
        item, started = running["item"], time.monotonic()
        groups, done = None, False
        exact_place.set(running.get("place"))
        try:
            groups, _ = await self.work_on(item, collected=lambda: running.update(collected=True))
            self._failures_in_a_row, done = 0, True
        except RolloutFailure as failure:
            self._failures_in_a_row += 1
            logger.error("an item was given up: %s (%d in a row)", failure, self._failures_in_a_row)
        finally:
            # One that was put back is no longer its item's worker.
            if self.running_items.pop(item_uuid, None) is not None and self.item_window is not None:
                self.item_window.finish(running["place"][0], done)
        duration = time.monotonic() - started
        self.task_duration.append(duration)
        self.task_successful.append(int(groups is not None))
        (self.succeeded_task_duration if groups is not None else self.failed_task_duration).append(duration)
        return groups

    def _put_back(self, item_id: str) -> None:
        """Stop an item's worker; the item is worked on anew later."""
        running = self.running_items.pop(item_id)
        running["worker"].cancel()
        self.workers.discard(running["worker"])
        if self.item_window is None:
            self.backlog.append(running["item"])
        else:
            self.item_window.finish(running["place"][0], done=False)

    def _check_health(self) -> None:
        """End on what a retry cannot mend."""
        if self._fatal is not None:
            raise self._fatal
        for server in self.server.servers:
            if isinstance(server, APIServer) and server.gate.failure is not None:
                raise server.gate.failure
        limit = self.config.max_consecutive_failures
        if 0 < limit <= self._failures_in_a_row:
            raise EnvironmentFailure(
                f"the last {self._failures_in_a_row} items all failed ({self.drops}): see the tracebacks above, "
                "or raise --env.max_consecutive_failures"
            )

    # ---- which item comes next ------------------------------------------------------------------------------------------

    async def item_at(self, number: int) -> Item:
        """The item of that number, counted from 0, or None when there is none for now. With `exact_resume` only.

        By default they are what `get_next_item` gives after `setup`, which runs again for a number that lies behind. An
        environment that can jump to an item overrides this.
        """
        if number < self._items_made:
            await self.setup()
            self._items_made = 0
        item = None
        while self._items_made <= number:
            if (item := await self.get_next_item()) is None:
                return None
            self._items_made += 1
        return item

    async def _next_of_stream(self) -> tuple[int, Item]:
        """The item to begin now, and its number; None in place of an item when there is none for now."""
        window = self.item_window
        if window is None:
            return -1, self.backlog.pop() if self.backlog else await self.get_next_item()
        while True:
            number = window.next_number()
            if number not in self._items:
                self._items[number] = await self.item_at(number)
            if number == window.next_number():  # else a lower one has failed meanwhile
                item = self._items[number]
                if item is None:
                    del self._items[number]
                return number, item

    def _heed_position(self, status: Mapping[str, Any]) -> None:
        """With `exact_resume`, go where the service says that the stream of items stands.

        Raises:
            EnvironmentFailure: the run cannot be resumed exactly.
        """
        window = self.item_window
        if window is None:
            return
        if status.get("max_staleness") != 0:
            raise EnvironmentFailure(
                f"--env.exact_resume needs a trainer that takes no older rollouts, and this one's max_staleness is "
                f"{status.get('max_staleness')}: start it with --max-staleness 0 or --deterministic"
            )
        if "stream" not in status:
            raise EnvironmentFailure(
                f"--env.exact_resume: the rollout service at {self.config.rollout_server_url} keeps no positions of items; "
                "start the one of this version, or leave the flag out"
            )
        if window.heed(status["stream"]):
            for item_id in list(self.running_items):
                self._put_back(item_id)
            logger.debug("the stream of items stands at item %d, %d settled", window.first, len(status["stream"]["settled"]))
        self._items = {number: item for number, item in self._items.items() if number >= window.first}
