r"""Over a hundred generated tasks of the reasoning-gym package: puzzles, arithmetic, logic,
graphs, games. No download.

    pip install --no-deps --require-hashes -r requirements-environments.txt
    python environments/reasoning_gym_server.py --env.tasks chain_sum,gcd
    python environments/reasoning_gym_server.py --env.tasks '{gcd: {level: 2}, sudoku: {weight: 2, settings: {max_empty: 30}}}'

The reward is the task's own score, from 0 to 1, scaled to -1 to 1. A `level` is one number for all
attributes of a task's curriculum, or one for each by name. `--env.seed` chooses the training
questions: two thousand streams of a million. The `--env.eval_size` held-out questions are the same
for every seed, and a training question that equals one is replaced. Some tasks evaluate the answer
as a formula, in a child process that is killed after 30 seconds: the answer is then wrong. If the
scorer cannot read its own answer, nothing is scored.
"""

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from atroposlib.envs.base import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.single_turn import Grade, Response, SingleTurnEnv
from atroposlib.type_definitions import Message
from atroposlib.utils.math_scoring import last_boxed
from atroposlib.utils.processes import ChildDied, KillableCalls
from atroposlib.wire import ScoredDataGroup
from environments.common import NumberedItems, question_messages
from environments.reasoning_gym_tasks import (
    Question,
    Questions,
    TaskSettings,
    UnreadableAnswer,
    score_in_this_process,
)

logger = logging.getLogger(__name__)

PROMPT = (
    "Think step by step. Then give the answer alone, in the form that the question asks for, as {}."
)
FORMS = {"tags": "<answer>answer</answer>", "boxed": "\\boxed{answer}"}
SCORE_SECONDS = 30.0
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
SOLVED = 0.999
"""A score from here on is a right answer: some are sums of parts that round."""


class ReasoningGymConfig(BaseEnvConfig):
    """Settings of this environment."""

    tasks: dict[str, TaskSettings] = Field(
        default={"chain_sum": TaskSettings()},
        description="Names with commas between, or a table of names and their `weight`, `level` "
        "(of the curriculum) and "
        "`settings`",
    )
    answer_form: Literal["tags", "boxed"] = Field(
        default="tags",
        description="Where the answer stands: in <answer> tags, or in the last \\boxed{}",
    )
    system_prompt: str | None = Field(
        default=None,
        description="System prompt; by default one that asks for this form; empty for none",
    )
    partial_credit: bool = Field(
        default=True, description="Keep scores between 0 and 1; else what is not right is worth 0"
    )
    eval_size: int = Field(
        default=100, ge=1, le=100_000, description="Questions held out, the tasks taking turns"
    )

    @field_validator("tasks", mode="before")
    @classmethod
    def _read_names(cls, value: object) -> object:
        """Accept `chain_sum,gcd` from a flag."""
        if isinstance(value, str) and not value.lstrip().startswith("{"):
            return {name.strip(): {} for name in value.split(",") if name.strip()}
        if isinstance(value, list):
            return {name: {} for name in value}
        return value

    @field_validator("tasks")
    @classmethod
    def _at_least_one(cls, value: dict[str, TaskSettings]) -> dict[str, TaskSettings]:
        if not value:
            raise ValueError("name at least one task")
        return value


class ReasoningGymEnv(NumberedItems, SingleTurnEnv):
    """Generated tasks with their own scores."""

    name = "reasoning_gym"
    env_config_cls = ReasoningGymConfig
    config: ReasoningGymConfig
    default_settings: ClassVar[Mapping[str, Any]] = {
        "group_size": 8,
        "max_eval_workers": 64,
        "eval_handling": EvalHandlingEnum.LIMIT_TRAIN,
    }

    async def setup(self) -> None:
        tasks = self.config.tasks
        self.questions = await asyncio.to_thread(
            Questions, tasks, self.config.seed, self.config.eval_size
        )
        self.configs = {
            name: json.dumps([task.level, task.settings]) for name, task in tasks.items()
        }
        self.children = KillableCalls()
        self.problems: Counter[str] = Counter()

    async def item_at(self, number: int) -> Question:
        """Some puzzles take a second to make: not in the event loop."""
        return await asyncio.to_thread(self.questions.training, number)

    async def collect_group(self, item: Question) -> ScoredDataGroup:
        group = await super().collect_group(item)
        for score in group["scores"]:
            self.note({f"score/{item.task}": (score + 1) / 2})
        return group

    def messages(self, problem: Question) -> list[Message]:
        prompt = self.config.system_prompt
        if prompt is None:
            prompt = PROMPT.format(FORMS[self.config.answer_form])
        return question_messages(prompt, problem.text)

    async def grade(self, problem: Question, response: Response) -> Grade:
        visible = response.answer
        readers = {"boxed": last_boxed, "tags": last_tagged}
        answer, score = readers[self.config.answer_form](visible), 0.0
        if answer is not None:
            score = await self.score(problem, answer)
        if score < SOLVED and not self.config.partial_credit:
            score = 0.0
        return Grade(score=2.0 * score - 1.0, correct=score >= SOLVED, answer=answer)

    async def score(self, problem: Question, answer: str) -> float:
        """Return the task's score, 0 to 1.

        An answer that its scorer cannot read, reads for too long or dies over scores 0 and is
        counted.
        """
        config = self.configs[problem.task]
        try:
            return await self.children.call(
                score_in_this_process,
                problem.task,
                config,
                problem.entry,
                answer,
                seconds=SCORE_SECONDS,
            )
        except UnreadableAnswer as error:
            self.count_problem("unreadable_answers", str(error), answer)
        except TimeoutError:
            self.count_problem(
                "endless_answers",
                f"{problem.task} took over {SCORE_SECONDS:.0f} s to score an answer",
                answer,
            )
        except ChildDied as error:
            self.count_problem("deadly_answers", str(error), answer)
        return 0.0

    def count_problem(self, kind: str, what: str, answer: str) -> None:
        self.problems[kind] += 1
        if self.problems[kind] == 1:
            logger.warning(
                "%s: %.120r; it counts as wrong, and more of this kind are only counted",
                what,
                answer,
            )

    def eval_problems(self) -> list[Question]:
        return self.questions.held_out

    def describe(self, problem: Question) -> dict[str, Any]:
        return {
            "task": problem.task,
            "question": problem.text,
            "gold_answer": str(problem.entry["answer"]),
        }

    def summary(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As for every environment, and each task's mean score as `score/<task>`."""
        scores = {
            task: [(row["score"] + 1) / 2 for row in samples if row["task"] == task]
            for task in self.config.tasks
        }
        return super().summary(samples) | {
            f"score/{task}": fmean(own) for task, own in scores.items() if own
        }

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add the counts of answers that could not be scored."""
        counts = {f"train/{kind}": count for kind, count in self.problems.items()}
        await super().wandb_log(counts | (wandb_metrics or {}))


def last_tagged(text: str) -> str | None:
    """Return the text of the last `<answer>` tags, or None without any.

    >>> last_tagged("<answer>1</answer> no, <answer> 2 </answer>"), last_tagged("<answer>5</answer></answer>")
    ('2', '5')
    """
    answers = _TAGGED.findall(text)
    return answers[-1].strip() if answers else None


if __name__ == "__main__":
    ReasoningGymEnv.cli()
