"""Questions with mathematical answers: from JSON lines, JSON or Parquet on this machine, or from
the Hugging Face hub.

Evaluation suites go by name. Each is one file in a folder of yours, and `SUITES` says where it
comes from.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.utils.data_files import ENDINGS, BadRow, rows_of_file, usable_rows
from atroposlib.utils.jsonl import Row
from atroposlib.utils.math_scoring import as_number, boxed_contents, last_boxed

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


@dataclass
class Questions:
    """The questions that were read.

    Attributes:
        questions: in the order of the rows.
        incomplete: number of rows without a question or without an answer.
        first: the first of these, and its fault.
    """

    questions: list[Question] = field(default_factory=list)
    incomplete: int = 0
    first: str = ""


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


# Names, splits and sizes as the cards of the data sets on the hub say (MATH-500's names its 500
# problems in words).
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
            f"{question_column!r} is a list of messages, and a question is text: put the text "
            f"of the user's message into a "
            "column and name it with --env.question_column"
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
    if gold is None or (answer_column == "solution" and not marked):
        raise BadRow(f"{answer_column!r} holds no answer: {answer!r:.80}")
    if any("\ud800" <= character <= "\udfff" for character in question + gold):
        raise BadRow("it holds half of a character (a lone surrogate), which no request can carry")
    return Question(question.strip(), gold)


def _column(row: dict[str, Any], what: str, given: str | None, usual: Sequence[str]) -> str:
    """Return the name of the column with the question or the answer."""
    present = [name for name in usual if name in row]
    filled = [name for name in present if row[name] is not None and row[name] != ""]
    name = given or next(iter(filled or present), None)
    if name is None or name not in row:
        expected = repr(given) if given else " or ".join(usual)
        raise BadRow(
            f"no column {expected}; it has {', '.join(map(str, row))}: name it with "
            f"--env.{what}_column"
        )
    return name


def gather(rows: Iterable[Row], columns: Columns, source: str) -> Questions:
    """Return the questions of rows. Rows without a question or an answer are counted and never
    asked.

    Raises:
        UsageError: no row has both.
    """
    read = usable_rows(rows, lambda row: read_question(row, columns))
    first = read.faults[0] if read.faults else ""
    if not read.good:
        raise UsageError(
            f"{source} has no question with an answer" + (f" ({first})" if first else "")
        )
    return Questions(read.good, len(read.faults), first)


def read_file(path: Path, columns: Columns = Columns()) -> Questions:
    """Return all questions of a file: `.jsonl`, `.json` (a list) or `.parquet`.

    Raises:
        UsageError: as `rows_of_file` and `gather`.
    """
    return gather(rows_of_file(path), columns, str(path))


def file_named(folder: Path, name: str) -> Path | None:
    """`name` with one of the known endings, if it is there."""
    return next(
        (path for ending in ENDINGS if (path := folder / f"{name}{ending}").is_file()), None
    )


def load_from_path(path: Path, columns: Columns = Columns()) -> tuple[Questions, Questions]:
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
) -> list[Questions]:
    """Splits of a dataset on the hub, or in its cache on this machine.

    Raises:
        EnvironmentFailure: they cannot be had; it says what to do instead.
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


def load_suite(name: str, folder: Path | None) -> Questions:
    """A suite from the folder, or from the hub if there is no folder.

    Raises:
        UsageError: no such suite, or its file is not in the folder; it says what to put where.
        EnvironmentFailure: the hub cannot be reached; likewise.
    """
    suite = SUITES[name]
    remedy = (
        f"put its {suite.split} split ({suite.size} rows, {suite.hub} on the hub) as "
        f"{name}.jsonl into a folder, one JSON "
        "object a line with `problem` or `question`, and `answer`; and pass --env.suites_folder "
        "with that folder"
    )
    if folder is None:
        return load_from_hub(suite.hub, suite.config, [suite.split], remedy=remedy)[0]
    path = file_named(folder, name) or file_named(folder / name, "test")
    if path is None:
        looked = f"{folder / name}.jsonl (or .json, .parquet, or {name}/test.jsonl)"
        raise UsageError(f"--env.suites_folder: the suite {name} is not at {looked}: {remedy}")
    return read_file(path)


def shuffled(questions: Sequence[Question], seed: int) -> list[Question]:
    """In the order of `datasets.Dataset.shuffle(seed=seed)`, which permutes with NumPy's default
    generator.
    """
    return [questions[i] for i in np.random.default_rng(seed).permutation(len(questions))]
