r"""Questions with mathematical answers, of any dataset; and the field's evaluation suites by name.

    # train and test, .jsonl, .json or .parquet
    python environments/math_server.py --env.dataset_path DIR
    python environments/math_server.py --env.dataset NAME  # from the Hugging Face hub
    python environments/math_server.py evaluate --env.eval_suites math500,aime24:16 --env.suites_folder DIR

The reward is +1 where the final \boxed{} equals the gold answer, else -1. See `MathConfig` for
partial credit, the length penalty and the columns. `pass@k` is the unbiased estimate over the
samples. If a suite's file has another number of rows than the dataset's card, the log has a line.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.graded import Attempt, oldest_version
from atroposlib.envs.single_turn import Grade, Response
from atroposlib.errors import UsageError
from atroposlib.type_definitions import Message
from atroposlib.utils.math_scoring import MathScorer, is_well_formed, last_boxed
from atroposlib.utils.metrics import pass_at_k
from environments.common import RowsEnv, question_messages
from environments.math_data import (
    SUITES,
    Columns,
    Question,
    Questions,
    load_from_hub,
    load_from_path,
    load_suite,
    shuffled,
)

logger = logging.getLogger(__name__)

SYSTEM_PROMPT = "Solve the problem. Think it through step by step, then give the final answer alone as \\boxed{answer}."


class MathConfig(BaseEnvConfig):
    """Settings of this environment."""

    dataset_path: str | None = Field(
        default=None,
        description="Folder with a train and a test file (.jsonl, .json, .parquet), or one such "
        "file for both",
    )
    dataset: str | None = Field(
        default=None, description="Dataset of the Hugging Face hub, where no dataset_path is given"
    )
    dataset_config: str | None = Field(
        default=None, description="Its configuration, if it has several"
    )
    train_split: str = Field(default="train", description="Its split to train on")
    test_split: str = Field(default="test", description="Its split to evaluate on")
    question_column: str | None = Field(
        default=None,
        description="Column with the question; by default the first of question, problem, "
        "prompt, query",
    )
    answer_column: str | None = Field(
        default=None,
        description="Column with the answer, alone, after #### or in the last \\boxed{}; by "
        "default the first of answer, "
        "final_answer, expected_answer, ground_truth, solution",
    )
    system_prompt: str = Field(default=SYSTEM_PROMPT, description="System prompt; empty for none")
    format_reward: bool = Field(
        default=False,
        description="Give a wrong answer partial credit: half for exactly one \\boxed{}, half "
        "for finishing",
    )
    format_reward_value: float = Field(
        default=0.5, ge=0, lt=2, description="Most partial credit, added to the -1"
    )
    length_penalty_from: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="In groups with every answer right, longer than this share of "
        "max_token_length costs",
    )
    eval_suites: dict[str, int | None] = Field(
        default={},
        description=f"Evaluate on these suites instead: {', '.join(SUITES)}; `aime24:16` asks "
        f"each problem 16 times",
    )
    suites_folder: str | None = Field(
        default=None,
        description="Folder with the suites' files, such as math500.jsonl; by default the hub",
    )
    eval_samples: int = Field(
        default=1,
        ge=1,
        description="Answers to each problem of an evaluation: their mean and pass@k are reported",
    )
    eval_temperature: float | None = Field(
        default=None,
        ge=0,
        description="Temperature of an evaluation; by default 0 for one answer, 1 for several",
    )

    @field_validator("eval_suites", mode="before")
    @classmethod
    def _read_suites(cls, value: object) -> object:
        """Accept `math500,aime24:16` from a flag."""
        if isinstance(value, str):
            value = [entry for entry in value.split(",") if entry.strip()]
        if isinstance(value, list):
            pairs = [str(entry).strip().partition(":") for entry in value]
            return {name: int(number) if colon else None for name, colon, number in pairs}
        return value

    @model_validator(mode="after")
    def _check_suites(self) -> "MathConfig":
        for name, samples in self.eval_suites.items():
            if name not in SUITES:
                raise ValueError(
                    f"eval_suites: there is no suite {name!r}, only {', '.join(SUITES)}"
                )
            if samples is not None and samples < 1:
                raise ValueError(
                    f"eval_suites: {name}:{samples} asks for no answer; give 1 or more"
                )
        most = max([self.eval_samples, *(samples or 1 for samples in self.eval_suites.values())])
        if self.eval_temperature == 0 and most > 1:
            raise ValueError(
                "eval_temperature 0 gives the same answer each time: ask for one, or give "
                "another temperature"
            )
        return self


class MathEnv(RowsEnv):
    """Mathematical questions with verifiable answers."""

    name = "math"
    env_config_cls = MathConfig
    config: MathConfig
    default_settings: ClassVar[Mapping[str, Any]] = {
        "group_size": 8,
        "max_eval_workers": 64,
        "eval_size": -1,
        "eval_handling": EvalHandlingEnum.LIMIT_TRAIN,
    }

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config, servers = super().config_init()
        servers[0].num_requests_for_eval = 256
        return config, servers

    async def setup(self) -> None:
        self.scorer = MathScorer()
        # Reading from the hub may take minutes: not in the event loop, where a signal to stop would
        # have to wait.
        train, test = await asyncio.to_thread(self.load)
        folder: Path | None = None
        if self.config.suites_folder:
            folder = Path(self.config.suites_folder)
        self.suites: dict[str, list[Question]] = {}
        for name in self.config.eval_suites:
            read = await asyncio.to_thread(load_suite, name, folder)
            self.leave_out(read, f"the suite {name}")
            if len(read.questions) != SUITES[name].size:
                logger.warning(
                    "the suite %s has %d questions, not the usual %d",
                    name,
                    len(read.questions),
                    SUITES[name].size,
                )
            self.suites[name] = read.questions
        evaluated = {q.question for suite in self.suites.values() for q in suite}
        # A user who names one file for both wants to train on the questions that are evaluated.
        if test is not train:
            evaluated |= {q.question for q in test}
        kept = [question for question in train if question.question not in evaluated]
        if len(kept) < len(train):
            logger.warning(
                "%d training questions are also in what is evaluated, and are left out",
                len(train) - len(kept),
            )
        self.train = shuffled(kept, self.config.seed)
        self.test = shuffled(test, self.config.seed)

    def load(self) -> tuple[list[Question], list[Question]]:
        """Training and test questions; none where only suites are asked for.

        Raises:
            UsageError: no dataset is named, or it cannot be read.
            EnvironmentFailure: the hub cannot be reached.
        """
        config = self.config
        columns = Columns(config.question_column, config.answer_column)
        if config.dataset_path:
            train, test = load_from_path(Path(config.dataset_path), columns)
        elif config.dataset:
            splits = [config.train_split, config.test_split]
            train, test = load_from_hub(config.dataset, config.dataset_config, splits, columns)
        elif config.eval_suites:
            return [], []
        else:
            raise UsageError(
                "no questions: pass --env.dataset_path, --env.dataset or, to evaluate, "
                "--env.eval_suites"
            )
        self.leave_out(train, "the training set")
        if test is train:
            return train.questions, train.questions
        self.leave_out(test, "the test set")
        return train.questions, test.questions

    def leave_out(self, read: Questions, what: str) -> None:
        """Count the rows that were left out, and say once for each source how many, and what is
        wrong with the first.
        """
        if read.incomplete:
            self.drops.add("bad_rows", read.incomplete)
            total = read.incomplete + len(read.questions)
            logger.warning(
                "%d of %d rows of %s have no question or no answer and are never asked, mend or "
                "remove them; the first: %s",
                read.incomplete,
                total,
                what,
                read.first,
            )

    async def item_at(self, number: int) -> Question:
        """Return a question by its number.

        Raises:
            UsageError: there are suites only.
        """
        if not self.train:
            raise UsageError("no questions to train on: pass --env.dataset_path or --env.dataset")
        return await super().item_at(number)

    def messages(self, problem: Question) -> list[Message]:
        return question_messages(self.config.system_prompt, problem.question)

    async def grade(self, problem: Question, response: Response) -> Grade:
        visible = response.answer
        answer = last_boxed(visible)
        if answer is not None and await self.scorer.equal(problem.gold, answer):
            return Grade(score=1.0, correct=True, answer=answer)
        score = -1.0
        if self.config.format_reward:
            score += (
                self.config.format_reward_value * (is_well_formed(visible) + response.finished) / 2
            )
        return Grade(score=score, correct=False, answer=answer)

    def adjust_scores(self, grades: list[Grade], responses: list[Response]) -> list[float]:
        """When every answer is right, only length still tells them apart: 1 up to a share of the
        limit, then down to 0.
        """
        if not all(grade.correct for grade in grades):
            return [grade.score for grade in grades]
        limit = self.config.max_token_length
        free = self.config.length_penalty_from * limit
        over = [(response.num_tokens - free) / max(1.0, limit - free) for response in responses]
        return [1.0 - min(1.0, max(0.0, share)) for share in over]

    def describe(self, problem: Question) -> dict[str, object]:
        return {"question": problem.question, "gold_answer": problem.gold}

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The test questions, or the suites: of each the mean and, of several answers to a problem,
        pass@k.
        """
        if not self.suites and self.config.eval_samples == 1 and not self.config.eval_temperature:
            return await super().evaluate(*args, **kwargs)
        attempts: list[Attempt] = []
        by_suite: dict[str, float] = {}
        suites: Mapping[str, Sequence[Question]] = self.suites or {"": self.eval_problems()}
        for suite, problems in suites.items():
            samples = self.config.eval_suites.get(suite) or self.config.eval_samples
            temperature = self.config.eval_temperature
            if temperature is None:
                temperature = float(samples > 1)
            rows = await self.measure(problems, samples, temperature)
            means = {
                f"{suite}/{name}".lstrip("/"): value for name, value in suite_metrics(rows).items()
            }
            logger.info(
                "evaluation of %s: %s",
                suite or self.name,
                ", ".join(f"{n} {v:.4f}" for n, v in means.items()),
            )
            by_suite.update(means)
            for row in rows:
                for attempt in row:
                    attempt.record.update(suite=suite or self.name, temperature=temperature)
            attempts.extend(attempt for row in rows for attempt in row)
        records = [attempt.record for attempt in attempts]
        result = self.summary(records) | by_suite | {"weight_version": oldest_version(attempts)}
        await self.evaluate_log(result, samples=records, generation_parameters={}, verbose=False)
        self._pending_metrics.update({f"eval/{name}": value for name, value in by_suite.items()})
        self._pending_metrics["eval/response_length"] = result["mean_response_tokens"]
        return result


def suite_metrics(rows: Sequence[Sequence[Attempt]]) -> dict[str, float]:
    """`mean`, the fraction of right answers, and `pass@k` for k of 2, 4, 8 … and all, averaged over
    the problems.

    Args:
        rows: each problem's attempts, the same number for each.
    """
    samples = len(rows[0])
    counts = [sum(attempt.record["correct"] for attempt in row) for row in rows]
    sizes = sorted(
        {k for k in (2**power for power in range(1, samples.bit_length())) if k <= samples}
        | {samples} - {1}
    )
    metrics = {"mean": fmean(count / samples for count in counts)}
    return metrics | {
        f"pass@{k}": fmean(pass_at_k(samples, count, k) for count in counts) for k in sizes
    }


if __name__ == "__main__":
    MathEnv.cli()
