r"""Word problems with one addition or subtraction, made on the fly: an environment that needs no
download.

    python environments/arithmetic_server.py  # serve a trainer
    # measure the served model
    python environments/arithmetic_server.py evaluate --env.eval_output out.json

The reward is +1 when the last \boxed{} holds the right number, else -1.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, field_validator

from atroposlib.envs.base import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.single_turn import Grade, Response, SingleTurnEnv
from atroposlib.type_definitions import Message
from environments.arithmetic_problems import (
    DEFAULT_DIFFICULTY,
    MAX_HELD_OUT,
    OPERAND_DIGITS,
    Problem,
    checked_levels,
    held_out_problems,
    read_levels,
    training_problems,
)
from environments.common import grade_number, held_out_count


class ArithmeticConfig(BaseEnvConfig):
    """Settings of the arithmetic environment."""

    difficulty: tuple[int, ...] = Field(
        default=DEFAULT_DIFFICULTY,
        description=f"Levels to draw from, one or more of {sorted(OPERAND_DIGITS)}, such as 1,2",
    )

    _read_levels = field_validator("difficulty", mode="before")(read_levels)
    _check_levels = field_validator("difficulty")(partial(checked_levels, known=OPERAND_DIGITS))


class ArithmeticEnv(SingleTurnEnv):
    """Generated sums and differences, two or three digits; the held-out problems never appear in
    training.
    """

    name = "arithmetic"
    env_config_cls = ArithmeticConfig
    config: ArithmeticConfig
    default_settings: ClassVar[Mapping[str, Any]] = {
        "group_size": 16,
        "max_token_length": 128,
        "max_num_workers_per_node": 16,
        "max_eval_workers": 64,
        "steps_per_eval": 0,
        "eval_handling": EvalHandlingEnum.LIMIT_TRAIN,
    }

    async def setup(self) -> None:
        self.problems: Iterator[Problem] = training_problems(
            self.config.seed, self.config.difficulty
        )

    async def get_next_item(self) -> Problem:
        return next(self.problems)

    def messages(self, problem: Problem) -> list[Message]:
        return [{"role": "user", "content": problem.question}]

    async def grade(self, problem: Problem, response: Response) -> Grade:
        return grade_number(response.answer, problem.answer)

    def eval_problems(self) -> list[Problem]:
        return held_out_problems(
            held_out_count(self.config.eval_size, MAX_HELD_OUT), self.config.difficulty
        )

    def describe(self, problem: Problem) -> dict[str, object]:
        return {
            "question": problem.question,
            "gold_answer": str(problem.answer),
            "difficulty": problem.difficulty,
        }


if __name__ == "__main__":
    ArithmeticEnv.cli()
