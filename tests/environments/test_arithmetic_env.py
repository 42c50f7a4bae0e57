"""The arithmetic environment's reward and its settings."""

import asyncio
from pathlib import Path

import pytest

from atroposlib.envs.runner.command_line import merge, parse_flags
from atroposlib.envs.single_turn import Response
from atroposlib.errors import UsageError
from environments.arithmetic_server import ArithmeticConfig, ArithmeticEnv, held_out_problems


@pytest.fixture
def env(tokenizer_dir: Path) -> ArithmeticEnv:
    config, servers = ArithmeticEnv.config_init()
    config.tokenizer_name = str(tokenizer_dir)
    return ArithmeticEnv(config, servers)


def test_the_last_box_decides_and_nothing_else(env: ArithmeticEnv) -> None:
    problem = held_out_problems(1)[0]

    def score(text: str) -> float:
        return asyncio.run(env.grade(problem, Response(text, 5, True))).score

    right, wrong = problem.answer, problem.answer + 1
    assert score(rf"\boxed{{{right}}}") == 1.0
    assert score(rf"\boxed{{ {right:,} }}") == 1.0
    assert score(rf"\boxed{{{wrong}}} \boxed{{{right}}}") == 1.0
    assert score(rf"\boxed{{{right}}} \boxed{{{wrong}}}") == -1.0
    assert score(rf"\boxed{{{right} apples}}") == 1.0
    assert score(rf"\boxed{{{right} or {wrong} apples}}") == -1.0
    assert score(f"the answer is {right}") == -1.0
    assert score(rf"\boxed{{{right}") == -1.0
    assert score("") == -1.0


def test_the_seed_decides_the_problems(env: ArithmeticEnv) -> None:
    async def first(seed: int) -> list[str]:
        env.config.seed = seed
        await env.setup()
        return [(await env.get_next_item()).question for _ in range(20)]

    assert asyncio.run(first(1)) == asyncio.run(first(1))
    assert asyncio.run(first(1)) != asyncio.run(first(2))


@pytest.mark.parametrize(("text", "levels"), [("2", (2,)), ("1,3", (1, 3)), ("[1, 2]", (1, 2))])
def test_difficulty_flag(text: str, levels: tuple[int, ...]) -> None:
    default, servers = ArithmeticEnv.config_init()
    made = merge(default, servers, parse_flags(["--env.difficulty", text], ArithmeticConfig), {})
    assert made.env.difficulty == levels  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["9", "1,9", "easy", ""])
def test_a_level_that_does_not_exist_is_refused(text: str) -> None:
    default, servers = ArithmeticEnv.config_init()
    with pytest.raises(UsageError, match=r"--env\.difficulty"):
        merge(default, servers, parse_flags([f"--env.difficulty={text}"], ArithmeticConfig), {})


def test_evaluation_problems_are_held_out_and_stay_the_same(env: ArithmeticEnv) -> None:
    env.config.eval_size = 50
    assert (
        env.eval_problems() == env.eval_problems() == held_out_problems(50, env.config.difficulty)
    )
