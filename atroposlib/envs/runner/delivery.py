"""From a group to the rollout service: check, have the teacher score, keep, post."""

import logging
import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

from atroposlib.envs.runner.connections import Connections
from atroposlib.envs.runner.exact_resume import current_item
from atroposlib.envs.runner.state import Author, RunState, as_list
from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.inference.teacher_client import TeacherRefused
from atroposlib.service_client import RejectedByService
from atroposlib.type_definitions import Item
from atroposlib.utils.jsonl import encode, unencodable_fields
from atroposlib.utils.waiting import gather_or_cancel
from atroposlib.wire import (
    PROMPT_MASK,
    response_lengths,
    teaches_nothing,
    with_plain_numbers,
    without_empty_fields,
    wrong_shape,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Teaching:
    """The teacher of `--env.teacher_url`. Without one, none of this does anything."""

    def __init__(self, state: RunState, connections: Connections):
        self.state, self.connections = state, connections
        self.kl_sum = 0.0
        self.kl_tokens = 0

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

    def metrics(self) -> dict[str, float]:
        """`train/teacher_kl` (nats per token, estimated on the sampled tokens) since it was last
        asked for.
        """
        values: dict[str, float] = {}
        if self.kl_tokens:
            values["train/teacher_kl"] = self.kl_sum / self.kl_tokens
        self.kl_sum, self.kl_tokens = 0.0, 0
        return values


def only_trained(values: list[T], trained: list[bool]) -> list[list[T]]:
    """Return a list for each token: its value if it is trained on, else nothing."""
    return [[value] if trains else [] for value, trains in zip(values, trained, strict=True)]


class Delivery:
    """Hands groups on. What is dropped is counted, by reason."""

    def __init__(self, state: RunState, connections: Connections, author: Author):
        self.state, self.connections, self.author = state, connections, author
        self.teaching = Teaching(state, connections)

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
                await self.teaching.teach(group)
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
                self._keep(group, needed=not post)
            accepted.append(group)
        if refused is not None and not accepted:
            raise refused
        if accepted and post:
            groups: Any = accepted
            if not isinstance(scored_data, list):
                groups = accepted[0]
            await self.author._send_scored_data_to_api(groups)
        return len(accepted)

    def _keep(self, group: Any, needed: bool) -> None:
        """Write a group to the groups file.

        Unless the file is all that is wanted, the group waits for space on a full disk.
        """
        assert self.state.jsonl_writer is not None
        if needed:
            self.state.jsonl_writer.write(group)
        else:
            self.state.jsonl_writer.write_later(group)

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
        # on it; and where the scores say nothing a teacher still does.
        taught = self.connections.teacher is not None or group.get("distill_logprobs") is not None
        must_differ = (
            self.state.config.ensure_scores_are_not_same and len(group["scores"]) > 1 and not taught
        )
        if must_differ and teaches_nothing(group):
            return "equal_scores"
        longest = max(len(tokens) for tokens in group["tokens"])
        if abort_when_too_long and 0 < self.state.max_token_len <= longest:
            logger.warning(
                "a group was dropped: a sequence of %d tokens, the trainer takes less than %d",
                longest,
                self.state.max_token_len,
            )
            return "too_long"
        return None

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
