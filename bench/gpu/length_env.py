"""GSM8K's questions with a reward that asks nothing of the answer but its length: for measuring
speed with random weights.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from pydantic import Field

from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.single_turn import Grade, Response, SingleTurnEnv
from atroposlib.type_definitions import Message
from environments.math_server import Question, read_file


class LengthConfig(BaseEnvConfig):
    """Settings of this environment."""

    questions: str = Field(
        default="train.jsonl", description="GSM8K's questions and answers, JSON lines"
    )


class LengthEnv(SingleTurnEnv):
    """An answer of an odd number of tokens is worth 1, another nothing."""

    name = "length"
    env_config_cls = LengthConfig
    config: LengthConfig

    async def setup(self) -> None:
        self.questions = read_file(Path(self.config.questions)).good
        self.position = 0

    async def get_next_item(self) -> Question:
        self.position += 1
        return self.questions[(self.position - 1) % len(self.questions)]

    def messages(self, problem: Question) -> list[Message]:
        return [{"role": "user", "content": problem.question}]

    async def grade(self, problem: Question, response: Response) -> Grade:
        return Grade(score=float(response.num_tokens % 2), correct=True)

    def eval_problems(self) -> list[Question]:
        return self.questions[:4]


if __name__ == "__main__":
    LengthEnv.cli()
