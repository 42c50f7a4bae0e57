"""From an item to a group at the rollout service: collect, retry, check, count, send."""

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

from atroposlib.envs._runtime.item_window import ItemWindow, exact_place
from atroposlib.envs._runtime.service_client import RejectedByService
from atroposlib.envs._runtime.teaching import TeachingMixin
from atroposlib.errors import EnvironmentFailure, RolloutFailure
from atroposlib.groups import group_from_items, teaches_nothing, without_empty_fields, wrong_shape
from atroposlib.inference.generation import VersionRecord, current_versions, weight_fields
from atroposlib.inference.server_baseline import APIServer
from atroposlib.inference.teacher_server import TeacherRefused
from atroposlib.type_definitions import Item
from atroposlib.utils.jsonl import encode, unencodable_fields
from atroposlib.utils.waiting import gather_or_cancel

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAST_WAIT = 0.05
CLEAN_UP_SECONDS = 5.0
"""For an item that is cut off, or whose worker is."""

_item_number: ContextVar[int] = ContextVar("item_number")
"""Of the item that the present task works on, in the order in which they were begun."""


class RolloutMixin(TeachingMixin):
    """One item's way to the service. An error on the way is retried, counted and reported; it never becomes a score."""

    item_window: ItemWindow | None = None
    """With `exact_resume`, the items from which the next batch is made."""

    @property
    def _stream(self) -> str:
        """What the service calls the order of items that this environment serves."""
        return f"{self._label} seed {self.config.seed}"

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        """`group_size` responses to an item, each by `collect_trajectory`, as a group; and items for the backlog.

        A response that fails is tried again by itself, so that the others need not be made twice. Override this to make all
        responses with one request.

        Raises:
            RolloutFailure: a response failed every time, or was given up by the environment (None).
        """
        results = await gather_or_cancel(
            [self._retried("collect_trajectory", lambda: self.collect_trajectory(item)) for _ in range(self.config.group_size)]
        )
        backlog = [entry for _, items in results for entry in items or []]
        trajectories = [trajectory for trajectory, _ in results]
        if any(trajectory is None for trajectory in trajectories):
            self.drops.add("trajectory_is_none")
            return None, backlog
        if wrong := [type(t).__name__ for t in trajectories if not isinstance(t, dict)]:
            raise TypeError(f"collect_trajectory must return a ScoredDataItem, not {wrong[0]}")
        return group_from_items(trajectories), backlog

    def sampling_seed(self, request: int = 0) -> int | None:
        """The `seed` of a request for the item in work; None, which leaves it to the server, without `seed_rollouts`.

        Args:
            request: its number among the item's requests. One request for several responses has a seed for each: the
                server counts on from this one.

        Raises:
            RuntimeError: no item is in work here, as in an evaluation.
        """
        if not (self.config.seed_rollouts or self.config.exact_resume):
            return None
        number = _item_number.get(None)
        if number is None:
            raise RuntimeError("sampling_seed() is of the item in work: call it in collect_trajectories or what that calls")
        what = f"{self.config.seed} {number} {request}"
        return int.from_bytes(hashlib.sha256(what.encode()).digest()[:6], "big")

    async def _retried(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Run it, and again up to `rollout_retries` times when it raises.

        Raises:
            RolloutFailure: it raised every time; each traceback is in the log.
        """
        attempts = self.config.rollout_retries + 1
        for attempt in range(1, attempts + 1):
            try:
                return await call()
            except (EnvironmentFailure, RolloutFailure, NotImplementedError):
                raise
            except Exception as error:
                self.drops.add("errors_retried" if attempt < attempts else "errors")
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
        known = exact_place.get()
        numbered = _item_number.set(self.items_begun if known is None else known[0])
        self.items_begun += 1
        try:
            groups, backlog = await self._retried("collect_trajectories", lambda: self.collect_trajectories(item))
            if backlog and known is not None:
                raise EnvironmentFailure(
                    f"{type(self).__name__} gives items for the backlog, which have no place in the order of its items: run it "
                    "without --env.exact_resume"
                )
            self.backlog.extend(backlog or [])
            if not groups:
                return None
            groups = await self._retried("postprocess_histories", lambda: self.postprocess_histories(groups))
        finally:
            current_versions.reset(token)
            _item_number.reset(numbered)
        for group in groups if isinstance(groups, list) else [groups]:
            if group:
                self._note_sampling(group, record)
        return groups or None

    async def work_on(self, item: Item, collected: Callable[[], None] = lambda: None, send: bool = True) -> tuple[Any, int]:
        """One item from start to end.

        Args:
            item: what to work on.
            collected: called when its groups are there, and only the service is asked from then on.
            send: post the groups; otherwise they are checked and kept only, however long they are.

        Returns:
            Its groups as the environment made them (None for none), and how many of them passed the checks.

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
                how = {} if send else {"do_send_to_api": False, "abort_on_any_max_length_exceeded": False}
                kept = await self.handle_send_to_api(groups, item, **how)
            finally:
                await self.cleanup()
        except (EnvironmentFailure, RolloutFailure):
            raise
        except Exception as error:
            self.drops.add("errors")
            logger.exception("an item's groups could not be handed on: %.200r", item)
            raise RolloutFailure(f"{type(error).__name__}: {error}") from error
        if kept is None:  # an override that does not say takes all
            kept = sum(group is not None for group in groups) if isinstance(groups, list) else 1
        return groups, kept

    async def roll_out_in_time(self, item: Item) -> Any:
        """`roll_out`, cut off after `worker_timeout` seconds; those in which an inference server was away do not count.

        Raises:
            RolloutFailure: it was cut off, or failed by itself.
        """
        seconds = self.config.worker_timeout
        if seconds <= 0:
            return await self.roll_out(item)
        work = asyncio.ensure_future(self.roll_out(item))
        started, away = time.monotonic(), self._seconds_away()
        try:
            while (left := seconds - (time.monotonic() - started) + (self._seconds_away() - away)) > 0:
                done, _ = await asyncio.wait({work}, timeout=max(left, LEAST_WAIT))
                if done:
                    return work.result()
        finally:
            await stopped(work)
        logger.warning("an item was cut off after %.0f s (--env.worker_timeout): %.200r", time.monotonic() - started, item)
        self.drops.add("timeout")
        raise RolloutFailure(f"it took longer than {seconds:g} s (--env.worker_timeout)")

    def _seconds_away(self) -> float:
        """For how long no inference server could be asked."""
        gates = {server.gate for server in self.server.servers if isinstance(server, APIServer)}
        return sum(gate.seconds_away for gate in gates)

    @staticmethod
    def _note_sampling(group: Any, record: VersionRecord) -> None:
        """What the environment itself does not say of how its sequences were sampled. Of their weights: the oldest that its
        rollout met."""
        rows, masks, oldest = group.get("tokens"), group.get("masks"), record.oldest_weights
        if rows is not None and masks is not None and len(rows) == len(masks) and record.sampled is not None:
            told = record.sampled.fields_of(rows, masks)
            group.update({name: filled(group.get(name), values) for name, values in told.items()})
            unknown = any(entry is None for entry in group.get("sampling_params") or [None])
            if unknown and record.sampled.differ:
                say_that_sampling_differs()
        if oldest is None:
            return
        count = 0 if rows is None else len(rows)
        if group.get("weight_versions") is None:
            group.update(weight_fields([oldest] * count))
        elif group.get("weight_epochs") is None and oldest.epoch:
            # Versions without epochs, as environments give them that know of none: an older epoch never makes an item younger.
            group["weight_epochs"] = [oldest.epoch] * count

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> int:
        """Check groups, keep them in the groups file, and post them. Returns how many passed the check.

        Args:
            scored_data: a group, or a list of groups of which some may be None.
            item: what they answer, for logging.
            do_send_to_api: False to keep them only.
            abort_on_any_max_length_exceeded: drop groups with a sequence longer than the trainer takes.

        Raises:
            RolloutFailure: the teacher refused all that there was.
            EnvironmentFailure: the teacher or the service was away for too long.
        """
        groups = scored_data if isinstance(scored_data, list) else [scored_data]
        accepted: list[Any] = []
        refused: TeacherRefused | None = None
        for group in groups:
            if group is None:
                continue
            group = without_empty_fields(group)
            if reason := self._reason_to_drop(group, abort_on_any_max_length_exceeded):
                self.drops.add(reason)
                continue
            try:
                await self.have_scored(group)
            except TeacherRefused as refusal:
                self.drops.add("teacher_refused")
                logger.error("a group was dropped: %s", refusal)
                refused = refusal
                continue
            self.note_lengths(group)
            if self.config.include_messages and group.get("messages") is None:
                texts = [self.tokenizer.decode(tokens) for tokens in group["tokens"]]
                group["messages"] = [[{"role": "user", "content": text}] for text in texts]
            await self.add_rollouts_for_wandb(group, item)
            if self.jsonl_writer is not None:
                self._keep(group, needed=not do_send_to_api)
            accepted.append(group)
        if refused is not None and not accepted:
            raise refused
        if accepted and do_send_to_api:
            await self._send_scored_data_to_api(accepted if isinstance(scored_data, list) else accepted[0])
        return len(accepted)

    def _keep(self, group: Any, needed: bool) -> None:
        """Write a group to the groups file. Unless the file is all that is wanted, a full disk does not lose the group."""
        assert self.jsonl_writer is not None
        try:
            self.jsonl_writer.write(group)
        except EnvironmentFailure as failure:
            if needed:
                raise
            logger.error("a group is posted but not kept: %s", failure)

    def _reason_to_drop(self, group: Mapping[str, Any], abort_when_too_long: bool) -> str | None:
        overrides = group.get("group_overrides") or {}
        if wrong := wrong_shape(group, overrides.get("group_size", self.config.group_size)):
            logger.error("a group was dropped: %s", wrong)
            return "malformed"
        try:
            encode(group)
        except TypeError:
            logger.error("a group was dropped: %s", "; ".join(f"{k!r}: {why}" for k, why in unencodable_fields(group).items()))
            return "malformed"
        # One response alone (group_size 1) is always "all equal", yet methods without groups train on it; and where the scores
        # say nothing a teacher still does.
        taught = self.teacher is not None or group.get("distill_logprobs") is not None
        must_differ = self.config.ensure_scores_are_not_same and len(group["scores"]) > 1 and not taught
        if must_differ and teaches_nothing(group):
            return "equal_scores"
        longest = max(len(tokens) for tokens in group["tokens"])
        if abort_when_too_long and 0 < self.max_token_len <= longest:
            logger.warning(
                "a group was dropped: a sequence of %d tokens, the trainer takes less than %d", longest, self.max_token_len
            )
            return "too_long"
        return None

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        """Post one group or a list of groups; waits and retries while the service is away or full."""
        groups = scored_data if isinstance(scored_data, list) else [scored_data]
        place = exact_place.get()
        if place is not None and len(groups) > 1:
            raise EnvironmentFailure(
                f"{type(self).__name__} gives {len(groups)} groups for one item: run it without --env.exact_resume, or one each"
            )
        for group in groups:
            group["env_id"] = self.env_id
            if place is not None:
                group["stream"], (group["stream_item"], group["stream_life"]) = self._stream, place
            # The same key on every retry: a post whose answer was lost is not counted twice.
            group.setdefault("idempotency_key", uuid.uuid4().hex)
        path = "/scored_data_list" if isinstance(scored_data, list) else "/scored_data"
        try:
            answer = await self.service.post(path, scored_data)
        except RejectedByService as rejection:
            self.drops.add("rejected_by_service", len(groups))
            logger.error("the rollout service refused %d group(s): %s", len(groups), rejection)
            return
        dropped = 1 if answer.get("status") == "dropped" else int(answer.get("dropped") or 0)
        if dropped:
            if place is not None and self.item_window is not None:
                self.item_window.refuse(place[0])
            self.drops.add("dropped_by_service", dropped)
            logger.warning("the rollout service dropped %d of %d group(s): %s", dropped, len(groups), answer.get("reason"))
        self.items_sent_this_step += len(groups) - dropped
        self.groups_sent += len(groups) - dropped


def filled(own: Any, told: list[Any]) -> Any:
    """What an environment says of its sequences, with what else is known of those of which it says nothing."""
    if own is None:
        return told
    if not isinstance(own, list) or len(own) != len(told):
        return own
    return [known if said is None else said for said, known in zip(own, told, strict=True)]


@cache
def say_that_sampling_differs() -> None:
    """Once for each process."""
    logger.warning(
        "a rollout's requests were sampled with different parameters, and its group does not say of every sequence with which: "
        "the trainer takes its --temperature for the others. Give the group sequence_fields(nodes), or sampling_params of "
        "your own. This is said once"
    )


async def stopped(task: asyncio.Future[Any]) -> None:
    """Cancel a task and let it clean up, but not for ever: code that swallows its cancellation must not hold up others."""
    if task.done():
        return
    task.cancel()
    await asyncio.wait({task}, timeout=CLEAN_UP_SECONDS)
    if not task.done():
        logger.warning("a rollout that was cut off goes on after %g s: its code ignores the cancellation", CLEAN_UP_SECONDS)
    elif not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("a rollout that was cut off ended with %r", error)
