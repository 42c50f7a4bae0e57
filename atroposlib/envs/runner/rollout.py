"""From an item to its groups: collect, retry, cut off in time, and note how it was sampled."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

from atroposlib.envs.runner.connections import Connections
from atroposlib.envs.runner.exact_resume import current_item
from atroposlib.envs.runner.state import Author, RunState, as_list
from atroposlib.errors import EnvironmentFailure, NoRoom, RolloutFailure
from atroposlib.inference.client import APIServer
from atroposlib.inference.generation import VersionRecord, current_versions, weight_fields
from atroposlib.type_definitions import Item
from atroposlib.utils.waiting import gather_or_cancel
from atroposlib.wire import group_from_items

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_WAIT = 0.05
CLEAN_UP_SECONDS = 5.0
"""For an item that is cut off, or whose worker is."""

_item_number: ContextVar[int] = ContextVar("item_number")
"""Number of the item that the present task works on, in the order in which items were begun."""


class Rollouts:
    """Works on items.

    An error on the way is retried, counted and reported; it never becomes a score.
    """

    def __init__(self, state: RunState, connections: Connections, author: Author):
        self.state, self.connections, self.author = state, connections, author
        self.begun = 0
        """Items that were begun."""

    async def collect_one_by_one(self, item: Item) -> tuple[Any, list[Item]]:
        """`group_size` responses to an item, each by the environment's `collect_trajectory`."""
        results = await gather_or_cancel(
            [
                self.retried("collect_trajectory", lambda: self.author.collect_trajectory(item))
                for _ in range(self.state.config.group_size)
            ]
        )
        backlog = [entry for _, items in results for entry in items or []]
        trajectories = [trajectory for trajectory, _ in results]
        if any(trajectory is None for trajectory in trajectories):
            self.state.drops.add("trajectory_is_none")
            return None, backlog
        if wrong := [type(t).__name__ for t in trajectories if not isinstance(t, dict)]:
            raise TypeError(f"collect_trajectory must return a ScoredDataItem, not {wrong[0]}")
        return group_from_items(trajectories), backlog

    def seed(self, request: int = 0) -> int | None:
        """See `BaseEnv.sampling_seed`."""
        if not (self.state.config.seed_rollouts or self.state.config.exact_resume):
            return None
        number = _item_number.get(None)
        if number is None:
            raise RuntimeError(
                "sampling_seed() is of the item in work: call it in collect_trajectories or what that calls"
            )
        what = f"{self.state.config.seed} {number} {request}"
        return int.from_bytes(hashlib.sha256(what.encode()).digest()[:6], "big")

    async def retried(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """See `BaseEnv.retried`."""
        attempts = self.state.config.rollout_retries + 1
        for attempt in range(1, attempts + 1):
            try:
                return await call()
            except (EnvironmentFailure, RolloutFailure, NotImplementedError):
                raise
            except Exception as error:
                self.state.drops.add("errors_retried" if attempt < attempts else "errors")
                logger.exception("%s failed, attempt %d of %d", what, attempt, attempts)
                if attempt == attempts:
                    raise RolloutFailure(f"{what}: {type(error).__name__}: {error}") from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def roll_out(self, item: Item) -> Any:
        """Collect and postprocess one item's groups; items for the backlog are put there.

        Returns:
            A group, a list of groups, or None when the environment dropped the item.
        """
        record = VersionRecord()
        token = current_versions.set(record)
        position, number = current_item.get(), self.begun
        if position is not None:
            number = position.number
        numbered = _item_number.set(number)
        self.begun += 1
        try:
            groups, backlog = await self.retried(
                "collect_trajectories", lambda: self.author.collect_trajectories(item)
            )
            if backlog and position is not None:
                raise EnvironmentFailure(
                    f"{type(self.author).__name__} gives items for the backlog, which have no place in the order of its items: "
                    "run it without --env.exact_resume"
                )
            self.state.backlog.extend(backlog or [])
            if not groups:
                return None
            groups = await self.retried(
                "postprocess_histories", lambda: self.author.postprocess_histories(groups)
            )
        finally:
            current_versions.reset(token)
            _item_number.reset(numbered)
        for group in as_list(groups):
            if group:
                note_sampling(group, record)
        return groups or None

    async def work_on(
        self, item: Item, collected: Callable[[], None] = lambda: None, send: bool = True
    ) -> tuple[Any, int]:
        """One item from start to end.

        Args:
            item: what to work on.
            collected: called when its groups are there, and only the service is asked from then on.
            send: post the groups; otherwise they are checked and kept only, however long they are.

        Returns:
            Its groups as the environment made them (None for none), and how many of them passed the
            checks.

        Raises:
            RolloutFailure: it gave nothing. Whatever is wrong with one item ends that item only.
            EnvironmentFailure: something that only a person can mend.
        """
        try:
            try:
                groups = await self.roll_out_in_time(item)
                collected()
                if groups is None:
                    return None, 0
                how: dict[str, Any] = {}
                if not send:
                    how = {"do_send_to_api": False, "abort_on_any_max_length_exceeded": False}
                kept = await self.author.handle_send_to_api(groups, item, **how)
            finally:
                await self.author.cleanup()
        except (EnvironmentFailure, RolloutFailure) as failure:
            if isinstance(failure, NoRoom):
                self.state.drops.add("no_room")
            raise
        except Exception as error:
            self.state.drops.add("errors")
            logger.exception("an item's groups could not be handed on: %.200r", item)
            raise RolloutFailure(f"{type(error).__name__}: {error}") from error
        if kept is None:  # an override that does not say takes all
            kept = sum(group is not None for group in as_list(groups))
        return groups, kept

    async def roll_out_in_time(self, item: Item) -> Any:
        """`roll_out`, cut off after `worker_timeout` seconds; those in which an inference server or
        a judge was away do not count.

        Raises:
            RolloutFailure: it was cut off, or failed by itself.
        """
        seconds = self.state.config.worker_timeout
        if seconds <= 0:
            return await self.roll_out(item)
        work = asyncio.ensure_future(self.roll_out(item))
        started, away = time.monotonic(), self._seconds_away()
        try:
            while (
                left := seconds - (time.monotonic() - started) + (self._seconds_away() - away)
            ) > 0:
                done, _ = await asyncio.wait({work}, timeout=max(left, MIN_WAIT))
                if done:
                    return work.result()
        finally:
            await stopped(work)
        logger.warning(
            "an item was cut off after %.0f s (--env.worker_timeout): %.200r",
            time.monotonic() - started,
            item,
        )
        self.state.drops.add("timeout")
        raise RolloutFailure(f"it took longer than {seconds:g} s (--env.worker_timeout)")

    def _seconds_away(self) -> float:
        """For how long no inference server could be asked, or one of another role that rollouts
        ask.
        """
        manager = self.connections.server
        pools = {
            server.pool
            for server in [*manager.servers, *manager.beside]
            if isinstance(server, APIServer)
        }
        return sum(pool.seconds_away for pool in pools)


def note_sampling(group: Any, record: VersionRecord) -> None:
    """Add to a group how its sequences were sampled, where the environment has not.

    Their weight version is the oldest that the rollout met."""
    rows, masks, oldest = group.get("tokens"), group.get("masks"), record.oldest_weights
    if (
        rows is not None
        and masks is not None
        and len(rows) == len(masks)
        and record.sampled is not None
    ):
        recorded = record.sampled.fields_of(rows, masks)
        group.update({name: filled(group.get(name), values) for name, values in recorded.items()})
        unknown = any(entry is None for entry in group.get("sampling_params") or [None])
        if unknown and record.sampled.differ:
            say_that_sampling_differs()
    if oldest is None:
        return
    count = len(rows or ())
    if group.get("weight_versions") is None:
        group.update(weight_fields([oldest] * count))
    elif group.get("weight_epochs") is None and oldest.epoch:
        # Versions without epochs, as environments give them that know of none: an older epoch never
        # makes an item younger.
        group["weight_epochs"] = [oldest.epoch] * count


def filled(own: Any, recorded: list[Any]) -> Any:
    """Return an environment's values for its sequences, with recorded ones in place of None."""
    if own is None:
        return recorded
    if not isinstance(own, list) or len(own) != len(recorded):
        return own
    return [
        recorded_value if own_value is None else own_value
        for own_value, recorded_value in zip(own, recorded, strict=True)
    ]


@cache
def say_that_sampling_differs() -> None:
    """Once for each process."""
    logger.warning(
        "a rollout's requests were sampled with different parameters, and its group does not say of every sequence with which: "
        "the trainer takes its --temperature for the others. Give the group sequence_fields(nodes), or sampling_params of "
        "your own. This is said once"
    )


async def stopped(task: asyncio.Future[Any]) -> None:
    """Cancel a task and let it clean up, but not for ever: code that swallows its cancellation must
    not hold up others.
    """
    if task.done():
        return
    task.cancel()
    await asyncio.wait({task}, timeout=CLEAN_UP_SECONDS)
    if not task.done():
        logger.warning(
            "a rollout that was cut off goes on after %g s: its code ignores the cancellation",
            CLEAN_UP_SECONDS,
        )
    elif not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("a rollout that was cut off ended with %r", error)
