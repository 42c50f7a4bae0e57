"""`TeacherDistillationEnv`: an environment with a teacher of its own, as environments written for
Atropos derive from it.

Its teacher gives the logprobs of its likeliest tokens at every position, prompts included.
`--env.teacher_url` needs no class and works for any environment. It sends less: only the logprobs
of sampled tokens.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.runner.items import as_list
from atroposlib.errors import UsageError
from atroposlib.inference.chat_template import first_difference, load_tokenizer
from atroposlib.inference.client import MODEL_NOT_NAMED, APIServerConfig, ServerBaseline
from atroposlib.inference.server_manager import ServerManager

logger = logging.getLogger(__name__)

Servers = ServerBaseline | APIServerConfig | list[APIServerConfig]


class TeacherDistillationConfig(BaseEnvConfig):
    """The settings of an environment with a teacher of its own."""

    teacher_enabled: bool = Field(
        default=False, description="Ask the teacher of --teacher.* for logprobs of every group"
    )
    teacher_top_k: int = Field(
        default=0,
        ge=-1,
        description="Likeliest tokens to ask for at each position beside the token itself; -1: do not ask",
    )


class TeacherDistillationEnv(BaseEnv, ABC):
    """Fills in `distill_token_ids` and `distill_logprobs`, [sequence][position][k], before a group
    is sent.

    Position t holds the teacher's logprobs of tokens that may stand at t, the token that stands
    there first; the first position holds none. A group's `group_overrides` may do without them
    (`skip_teacher_top_k`) or set another `teacher_top_k`. A group that the teacher does
    not score is sent without, which is logged.

    Args:
        config: the environment's settings.
        server_configs: the inference servers.
        teacher_server_configs: the teacher's. The command line merges `teacher_config_init`, YAML
            (`teacher:`) and flags (`--teacher.*`).
    """

    env_config_cls = TeacherDistillationConfig
    teacher_namespace = "teacher"

    def __init__(
        self,
        config: BaseEnvConfig,
        server_configs: Servers,
        teacher_server_configs: Servers | None = None,
        slurm: bool = False,
        testing: bool = False,
    ):
        if isinstance(teacher_server_configs, bool):
            # A class between, which knows nothing of teachers, passes (config, servers, slurm,
            # testing) on by place.
            teacher_server_configs, slurm, testing = None, teacher_server_configs, slurm
        super().__init__(config, server_configs, slurm=slurm, testing=testing)
        self.teacher_server: ServerManager | None = None
        self._comparing: asyncio.Task[None] | None = None
        if teacher_server_configs is not None:
            self.take_servers({self.teacher_namespace: teacher_server_configs})

    @classmethod
    def teacher_config_init(cls) -> Servers | None:
        """The teacher's own defaults; YAML and flags come on top."""
        return None

    def take_servers(self, servers: Mapping[str, Servers]) -> None:
        """Use the teacher that YAML and flags name, if one is wanted."""
        configs = servers.get(self.teacher_namespace)
        if configs is not None and self.config.teacher_enabled:
            if isinstance(configs, APIServerConfig):
                configs = [configs]
            self.teacher_server = ServerManager(configs)
            self._runner.connections.more_servers.append(self.teacher_server)

    async def _compared(self) -> None:
        """Once: wait until the teacher answers, and see that its tokens are ours.

        Raises:
            UsageError: there is none, or it has another vocabulary.
        """
        if self.teacher_server is None:
            raise UsageError(
                "teacher_enabled is set but there is no teacher: pass --teacher.base_url, or teacher: in the YAML file"
            )
        await self.teacher_server.wait_until_well()
        await self._compare_vocabularies(self.teacher_server.servers[0].config)

    async def _compare_vocabularies(self, teacher: APIServerConfig) -> None:
        named = next(
            (
                name
                for name in (teacher.tokenizer_name, teacher.model_name)
                if name not in MODEL_NOT_NAMED
            ),
            None,
        )
        ours = getattr(self.tokenizer, "name_or_path", None)
        if named is None or named == ours:
            return
        theirs = await asyncio.to_thread(load_tokenizer, named)
        if difference := first_difference(theirs.get_vocab(), self.tokenizer.get_vocab()):
            raise UsageError(
                f"--teacher.tokenizer_name {named}: another vocabulary than this environment's {ours}: {difference}"
            )

    async def _fetch_teacher_for_sequence(
        self, token_ids: list[int], top_k: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """([position][k] token ids, the same of logprobs) of one sequence."""
        assert self.teacher_server is not None
        logprobs = await self.teacher_server.get_logprobs(
            input_ids=token_ids, top_k=top_k, max_tokens=1, split="train"
        )
        return logprobs["prompt_topk_token_ids"], logprobs["prompt_topk_logprobs"]

    async def _attach_teacher_distillation(self, group: ScoredDataGroup) -> ScoredDataGroup:
        """The group with the teacher's arrays, or with None in their place."""
        if not self.config.teacher_enabled:
            return group
        if self._comparing is None:
            self._comparing = asyncio.create_task(self._compared())
        await asyncio.shield(self._comparing)
        overrides = group.get("group_overrides") or {}
        top_k = int(overrides.get("teacher_top_k", self.config.teacher_top_k))
        group["distill_token_ids"] = group["distill_logprobs"] = None
        if not group.get("tokens") or overrides.get("skip_teacher_top_k") or top_k < 0:
            return group
        calls = (
            self._fetch_teacher_for_sequence(list(tokens), top_k) for tokens in group["tokens"]
        )
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for index, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                logger.warning(
                    "a group is sent without its teacher's logprobs, of sequence %d there are none: %s",
                    index,
                    answer,
                )
                return group
            if list(map(len, answer[0])) != list(map(len, answer[1])):
                logger.warning(
                    "a group is sent without its teacher's logprobs: the lists of sequence %d "
                    "differ in length",
                    index,
                )
                return group
        group["distill_token_ids"] = [answer[0] for answer in answers]  # type: ignore[index]
        group["distill_logprobs"] = [answer[1] for answer in answers]  # type: ignore[index]
        return group

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Any = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> Any:
        for group in as_list(scored_data):
            if group is not None:
                await self._attach_teacher_distillation(group)
        return await super().handle_send_to_api(
            scored_data, item, do_send_to_api, abort_on_any_max_length_exceeded
        )
