"""The calculator's environment: how a call is read and answered, and what a conversation is worth."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atroposlib.envs.multi_turn import Conversation, Turn
from environments.calculator_server import OFFER, CalculatorEnv, held_out_calculations


@pytest.fixture
def env(tokenizer_dir: Path) -> CalculatorEnv:
    config, servers = CalculatorEnv.config_init()
    config.tokenizer_name = str(tokenizer_dir)
    return CalculatorEnv(config, servers)


@pytest.mark.parametrize(
    ("text", "told", "problem"),
    [
        ("<calc>374*52-906</calc>", "18542", None),
        ("I ask: <calc> 12 * 3 </calc>.", "36", None),
        ("<calc>12*</calc>", "error: ValueError: a number is expected, not the end", "raised"),
        ("<calc>12/5</calc>", "error: ValueError: '/' is not expected there", "raised"),
        ("<calc>12*3", "error: '</calc>' is missing", "unreadable"),
    ],
)
def test_a_call_is_read_and_answered(
    env: CalculatorEnv, text: str, told: str, problem: str | None
) -> None:
    (call,) = env.tool_format.read(text)
    asyncio.run(env.toolbox.answer(call, Conversation([])))
    assert (call.answer, call.problem) == (told, problem)
    assert env.tool_format.answer(call) == {"role": "tool", "content": told}


def test_the_last_answers_last_box_decides_and_calls_cost_nothing(env: CalculatorEnv) -> None:
    (problem,) = held_out_calculations(1)

    def score(*answers: str) -> float:
        talk = asyncio.run(env.reset(problem))
        talk.item = problem
        talk.turns = [Turn(text, 5, True) for text in answers]
        return asyncio.run(env.grade(talk)).score

    right, wrong = rf"\boxed{{{problem.answer}}}", rf"\boxed{{{problem.answer + 1}}}"
    assert score(right) == score(f"<calc>{problem.expression}</calc>", right) == 1.0
    assert (
        score(wrong)
        == score(right, wrong)
        == score(right, f"<calc>{problem.expression}</calc>")
        == -1.0
    )
    assert score(wrong, right) == 1.0
    assert score(str(problem.answer)) == -1.0


def test_the_model_is_offered_the_calculator_and_nothing_else(env: CalculatorEnv) -> None:
    assert env.tool_format.describe(list(env.toolbox.tools.values())) == OFFER
    env.config.eval_size = 30
    assert env.eval_problems() == held_out_calculations(30)
