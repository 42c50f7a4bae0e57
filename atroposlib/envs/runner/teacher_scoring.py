"""On-policy distillation: whatever environment made a group, a teacher's logprobs of its tokens go
along with it.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.inference.teacher_client import TeacherServer
from atroposlib.utils.waiting import gather_or_cancel
from atroposlib.web.keys import given_or_variable
from atroposlib.wire.groups import PROMPT_MASK

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

logger = logging.getLogger(__name__)


class Teaching:
    """The teacher of `--env.teacher_url`. Without one, none of this does anything."""

    def __init__(self, env: "BaseEnv"):
        self.env = env
        self._teacher: TeacherServer | None = None
        self.kl_sum = 0.0
        self.kl_tokens = 0

    @property
    def teacher(self) -> TeacherServer | None:
        """The connection to the teacher, made on first use; None if none is configured."""
        config = self.env.config
        if self._teacher is None and config.teacher_url:
            self._teacher = TeacherServer(
                config.teacher_url,
                config.teacher_model_name,
                given_or_variable(config.teacher_api_key, None),
                config.teacher_timeout,
                config.teacher_max_requests,
            )
        return self._teacher

    async def wait_for_teacher(self) -> None:
        """Wait until the teacher answers, if there is one, and see that its tokens are ours.

        Raises:
            EnvironmentFailure: it does not come, has another vocabulary, or does not score.
        """
        if self.teacher is not None:
            self.teacher.tokenizer = self.env._tokenizer or await asyncio.to_thread(
                lambda: self.env.tokenizer
            )
            await self.teacher.start()
            logger.info("teacher at %s: same vocabulary, it scores", self.teacher.root_url)

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
        if self.teacher is None or group.get("distill_logprobs") is not None:
            return
        if group.get("images"):
            raise UsageError(
                "--env.teacher_url: a group has images, and a teacher is sent token ids alone; leave it out"
            )
        rows = [[int(token) for token in row] for row in group["tokens"]]
        try:
            scored = await gather_or_cancel([self.teacher.score(row) for row in rows])
        except EnvironmentFailure:
            self.env.drops.add("teacher_away")
            logger.error(
                "a group of %d sequences cannot be sent: the teacher has not scored it", len(rows)
            )
            raise
        trained = [
            [mask != PROMPT_MASK and at > 0 for at, mask in enumerate(row)]
            for row in group["masks"]
        ]
        group["distill_token_ids"] = [
            [[token] if trains else [] for token, trains in zip(*row, strict=True)]
            for row in zip(rows, trained, strict=True)
        ]
        group["distill_logprobs"] = [
            [[logprob] if trains else [] for logprob, trains in zip(*row, strict=True)]
            for row in zip(scored, trained, strict=True)
        ]
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
        values = {"train/teacher_kl": self.kl_sum / self.kl_tokens} if self.kl_tokens else {}
        self.kl_sum, self.kl_tokens = 0.0, 0
        return values

    async def close(self) -> None:
        """Close the connection to the teacher."""
        teacher, self._teacher = self._teacher, None
        if teacher is not None:
            await teacher.close()
