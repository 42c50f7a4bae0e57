"""From a group to the rollout service: check, have the teacher score, keep, post."""

import logging
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atroposlib.envs.runner.exact_resume import current_item
from atroposlib.envs.runner.teacher_scoring import Teaching
from atroposlib.errors import EnvironmentFailure
from atroposlib.inference.teacher_client import TeacherRefused
from atroposlib.service_client import RejectedByService
from atroposlib.type_definitions import Item
from atroposlib.utils.jsonl import encode, unencodable_fields
from atroposlib.wire.groups import (
    response_lengths,
    teaches_nothing,
    with_plain_numbers,
    without_empty_fields,
    wrong_shape,
)

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

logger = logging.getLogger(__name__)


class Delivery:
    """Hands groups on. What is dropped is counted, by reason."""

    def __init__(self, env: "BaseEnv"):
        self.env = env
        self.teaching = Teaching(env)
        self.groups_sent = 0
        """Since metrics were logged."""

    async def deliver(
        self, scored_data: Any, item: Item, post: bool, abort_when_too_long: bool
    ) -> int:
        """Check groups, keep them in the groups file, and post them; see
        `BaseEnv.handle_send_to_api`.
        """
        groups = scored_data if isinstance(scored_data, list) else [scored_data]
        accepted: list[Any] = []
        refused: TeacherRefused | None = None
        for group in groups:
            if group is None:
                continue
            group = with_plain_numbers(without_empty_fields(group))
            if reason := self.reason_to_drop(group, abort_when_too_long):
                self.env.drops.add(reason)
                if (position := current_item.get()) is not None:
                    position.window.mark_without_group(
                        position.number, group.get("weight_versions") or ()
                    )
                continue
            try:
                await self.teaching.teach(group)
            except TeacherRefused as refusal:
                self.env.drops.add("teacher_refused")
                logger.error("a group was dropped: %s", refusal)
                refused = refusal
                continue
            self.env.completion_lengths.extend(response_lengths(group))
            if self.env.config.include_messages and group.get("messages") is None:
                texts = [self.env.tokenizer.decode(tokens) for tokens in group["tokens"]]
                group["messages"] = [[{"role": "user", "content": text}] for text in texts]
            await self.env.add_rollouts_for_wandb(group, item)
            if self.env.jsonl_writer is not None:
                self._keep(group, needed=not post)
            accepted.append(group)
        if refused is not None and not accepted:
            raise refused
        if accepted and post:
            await self.env._send_scored_data_to_api(
                accepted if isinstance(scored_data, list) else accepted[0]
            )
        return len(accepted)

    def _keep(self, group: Any, needed: bool) -> None:
        """Write a group to the groups file.

        Unless the file is all that is wanted, the group waits for space on a full disk.
        """
        assert self.env.jsonl_writer is not None
        if needed:
            self.env.jsonl_writer.write(group)
        else:
            self.env.jsonl_writer.write_later(group)

    def reason_to_drop(self, group: Mapping[str, Any], abort_when_too_long: bool) -> str | None:
        overrides = group.get("group_overrides") or {}
        if wrong := wrong_shape(group, overrides.get("group_size", self.env.config.group_size)):
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
        taught = self.teaching.teacher is not None or group.get("distill_logprobs") is not None
        must_differ = (
            self.env.config.ensure_scores_are_not_same and len(group["scores"]) > 1 and not taught
        )
        if must_differ and teaches_nothing(group):
            return "equal_scores"
        longest = max(len(tokens) for tokens in group["tokens"])
        if abort_when_too_long and 0 < self.env.max_token_len <= longest:
            logger.warning(
                "a group was dropped: a sequence of %d tokens, the trainer takes less than %d",
                longest,
                self.env.max_token_len,
            )
            return "too_long"
        return None

    async def post(self, scored_data: Any) -> None:
        """Post one group or a list of groups; waits and retries while the service is away or full."""
        groups = scored_data if isinstance(scored_data, list) else [scored_data]
        position = current_item.get()
        if position is not None and len(groups) > 1:
            raise EnvironmentFailure(
                f"{type(self.env).__name__} gives {len(groups)} groups for one item: run it without --env.exact_resume, "
                "or one each"
            )
        for group in groups:
            group["env_id"] = self.env.env_id
            if position is not None:
                group["stream"], (group["stream_item"], group["stream_life"]) = (
                    position.stream,
                    (position.number, position.life),
                )
            # The same key on every retry: a post whose answer was lost is not counted twice.
            group.setdefault("idempotency_key", uuid.uuid4().hex)
        path = "/scored_data_list" if isinstance(scored_data, list) else "/scored_data"
        try:
            answer = await self.env.service.post(path, scored_data)
        except RejectedByService as rejection:
            self.env.drops.add("rejected_by_service", len(groups))
            logger.error("the rollout service refused %d group(s): %s", len(groups), rejection)
            return
        dropped = 1 if answer.get("status") == "dropped" else int(answer.get("dropped") or 0)
        if dropped:
            if position is not None:
                position.window.refuse(position.number)
            self.env.drops.add("dropped_by_service", dropped)
            logger.warning(
                "the rollout service dropped %d of %d group(s): %s",
                dropped,
                len(groups),
                answer.get("reason"),
            )
        self.env.items_sent_this_step += len(groups) - dropped
        self.groups_sent += len(groups) - dropped
