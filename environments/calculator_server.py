r"""Problems that are too long to work out, and a calculator that the model may ask: an environment
with a tool.

    python environments/calculator_server.py  # serve a trainer
    # measure the served model
    python environments/calculator_server.py evaluate --env.eval_output out.json

The reward is +1 when the last \boxed{} of the last answer holds the right number, else -1. Asking
costs nothing, and nobody tells the model to.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, field_validator

from atroposlib.envs.base import EvalHandlingEnum
from atroposlib.envs.graded import Grade
from atroposlib.envs.multi_turn import Conversation, MultiTurnConfig, MultiTurnEnv
from atroposlib.inference.responses import TaggedFormat
from environments.arithmetic_server import MAX_HELD_OUT, checked_levels, grade_number, read_levels
from environments.calculator_problems import (
    CALL_END,
    CALL_START,
    DEFAULT_LEVELS,
    LEVELS,
    OFFER,
    Calculation,
    held_out_calculations,
    training_calculations,
)
from environments.calculator_problems import calculate as value_of
from environments.common import held_out_count


class CalculatorConfig(MultiTurnConfig):
    """Settings of the calculator environment."""

    difficulty: tuple[int, ...] = Field(
        default=DEFAULT_LEVELS,
        description=f"Levels to draw from, one or more of {list(LEVELS)}, such as 2,3",
    )

    _read_levels = field_validator("difficulty", mode="before")(read_levels)
    _check_levels = field_validator("difficulty")(partial(checked_levels, known=LEVELS))


async def calculate(expression: str) -> int:
    """Work out an expression of whole numbers.

    Args:
        expression: such as 12*34+5, with +, -, * and brackets.
    """
    return value_of(expression)


class CalculatorEnv(MultiTurnEnv):
    """Long sums and products; the held-out problems never appear in training."""

    name = "calculator"
    env_config_cls = CalculatorConfig
    config: CalculatorConfig
    default_settings: ClassVar[Mapping[str, Any]] = {
        "group_size": 16,
        "max_token_length": 96,
        "max_turns": 3,
        "max_num_workers_per_node": 16,
        "max_eval_workers": 64,
        "steps_per_eval": 0,
        "eval_handling": EvalHandlingEnum.LIMIT_TRAIN,
    }
    tools = (calculate,)
    tool_format = TaggedFormat("calculate", "expression", CALL_START, CALL_END, hint=OFFER)

    async def setup(self) -> None:
        self.problems: Iterator[Calculation] = training_calculations(
            self.config.seed, self.config.difficulty
        )

    async def get_next_item(self) -> Calculation:
        return next(self.problems)

    async def reset(self, problem: Calculation) -> Conversation:
        return Conversation([{"role": "user", "content": problem.question}])

    async def grade(self, talk: Conversation) -> Grade:
        return grade_number(talk.answer, talk.item.answer)

    def eval_problems(self) -> list[Calculation]:
        return held_out_calculations(
            held_out_count(self.config.eval_size, MAX_HELD_OUT), self.config.difficulty
        )

    def describe(self, problem: Calculation) -> dict[str, object]:
        return {
            "question": problem.question,
            "gold_answer": str(problem.answer),
            "difficulty": problem.level,
        }


if __name__ == "__main__":
    CalculatorEnv.cli()
