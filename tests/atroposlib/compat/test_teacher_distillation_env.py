"""An environment with a teacher of its own, as environments written for Atropos derive from it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atroposlib.compat.teacher_distillation_env import (
    TeacherDistillationConfig,
    TeacherDistillationEnv,
)
from atroposlib.envs.runner.command_line import merge, more_servers, parse_flags
from atroposlib.errors import UsageError
from atroposlib.inference.client import APIServerConfig

TEACHER = APIServerConfig(base_url="http://teacher:1/v1", server_type="vllm", model_name="m")


class Taught(TeacherDistillationEnv):
    @classmethod
    def teacher_config_init(cls) -> APIServerConfig:
        return TEACHER

    async def get_next_item(self) -> Any:
        return None

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return None


class Teacher:
    """Scores in place of a server: each token's negated id, beside `top_k` others."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def get_logprobs(self, input_ids: list[int], top_k: int, **more: Any) -> dict[str, Any]:
        self.asked.append((input_ids, top_k, more))
        if 13 in input_ids:
            raise ValueError("no luck")
        ids = [[] if at == 0 else [token, *range(top_k)] for at, token in enumerate(input_ids)]
        return {
            "prompt_topk_token_ids": ids,
            "prompt_topk_logprobs": [[-float(i) for i in row] for row in ids],
        }

    async def wait_until_well(self) -> None:
        """It is."""

    servers = (type("Server", (), {"config": APIServerConfig()}),)


def taught(**settings: Any) -> tuple[Taught, Teacher]:
    env = Taught(
        TeacherDistillationConfig(**({"teacher_enabled": True, "teacher_top_k": 2} | settings)),
        [APIServerConfig()],
    )
    env.tokenizer = type("Tokenizer", (), {"name_or_path": "m"})()
    env.teacher_server = teacher = Teacher()  # type: ignore[assignment]
    return env, teacher


def group(**more: Any) -> Any:
    return {
        "tokens": [[5, 6], [5, 7]],
        "masks": [[-100, 6], [-100, 7]],
        "scores": [1.0, 0.0],
    } | more


def test_a_group_gets_the_teachers_likeliest_tokens_of_every_position() -> None:
    env, teacher = taught()
    made = asyncio.run(env._attach_teacher_distillation(group()))
    assert made["distill_token_ids"] == [[[], [6, 0, 1]], [[], [7, 0, 1]]]
    assert made["distill_logprobs"] == [[[], [-6.0, 0.0, -1.0]], [[], [-7.0, 0.0, -1.0]]]
    assert teacher.asked[0] == ([5, 6], 2, {"max_tokens": 1, "split": "train"})


@pytest.mark.parametrize(
    "more",
    [
        {"group_overrides": {"skip_teacher_top_k": True}},
        {"group_overrides": {"teacher_top_k": -1}},
        {"tokens": [[13], [5]]},
    ],
)
def test_a_group_that_is_not_scored_is_sent_without(more: Any) -> None:
    env, _ = taught()
    made = asyncio.run(env._attach_teacher_distillation(group(**more)))
    assert made["distill_token_ids"] is made["distill_logprobs"] is None


def test_flags_and_yaml_name_the_teacher() -> None:
    more = more_servers(Taught)
    given = parse_flags(["--teacher.timeout", "7"], TeacherDistillationConfig, more)
    content = {"teacher": {"model_name": "other"}}
    made = merge(TeacherDistillationConfig(), APIServerConfig(), given, content, None, more).more[
        "teacher"
    ]
    assert (made.base_url, made.model_name, made.timeout) == (TEACHER.base_url, "other", 7)  # type: ignore[union-attr]


def test_a_class_between_that_knows_no_teacher_passes_places_on() -> None:
    env = Taught(TeacherDistillationConfig(), [APIServerConfig()], False, True)  # type: ignore[arg-type]
    assert env.teacher_server is None
    env.config.teacher_enabled = True
    with pytest.raises(UsageError, match=r"pass --teacher\.base_url"):
        asyncio.run(env._attach_teacher_distillation(group()))
