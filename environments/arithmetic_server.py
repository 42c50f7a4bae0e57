r"""Word problems with one addition or subtraction, made on the fly: an environment that needs no download.

    python environments/arithmetic_server.py                                        # serve a trainer
    python environments/arithmetic_server.py evaluate --env.eval_output out.json    # measure the served model

The reward is +1 when the last \boxed{} holds the right number, else -1.
"""

from collections.abc import Iterator

from pydantic import Field, field_validator

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.single_turn import Grade, Response, SingleTurnEnv
from atroposlib.type_definitions import Message
from atroposlib.utils.boxed import last_boxed
from atroposlib.utils.math_scoring import number_in
from environments.arithmetic_problems import (
    DEFAULT_DIFFICULTY,
    MAX_HELD_OUT,
    OPERAND_DIGITS,
    Problem,
    held_out_problems,
    read_levels,
    training_problems,
)


class ArithmeticConfig(BaseEnvConfig):
    """Settings of the arithmetic environment."""

    difficulty: tuple[int, ...] = Field(
        default=DEFAULT_DIFFICULTY,
        description=f"Levels to draw from, one or more of {sorted(OPERAND_DIGITS)}, such as 1,2",
    )

    _read_levels = field_validator("difficulty", mode="before")(read_levels)

    @field_validator("difficulty")
    @classmethod
    def _check_levels(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or not set(value) <= OPERAND_DIGITS.keys():
            raise ValueError(f"choose one or more of {sorted(OPERAND_DIGITS)}")
        return value


class ArithmeticEnv(SingleTurnEnv):
    """Generated sums and differences, two or three digits; the held-out problems never appear in
    training.
    """

    name = "arithmetic"
    env_config_cls = ArithmeticConfig
    config: ArithmeticConfig

    @classmethod
    def config_init(cls) -> tuple[ArithmeticConfig, list[APIServerConfig]]:
        config = ArithmeticConfig(
            group_size=16,
            max_token_length=128,
            max_num_workers_per_node=16,
            max_eval_workers=64,
            steps_per_eval=0,
            eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
            wandb_name="arithmetic",
        )
        return config, [APIServerConfig(base_url="http://localhost:9001/v1", server_type="vllm")]

    async def setup(self) -> None:
        self.problems: Iterator[Problem] = training_problems(
            self.config.seed, self.config.difficulty
        )

    async def get_next_item(self) -> Problem:
        return next(self.problems)

    def messages(self, problem: Problem) -> list[Message]:
        return [{"role": "user", "content": problem.question}]

    async def grade(self, problem: Problem, response: Response) -> Grade:
        answer = last_boxed(response.answer)
        correct = answer is not None and number_in(answer) == problem.answer
        return Grade(score=1.0 if correct else -1.0, correct=correct, answer=answer)

    def eval_problems(self) -> list[Problem]:
        count = self.config.eval_size if self.config.eval_size > 0 else MAX_HELD_OUT
        return held_out_problems(min(count, MAX_HELD_OUT), self.config.difficulty)

    def describe(self, problem: Problem) -> dict[str, object]:
        return {
            "question": problem.question,
            "gold_answer": str(problem.answer),
            "difficulty": problem.difficulty,
        }


if __name__ == "__main__":
    ArithmeticEnv.cli()
