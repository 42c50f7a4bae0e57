r"""Questions with mathematical answers, of any dataset; and the field's evaluation suites by name.

    # train and test, .jsonl, .json, .csv or .parquet
    python environments/math_server.py --env.dataset_path DIR
    python environments/math_server.py --env.dataset NAME  # from the Hugging Face hub
    python environments/math_server.py evaluate --env.eval_suites math500,aime24:16 --env.suites_folder DIR

The reward is +1 where the final \boxed{} equals the gold answer, else -1. See `MathConfig` for
partial credit, the length penalty and the columns. `pass@k` is the unbiased estimate over the
samples. If a suite's file has another number of rows than the dataset's card, the log has a line.

Evaluation suites have names. Each is one file in a folder of yours, and `SUITES` names its
source.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, field_validator, model_validator

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.graded import Attempt, oldest_version
from atroposlib.envs.single_turn import Grade, Response
from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.type_definitions import Message
from atroposlib.utils.jsonl import ENDINGS, BadRow, Row, Rows, rows_of_file, usable_rows
from atroposlib.utils.math_scoring import (
    MathScorer,
    as_number,
    boxed_contents,
    is_well_formed,
    last_boxed,
)
from atroposlib.utils.metrics import pass_at_k
from atroposlib.utils.waiting import plain
from environments.common import RowsEnv, question_messages

QUESTION_COLUMNS = ("question", "problem", "prompt", "query")
ANSWER_COLUMNS = ("answer", "final_answer", "expected_answer", "ground_truth", "solution")
ANSWER_MARK = "####"


@dataclass(frozen=True)
class Question:
    """A question and its gold answer; a number has no thousands separators."""

    question: str
    gold: str


@dataclass(frozen=True)
class Columns:
    """Names of the columns; None: the first of the usual names under which a row has a value."""

    question: str | None = None
    answer: str | None = None


@dataclass(frozen=True)
class Suite:
    """An evaluation suite.

    Attributes:
        hub, config, split: where it is on the Hugging Face hub.
        size: questions that it has.
    """

    hub: str
    split: str
    size: int
    config: str | None = None


# Names, splits and sizes are from the cards of the data sets on the hub (MATH-500's card gives its
# 500 problems in words).
SUITES = {
    "math500": Suite("HuggingFaceH4/MATH-500", "test", 500),
    "aime24": Suite("HuggingFaceH4/aime_2024", "train", 30),
    "aime25": Suite("math-ai/aime25", "test", 30),
    "gsm8k": Suite("openai/gsm8k", "test", 1319, "main"),
}


def gold_answer(value: object) -> str | None:
    """Return the final answer in a cell, or None if there is none.

    It is the text behind the last `####`, else the last box, else the whole cell. If the last box is never
    closed, there is no answer. Thousands separators of a plain number are removed; everything else stays as it is.

    >>> gold_answer("2 + 2 = 4 #### 1,234"), gold_answer("so \\boxed{x}"), gold_answer(7), gold_answer(" ")
    ('1234', 'x', '7', None)
    >>> gold_answer("#### 1,2")
    '1,2'
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return None
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        return None
    text = str(value)
    _, mark, after = text.rpartition(ANSWER_MARK)
    if mark:
        number = as_number(after) if "," in after else None
        return (after.strip() if number is None else f"{number:f}") or None
    boxed = last_boxed(text)
    if boxed is None and boxed_contents(text):
        return None  # its last box was cut off
    return (text if boxed is None else boxed).strip() or None


def read_question(row: Any, columns: Columns) -> Question:
    """Return the question of one row.

    Raises:
        BadRow: the row has no question or no answer.
    """
    if not isinstance(row, dict):
        raise BadRow("not a JSON object with a question and an answer")
    question_column = _column(row, "question", columns.question, QUESTION_COLUMNS)
    answer_column = _column(row, "answer", columns.answer, ANSWER_COLUMNS)
    question, answer = row[question_column], row[answer_column]
    if isinstance(question, list) and any(
        isinstance(entry, dict) and "role" in entry for entry in question
    ):
        raise BadRow(
            f"{question_column!r} is a list of messages, and a question is text. Put the text of "
            "the user's message into a column and name it with --env.question_column"
        )
    if not isinstance(question, str) or not question.strip():
        raise BadRow(f"{question_column!r} is empty or not text")
    if isinstance(answer, list):
        raise BadRow(
            f"{answer_column!r} is a list, and a gold answer is one text or number: {answer!r:.80}"
        )
    gold = gold_answer(answer)
    marked = gold is not None and (
        last_boxed(str(answer)) is not None or ANSWER_MARK in str(answer)
    )
    if gold is None:
        raise BadRow(f"{answer_column!r} holds no answer: {answer!r:.80}")
    if answer_column == "solution" and not columns.answer and not marked:
        raise BadRow(
            f"'solution' holds no answer behind #### or in a box: {answer!r:.80}. If the whole cell "
            "is the answer, give --env.answer_column solution"
        )
    if any("\ud800" <= character <= "\udfff" for character in question + gold):
        raise BadRow("it holds half of a character (a lone surrogate), which no request can carry")
    return Question(question.strip(), gold)


def _column(row: dict[str, Any], what: str, configured: str | None, usual: Sequence[str]) -> str:
    """Return the name of the column with the question or the answer."""
    present = [name for name in usual if name in row]
    filled = [name for name in present if row[name] is not None and row[name] != ""]
    name = configured or next(iter(filled or present), None)
    if name is None or name not in row:
        expected = repr(configured) if configured else " or ".join(usual)
        raise BadRow(
            f"no column {expected}; it has {', '.join(map(str, row))}: name it with "
            f"--env.{what}_column"
        )
    return name


def gather(rows: Iterable[Row], columns: Columns, source: str) -> Rows[Question]:
    """Return the questions of rows. Rows without a question or an answer are counted and never
    asked.

    Raises:
        UsageError: no row has both.
    """
    read = usable_rows(rows, lambda row: read_question(row, columns))
    if not read.good:
        raise UsageError("; ".join([f"{source} has no question with an answer", *read.faults[:1]]))
    return read


def read_file(path: Path, columns: Columns = Columns()) -> Rows[Question]:
    """Return all questions of a file: `.jsonl`, `.json` (a list), `.csv` or `.parquet`.

    Raises:
        UsageError: as `rows_of_file` and `gather`.
    """
    return gather(rows_of_file(path), columns, str(path))


def file_named(folder: Path, name: str) -> Path | None:
    """`name` with one of the known endings, if it is there."""
    return next(
        (path for ending in ENDINGS if (path := folder / f"{name}{ending}").is_file()), None
    )


def load_from_path(
    path: Path, columns: Columns = Columns()
) -> tuple[Rows[Question], Rows[Question]]:
    """Train and test questions from a folder with a train and a test file, or both from one file.

    Raises:
        UsageError: as `read_file`, or a file of the folder is missing.
    """
    if not path.exists():
        raise UsageError(f"--env.dataset_path: cannot read {path}: no such file or folder")
    if not path.is_dir():
        both = read_file(path, columns)
        return both, both
    files = []
    for name in ("train", "test"):
        if (file := file_named(path, name)) is None:
            raise UsageError(f"{path} has no {name}{ENDINGS[0]} (nor {', '.join(ENDINGS[1:])})")
        files.append(file)
    return read_file(files[0], columns), read_file(files[1], columns)


def load_from_hub(
    name: str,
    config: str | None,
    splits: Sequence[str],
    columns: Columns = Columns(),
    remedy: str = "pass --env.dataset_path with a folder that holds train.jsonl and test.jsonl",
) -> list[Rows[Question]]:
    """Splits of a dataset on the hub, or in its cache on this machine.

    Raises:
        EnvironmentFailure: they cannot be loaded; the message has the remedy.
    """
    called = f"{name}/{config}" if config else name
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise EnvironmentFailure(
            f"the datasets package is not installed: pip install datasets, or {remedy}"
        ) from error
    try:
        loaded = [datasets.load_dataset(name, config, split=split) for split in splits]
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EnvironmentFailure(
            f"cannot load {called} from the Hugging Face hub ({reason}): {remedy}"
        ) from error
    return [
        gather((Row(f"{called} row {i}", row) for i, row in enumerate(rows)), columns, called)
        for rows in loaded
    ]


def load_suite(name: str, folder: Path | None) -> Rows[Question]:
    """A suite from the folder, or from the hub if there is no folder.

    Raises:
        UsageError: its file is not in the folder; the message has the remedy.
        EnvironmentFailure: the hub cannot be reached; the message has the remedy.
    """
    suite = SUITES[name]
    remedy = (
        f"put its {suite.split} split ({suite.size} rows, {suite.hub} on the hub) as {name}.jsonl "
        "into a folder. Each line is a JSON object with `problem` or `question`, and `answer`. "
        "Pass --env.suites_folder with that folder"
    )
    if folder is None:
        return load_from_hub(suite.hub, suite.config, [suite.split], remedy=remedy)[0]
    path = file_named(folder, name) or file_named(folder / name, "test")
    if path is None:
        looked = f"{folder / name}.jsonl (or .json, .csv, .parquet, or {name}/test.jsonl)"
        raise UsageError(f"--env.suites_folder: the suite {name} is not at {looked}: {remedy}")
    return read_file(path)


def shuffled(questions: Sequence[Question], seed: int) -> list[Question]:
    """In the order of `datasets.Dataset.shuffle(seed=seed)`, which permutes with NumPy's default
    generator.
    """
    return [questions[i] for i in np.random.default_rng(seed).permutation(len(questions))]


logger = logging.getLogger(__name__)

SYSTEM_PROMPT = "Solve the problem. Think it through step by step, then give the final answer alone as \\boxed{answer}."


class MathConfig(BaseEnvConfig):
    """Settings of this environment."""

    dataset_path: str | None = Field(
        default=None,
        description="Folder with a train and a test file (.jsonl, .json, .csv, .parquet), or one such "
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
            read.report_faults(f"the suite {name}", self.drops.add)
            if len(read.good) != SUITES[name].size:
                logger.warning(
                    "the suite %s has %d questions, not the usual %d",
                    name,
                    len(read.good),
                    SUITES[name].size,
                )
            self.suites[name] = read.good
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
        train.report_faults("the training set", self.drops.add)
        if test is train:
            return train.good, train.good
        test.report_faults("the test set", self.drops.add)
        return train.good, test.good

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
        """Score by length if every answer is right: 1 up to a share of the limit, then down to 0."""
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
        suites: Mapping[str, Sequence[Question]] = self.suites or {
            "": plain(self.eval_problems(), "eval_problems", self)
        }
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
