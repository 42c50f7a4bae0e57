"""Items: which comes next, how many are in work, and the way of each to the rollout service.

- `Workers` keeps as many items in work as are allowed. Every group that is queued at the service or
  in work here will be trained on later than it was started. When at most `max_batches_offpolicy`
  batches are queued or in work, no group is older than that many optimizer steps when it is taken.
- `Rollouts` turns an item into groups: collect, retry, cut off in time, and note how it was
  sampled.
- `Delivery` checks a group, has the teacher score it, keeps it in a file, and posts it.
"""

import asyncio
import hashlib
import logging
import math
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.runner.exact_resume import ItemPosition, ResumeWindow, current_item
from atroposlib.envs.runner.state import Author, Connections, RunningItem, RunState, label_of
from atroposlib.errors import EnvironmentFailure, NoRoom, RolloutFailure, UsageError
from atroposlib.inference.client import APIServer
from atroposlib.inference.generation import VersionRecord, current_versions, weight_fields
from atroposlib.inference.teacher_client import TeacherRefused
from atroposlib.service_client import RejectedByService
from atroposlib.type_definitions import Item
from atroposlib.utils.jsonl import unencodable_fields
from atroposlib.utils.waiting import awaited, gather_or_cancel
from atroposlib.wire import (
    PROMPT_MASK,
    encode,
    group_from_items,
    response_lengths,
    teaches_nothing,
    with_plain_numbers,
    without_empty_fields,
    wrong_shape,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_WAIT = 0.05
CLEAN_UP_SECONDS = 5.0
"""For an item that is cut off, or whose worker is."""

_item_number: ContextVar[int] = ContextVar("item_number")
"""Number of the item that the present task works on, in the order in which items were begun."""


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and anything else as a list of one entry."""
    if isinstance(value, list):
        return value
    return [value]


async def take_item(state: RunState, author: Author) -> Item:
    """Return the item to begin now: of the backlog, else a new one."""
    if state.backlog:
        return state.backlog.pop()
    return await author.next_item()


class Rollouts:
    """Works on items.

    An error on the way is retried, counted and reported; it never becomes a score.
    """

    def __init__(self, state: RunState, connections: Connections, author: Author):
        self.state, self.connections, self.author = state, connections, author
        self.begun = 0
        """Items that were begun."""
        self._traced: set[tuple[type[Exception], str, int | None]] = set()
        """Errors whose traceback the log has, each with its place in the code."""

    async def collect_one_by_one(self, item: Item) -> tuple[Any, list[Item]]:
        """`group_size` responses to an item, each by the environment's `collect_trajectory`."""
        results = await gather_or_cancel(
            [
                self.collected("collect_trajectory", self.author.collect_trajectory, item)
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

    async def collected(
        self, method: str, call: Callable[[Item], Awaitable[Any]], item: Item
    ) -> tuple[Any, list[Item] | None]:
        """Return the result of an author's `collect_…` method, which is retried if it raises.

        Raises:
            UsageError: the result is not a pair.
        """
        pair = await self.retried(method, lambda: awaited(call(item), method, self.author))
        if not (isinstance(pair, tuple | list) and len(pair) == 2) or isinstance(
            pair[1], Mapping | str
        ):
            raise UsageError(
                f"{method} of {type(self.author).__name__} returned {pair!r:.80}: return a pair, "
                "the rollouts and a list of items for the backlog, such as `return group, []`"
            )
        return pair[0], pair[1]

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
                self._log_attempt(f"{what} failed, attempt {attempt} of {attempts}", error)
                if attempt == attempts:
                    raise RolloutFailure(f"{what}: {type(error).__name__}: {error}") from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _log_attempt(self, what: str, error: Exception) -> None:
        """Log a failure: with its traceback if it is the first one of its place in the code."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = (type(error), frame.filename, frame.lineno)
        is_new = place not in self._traced
        self._traced.add(place)
        where = "" if is_new else f" ({frame.filename}, line {frame.lineno}; traceback above)"
        line = f"{what}: {type(error).__name__}: {error}{where}"
        logger.error("%s", line, exc_info=error if is_new else None)

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
            groups, backlog = await self.collected(
                "collect_trajectories", self.author.collect_trajectories, item
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
        self, item: Item, running: RunningItem | None = None, send: bool = True
    ) -> tuple[Any, int]:
        """One item from start to end.

        Args:
            item: what to work on.
            running: its entry among the items in work, which is marked once its groups are there.
            send: post the groups; otherwise they are checked and kept only, however long they are.

        Returns:
            Its groups as the environment made them (None for none), and how many of them passed the
            checks.

        Raises:
            RolloutFailure: it gave nothing. A fault of one item ends that item only.
            EnvironmentFailure: something that only a person can mend.
        """
        try:
            try:
                groups = await self.roll_out_in_time(item)
                if running is not None:
                    running.collected = True
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
        if kept is None:  # an override without a count keeps all
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
        # A waiter that is cancelled at the end never reads the failure; asyncio would print it.
        work.add_done_callback(lambda one: one.cancelled() or one.exception())
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
    if record.routed and group.get("routed_experts") is None:
        say_that_experts_are_left_out()
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
        "a rollout's requests were sampled with different parameters, and its group lacks the "
        "parameters of some sequences: the trainer takes its --temperature for these. Give the "
        "group sequence_fields(nodes), or sampling_params of your own. This is logged once"
    )


@cache
def say_that_experts_are_left_out() -> None:
    """Log it once for each process."""
    logger.warning(
        "a group is posted without routed_experts, although a server answered with them. A "
        "trainer with --router-replay leaves it out. If the environment makes its groups by "
        "hand, give them sequence_fields(nodes). Logged once"
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


def only_trained(values: list[T], trained: list[bool]) -> list[list[T]]:
    """Return a list for each token: its value if it is trained on, else nothing."""
    return [[value] if trains else [] for value, trains in zip(values, trained, strict=True)]


class LengthDrops:
    """The groups that were dropped for their length since the last group that was not."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.fitted = False
        """A group of this run was not too long."""
        self._shortest = self._limit = 0

    def add(self, longest: int, limit: int) -> None:
        """Count a group, and log the 1st, 2nd, 4th, … in a row.

        Args:
            longest: tokens of its longest sequence.
            limit: tokens that the trainer takes at most, and one more.
        """
        self.in_a_row, self._limit = self.in_a_row + 1, limit
        self._shortest = min(self._shortest or longest, longest)
        if self.in_a_row.bit_count() == 1:
            logger.warning("%s", self.describe())

    def end(self) -> None:
        """Note a group that is not too long."""
        self.in_a_row, self._shortest, self.fitted = 0, 0, True

    def describe(self) -> str:
        """Return how many were dropped, with the limit and the remedy; empty for none."""
        if not self.in_a_row:
            return ""
        return (
            f"groups dropped in a row for their length: {self.in_a_row}. Each has a sequence of {self._shortest} "
            f"tokens or more, and the trainer takes fewer than {self._limit}: raise the trainer's --seq-len, or "
            "lower --env.max_token_length"
        )


class Delivery:
    """Hands groups on, and counts dropped ones by reason."""

    def __init__(self, state: RunState, connections: Connections, author: Author):
        self.state, self.connections, self.author = state, connections, author
        self.length_drops = LengthDrops()
        self.kl_sum = 0.0
        self.kl_tokens = 0

    async def deliver(
        self, scored_data: Any, item: Item, post: bool, abort_when_too_long: bool
    ) -> int:
        """Check groups, keep them in the groups file, and post them; see
        `BaseEnv.handle_send_to_api`.
        """
        accepted: list[Any] = []
        refused: TeacherRefused | None = None
        for group in as_list(scored_data):
            if group is None:
                continue
            group = with_plain_numbers(without_empty_fields(group))
            if reason := self.reason_to_drop(group, abort_when_too_long):
                self.state.drops.add(reason)
                if (position := current_item.get()) is not None:
                    position.window.mark_without_group(
                        position.number, group.get("weight_versions") or ()
                    )
                continue
            try:
                await self.teach(group)
            except TeacherRefused as refusal:
                self.state.drops.add("teacher_refused")
                logger.error("a group was dropped: %s", refusal)
                refused = refusal
                continue
            self.state.completion_lengths.extend(response_lengths(group))
            if self.state.config.include_messages and group.get("messages") is None:
                texts = [self.author.tokenizer.decode(tokens) for tokens in group["tokens"]]
                group["messages"] = [[{"role": "user", "content": text}] for text in texts]
            await self.author.add_rollouts_for_wandb(group, item)
            if self.state.jsonl_writer is not None:
                # Unless the file is all that is wanted, the group waits for space on a full disk.
                write = self.state.jsonl_writer.write
                if post:
                    write = self.state.jsonl_writer.write_later
                write(group)
            accepted.append(group)
        if refused is not None and not accepted:
            raise refused
        if accepted and post:
            groups: Any = accepted
            if not isinstance(scored_data, list):
                groups = accepted[0]
            await self.author._send_scored_data_to_api(groups)
        return len(accepted)

    def reason_to_drop(self, group: Mapping[str, Any], abort_when_too_long: bool) -> str | None:
        overrides = group.get("group_overrides") or {}
        if wrong := wrong_shape(group, overrides.get("group_size", self.state.config.group_size)):
            logger.error("a group was dropped: %s", wrong)
            return "malformed"
        try:
            encode(group)
        except TypeError:
            logger.error(
                "a group was dropped: %s",
                "; ".join(f"{k!r}: {why}" for k, why in unencodable_fields(group).items()),
            )
            return "malformed"
        # One response alone (group_size 1) is always "all equal", yet methods without groups train
        # on it; and a teacher teaches even where scores do not.
        taught = self.connections.teacher is not None or group.get("distill_logprobs") is not None
        must_differ = (
            self.state.config.ensure_scores_are_not_same and len(group["scores"]) > 1 and not taught
        )
        if must_differ and teaches_nothing(group):
            return "equal_scores"
        longest = max(len(tokens) for tokens in group["tokens"])
        if abort_when_too_long and 0 < self.state.max_token_len <= longest:
            self.length_drops.add(longest, self.state.max_token_len)
            return "too_long"
        self.length_drops.end()
        return None

    # ---- the teacher of `--env.teacher_url`; without one, none of this does anything

    async def teach(self, group: dict[str, Any]) -> None:
        """Fill in `distill_token_ids` and `distill_logprobs`: the trained token and its logprob
        where one is, else nothing.

        A group that has them already, of an environment with a teacher of its own, is left as it
        is.

        Raises:
            TeacherRefused: the teacher cannot score one of its sequences.
            EnvironmentFailure: the teacher was away for longer than `teacher_timeout`; the group is
                counted as dropped.
        """
        teacher = self.connections.teacher
        if teacher is None or group.get("distill_logprobs") is not None:
            return
        if group.get("images"):
            raise UsageError(
                "--env.teacher_url: a group has images, and a teacher is sent token ids alone; leave it out"
            )
        rows = [[int(token) for token in row] for row in group["tokens"]]
        try:
            scored = await gather_or_cancel([teacher.score(row) for row in rows])
        except EnvironmentFailure:
            self.state.drops.add("teacher_away")
            logger.error(
                "a group of %d sequences cannot be sent: the teacher has not scored it", len(rows)
            )
            raise
        trained = [
            [mask != PROMPT_MASK and at > 0 for at, mask in enumerate(row)]
            for row in group["masks"]
        ]
        group["distill_token_ids"] = [*map(only_trained, rows, trained)]
        group["distill_logprobs"] = [*map(only_trained, scored, trained)]
        self._note_divergence(group)

    def _note_divergence(self, group: Mapping[str, Any]) -> None:
        """Keep log π - log T of the sampled tokens, whose mean is the reverse KL, for the next
        metrics.
        """
        sampled = group.get("inference_logprobs")
        if sampled is None:
            return
        for logprobs, taught in zip(sampled, group["distill_logprobs"], strict=True):
            differences = [
                float(ours) - theirs[0]
                for ours, theirs in zip(logprobs, taught, strict=True)
                if theirs
            ]
            self.kl_sum += sum(differences)
            self.kl_tokens += len(differences)

    def teacher_metrics(self) -> dict[str, float]:
        """`train/teacher_kl` (nats per token, estimated on the sampled tokens) since it was last
        asked for.
        """
        values: dict[str, float] = {}
        if self.kl_tokens:
            values["train/teacher_kl"] = self.kl_sum / self.kl_tokens
        self.kl_sum, self.kl_tokens = 0.0, 0
        return values

    async def post(self, scored_data: Any) -> None:
        """Post one group or a list of groups; waits and retries while the service is away or full."""
        groups = as_list(scored_data)
        position = current_item.get()
        if position is not None and len(groups) > 1:
            raise EnvironmentFailure(
                f"{type(self.author).__name__} gives {len(groups)} groups for one item: run it without --env.exact_resume, "
                "or one each"
            )
        for group in groups:
            group["env_id"] = self.state.env_id
            if position is not None:
                group["stream"], (group["stream_item"], group["stream_life"]) = (
                    position.stream,
                    (position.number, position.life),
                )
            # The same key on every retry: a post whose answer was lost is not counted twice.
            group.setdefault("idempotency_key", uuid.uuid4().hex)
        path = "/scored_data"
        if isinstance(scored_data, list):
            path = "/scored_data_list"
        try:
            answer = await self.connections.service.post(path, scored_data)
        except RejectedByService as rejection:
            self.state.drops.add("rejected_by_service", len(groups))
            logger.error("the rollout service refused %d group(s): %s", len(groups), rejection)
            return
        dropped = int(answer.get("dropped") or answer.get("status") == "dropped")
        if dropped:
            if position is not None:
                position.window.refuse(position.number)
            self.state.drops.add("dropped_by_service", dropped)
            logger.warning(
                "the rollout service dropped %d of %d group(s): %s",
                dropped,
                len(groups),
                answer.get("reason"),
            )
        self.state.items_sent_this_step += len(groups) - dropped
        self.state.groups_sent += len(groups) - dropped


def allowed_workers(config: BaseEnvConfig, max_workers: int, status: Mapping[str, Any]) -> int:
    """Items that may be in work now, those already in work included.

    Args:
        config: the environment's settings. Its batch size is 0 or less when no trainer has registered.
        max_workers: most items in work, whatever the queue holds.
        status: the answer of `/status-env`, sizes in groups; empty before the first.

    >>> config = BaseEnvConfig(group_size=8, batch_size=64, max_batches_offpolicy=3)
    >>> allowed_workers(config, 64, {"queue_size": 0}), allowed_workers(config, 64, {"queue_size": 20})
    (24, 4)
    """
    if config.batch_size <= 0:
        return 0
    allowed: float = max_workers
    if config.max_batches_offpolicy >= 0:
        # On-policy (0) still needs the batch that the trainer waits for.
        size, most = config.group_size, max(1, config.max_batches_offpolicy) * config.batch_size
        reserve = config.min_batch_allocation or 0.0
        share = min(1.0, status.get("unallocated_fraction", 1.0) + reserve)
        allowed = math.ceil(most * share / size) - status.get("queue_size", 0)
        if config.min_batch_allocation is not None:
            # Other environments' groups may fill the queue; the reserved share is still ours to
            # fill.
            allowed = max(
                allowed, math.ceil(most * reserve / size) - status.get("self_queue_size", 0)
            )
    if status.get("groups_wanted") is not None:
        allowed = min(allowed, status["groups_wanted"])
    return max(0, min(max_workers, int(allowed)))


def workers_during_eval(allowed: int, handling: EvalHandlingEnum, ratio: float) -> int:
    """Return the number of workers that may train while an evaluation runs."""
    if handling is EvalHandlingEnum.STOP_TRAIN:
        return 0
    if handling is EvalHandlingEnum.LIMIT_TRAIN:
        return int(allowed * ratio)
    return allowed


TROUBLE_FROM = 8
"""Items in a row without a group after which the rollout service gets the reason."""


class Workers:
    """Keeps as many items in work as are allowed."""

    def __init__(
        self,
        state: RunState,
        connections: Connections,
        author: Author,
        rollouts: Rollouts,
        length_drops: LengthDrops,
    ):
        self.state, self.connections, self.author = state, connections, author
        self.rollouts, self.length_drops = rollouts, length_drops
        self.wake = asyncio.Event()
        """Set when a worker has finished."""
        self.fatal: EnvironmentFailure | None = None
        self.failures_in_a_row = 0
        self._last_failure = ""
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
        config = self.state.config
        allowed = allowed_workers(config, self.state.max_num_workers, self.state.status_dict)
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
            groups, _ = await self.rollouts.work_on(running.item, running)
            self.failures_in_a_row, done = 0, True
        except RolloutFailure as failure:
            self.failures_in_a_row += 1
            self._last_failure = str(failure)
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

    def trouble(self) -> str:
        """Return why the last items gave no group; empty if some did.

        A few such items are common, unless they are the first ones.
        """
        too_long, failed = self.length_drops, ""
        if too_long.fitted and max(too_long.in_a_row, self.failures_in_a_row) < TROUBLE_FROM:
            return ""
        if self.failures_in_a_row:
            failed = f"items that failed in a row: {self.failures_in_a_row}, the last one because: {self._last_failure}"
        return too_long.describe() or failed

    def check_health(self) -> None:
        """End on what a retry cannot mend."""
        if self.fatal is not None:
            raise self.fatal
        for server in self.connections.server.servers:
            if isinstance(server, APIServer) and server.pool.failure is not None:
                raise server.pool.failure
        limit, too_long = self.state.config.max_consecutive_failures, self.length_drops
        if 0 < limit <= too_long.in_a_row and not too_long.fitted:
            raise EnvironmentFailure(too_long.describe())
        if 0 < limit <= self.failures_in_a_row:
            raise EnvironmentFailure(
                f"the last {self.failures_in_a_row} items all failed ({self.state.drops}): see the errors above, "
                "or raise --env.max_consecutive_failures"
            )

    # ---- which item comes next
    # ------------------------------------------------------------------------------------------

    async def item_by_counting(self, number: int) -> Item:
        """See `BaseEnv.item_at`."""
        if number < self._items_made:
            await awaited(self.author.setup(), "setup", self.author)
            self._items_made = 0
        item = None
        while self._items_made <= number:
            item = await awaited(self.author.get_next_item(), "get_next_item", self.author)
            if item is None:
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
            if number == window.next_number():  # else a lower one has failed since
                item = self._items[number]
                if item is None:
                    del self._items[number]
                return number, item

    def heed_position(self, status: Mapping[str, Any]) -> None:
        """With `exact_resume`, go to the service's position in the stream of items.

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
                "keeps no positions of items; start a service of this version, or omit the flag"
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
