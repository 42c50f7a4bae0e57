r"""GSM8K: grade-school word problems, graded by the final \boxed{} answer.

    python environments/gsm8k_server.py                                             # serve a trainer
    python environments/gsm8k_server.py --env.dataset_path DIR                      # from train.jsonl and test.jsonl
    python environments/gsm8k_server.py evaluate --env.eval_output out.json         # measure the served model

The reward is +1 for a right answer, else -1. See `Gsm8kConfig` for partial credit and the length penalty.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # run by path: import from the repository, never a sibling file

import asyncio

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.single_turn import Grade, Response, SingleTurnEnv
from atroposlib.type_definitions import Message
from atroposlib.utils.boxed import is_well_formed, last_boxed
from atroposlib.utils.math_scoring import MathScorer
from environments.gsm8k_data import Question, load_from_hub, load_from_path, shuffled

SYSTEM_PROMPT = (
    "Solve the word problem. Think it through step by step, writing out each calculation, "
    "then give the final number, alone and without units, as \\boxed{number}."
)


class Gsm8kConfig(BaseEnvConfig):
    """Settings of the GSM8K environment."""

    dataset_path: str | None = Field(
        default=None, description="Folder with train.jsonl and test.jsonl, or one such file; by default the hub's gsm8k"
    )
    system_prompt: str = Field(default=SYSTEM_PROMPT, description="System prompt; empty for none")
    format_reward: bool = Field(
        default=False, description="Give a wrong answer partial credit: half for exactly one \\boxed{}, half for finishing"
    )
    format_reward_value: float = Field(default=0.5, ge=0, lt=2, description="Most partial credit, added to the -1")
    length_penalty_from: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="In groups with every answer right, longer than this share of max_token_length costs",
    )


class Gsm8kEnv(SingleTurnEnv):
    """GSM8K with verifiable answers."""

    name = "gsm8k"
    env_config_cls = Gsm8kConfig
    config: Gsm8kConfig

    @classmethod
    def config_init(cls) -> tuple[Gsm8kConfig, list[APIServerConfig]]:
        config = Gsm8kConfig(
            group_size=8,
            max_token_length=2048,
            max_eval_workers=64,
            steps_per_eval=100,
            eval_size=-1,
            eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
            wandb_name="gsm8k",
        )
        return config, [APIServerConfig(base_url="http://localhost:9001/v1", server_type="vllm", num_requests_for_eval=256)]

    async def setup(self) -> None:
        self.scorer = MathScorer()
        path = self.config.dataset_path
        # Reading from the hub may take minutes: not in the event loop, where a signal to stop would have to wait.
        train, test = await asyncio.to_thread(load_from_path, Path(path)) if path else await asyncio.to_thread(load_from_hub)
        self.train = shuffled(train, self.config.seed)
        self.test = shuffled(test, self.config.seed)
        self.position = 0

    async def get_next_item(self) -> Question:
        self.position += 1
        return self.train[(self.position - 1) % len(self.train)]

    async def item_at(self, number: int) -> Question:
        """With `exact_resume`: the service knows the position."""
        return self.train[number % len(self.train)]

    def save_checkpoint(self, step: int, data: dict[str, object] | None = None) -> None:
        """Resume where the last run stopped, instead of at the first question."""
        super().save_checkpoint(step, {"position": self.position} | (data or {}))

    def messages(self, problem: Question) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self.config.system_prompt}] if self.config.system_prompt else []
        return [*system, {"role": "user", "content": problem.question}]

    async def grade(self, problem: Question, response: Response) -> Grade:
        # Text before the end of a reasoning block is not the answer.
        visible = response.text.rpartition("</think>")[2]
        answer = last_boxed(visible)
        if answer is not None and await self.scorer.equal(problem.gold, answer):
            return Grade(score=1.0, correct=True, answer=answer)
        score = -1.0
        if self.config.format_reward:
            score += self.config.format_reward_value * (is_well_formed(visible) + response.finished) / 2
        return Grade(score=score, correct=False, answer=answer)

    def adjust_scores(self, grades: list[Grade], responses: list[Response]) -> list[float]:
        """When every answer is right, only length still tells them apart: 1 up to a share of the limit, then down to 0."""
        if not all(grade.correct for grade in grades):
            return [grade.score for grade in grades]
        limit = self.config.max_token_length
        free = self.config.length_penalty_from * limit
        over = [(response.num_tokens - free) / max(1.0, limit - free) for response in responses]
        return [1.0 - min(1.0, max(0.0, share)) for share in over]

    def eval_problems(self) -> list[Question]:
        return self.test if self.config.eval_size < 0 else self.test[: self.config.eval_size]

    def describe(self, problem: Question) -> dict[str, object]:
        return {"question": problem.question, "gold_answer": problem.gold}


if __name__ == "__main__":
    Gsm8kEnv.cli()
