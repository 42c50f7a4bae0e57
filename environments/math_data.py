"""Questions with mathematical answers: from JSON lines, JSON or Parquet on this machine, or from the Hugging Face hub.

Evaluation suites go by name. Each is one file in a folder of yours, and `SUITES` says where it comes from.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.utils.boxed import last_boxed
from atroposlib.utils.math_scoring import as_number

QUESTION_COLUMNS = ("question", "problem", "prompt", "query")
ANSWER_COLUMNS = ("answer", "final_answer", "expected_answer", "ground_truth", "solution")
ANSWER_MARK = "####"
ENDINGS = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Question:
    """A question and its gold answer; a number has no thousands separators."""

    question: str
    gold: str


@dataclass(frozen=True)
class Columns:
    """Names of the columns; None: the first of the usual names that a row has."""

    question: str | None = None
    answer: str | None = None


@dataclass
class Questions:
    """What was read.

    Attributes:
        questions: in the order of the rows.
        incomplete: rows without a question or without an answer, which were left out; and what was wrong with the first.
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


# Names, splits and sizes as the cards of the data sets on the hub say (MATH-500's names its 500 problems in words).
SUITES = {
    "math500": Suite("HuggingFaceH4/MATH-500", "test", 500),
    "aime24": Suite("HuggingFaceH4/aime_2024", "train", 30),
    "aime25": Suite("math-ai/aime25", "test", 30),
    "gsm8k": Suite("openai/gsm8k", "test", 1319, "main"),
}


def gold_answer(value: object) -> str | None:
    """Return the final answer in a cell, or None if there is none.

    It is the text behind the last `####`, else the last box, else the whole cell. Thousands separators of a
    plain number are removed; everything else stays as it is.

    >>> gold_answer("2 + 2 = 4 #### 1,234"), gold_answer("so \\boxed{x}"), gold_answer(7), gold_answer(" ")
    ('1234', 'x', '7', None)
    >>> gold_answer("#### 1,2")
    '1,2'
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        return None
    text = str(value)
    _, mark, after = text.rpartition(ANSWER_MARK)
    if mark:
        number = as_number(after) if "," in after else None
        return (after.strip() if number is None else f"{number:f}") or None
    boxed = last_boxed(text)
    return (text if boxed is None else boxed).strip() or None


def read_question(row: Any, columns: Columns, where: str) -> Question | str:
    """The question of one row, or what is wrong with the row.

    Raises:
        UsageError: the row has no column of that name at all, so the wrong name was given.
    """
    if not isinstance(row, dict):
        raise UsageError(f"{where}: not a JSON object with a question and an answer")
    found = []
    for what, given, usual in (("question", columns.question, QUESTION_COLUMNS), ("answer", columns.answer, ANSWER_COLUMNS)):
        names = [given] if given else [name for name in usual if name in row]
        if not names or names[0] not in row:
            wanted = repr(given) if given else " or ".join(usual)
            raise UsageError(f"{where}: no column {wanted}; it has {', '.join(row)}: name it with --env.{what}_column")
        found.append(names[0])
    question, answer = row[found[0]], row[found[1]]
    if not isinstance(question, str) or not question.strip():
        return f"{where}: {found[0]!r} is empty or no text"
    gold = gold_answer(answer)
    if gold is None or (found[1] == "solution" and last_boxed(str(answer)) is None and ANSWER_MARK not in str(answer)):
        return f"{where}: {found[1]!r} holds no answer: {answer!r:.80}"
    return Question(question.strip(), gold)


def gather(rows: Iterable[tuple[str, Any]], columns: Columns, source: str) -> Questions:
    """The questions of rows; those without an answer are counted, and never asked.

    Raises:
        UsageError: no row has both.
    """
    read = Questions()
    for where, row in rows:
        question = read_question(row, columns, where)
        if isinstance(question, Question):
            read.questions.append(question)
        else:
            read.incomplete += 1
            read.first = read.first or question
    if not read.questions:
        raise UsageError(f"{source} has no question with an answer" + (f" ({read.first})" if read.first else ""))
    return read


def rows_of_file(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row of a file and where it stands; empty lines are left out.

    Raises:
        UsageError: the file cannot be read, or has a broken line, which is named.
    """
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            yield from (
                (f"{path}, row {i}", row) for i, row in enumerate(pyarrow.parquet.read_table(path).to_pylist(), start=1)
            )
            return
        text = path.read_text(encoding="utf-8")
    except ModuleNotFoundError as error:
        raise UsageError(f"{path}: reading Parquet needs the pyarrow package: pip install pyarrow") from error
    except (OSError, ValueError) as error:  # what is no Parquet, or no UTF-8, is a ValueError
        raise UsageError(f"cannot read {path}: {error}") from error
    try:
        if path.suffix == ".json":
            content = json.loads(text)
            if not isinstance(content, list):
                raise UsageError(f"{path}: not a list of rows")
            yield from ((f"{path}, row {i}", row) for i, row in enumerate(content, start=1))
            return
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                yield f"{path}, line {number}", json.loads(line)
    except json.JSONDecodeError as error:
        line = f"line {number}" if path.suffix != ".json" else f"line {error.lineno}"
        raise UsageError(f"{path}, {line}: not JSON ({error.msg} at column {error.colno}); mend or remove it") from error


def read_file(path: Path, columns: Columns = Columns()) -> Questions:
    """All questions of a file: `.jsonl`, `.json` (a list) or `.parquet`.

    Raises:
        UsageError: as `rows_of_file` and `gather`.
    """
    return gather(rows_of_file(path), columns, str(path))


def file_named(folder: Path, name: str) -> Path | None:
    """`name` with one of the known endings, if it is there."""
    return next((path for ending in ENDINGS if (path := folder / f"{name}{ending}").is_file()), None)


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
        if (found := file_named(path, name)) is None:
            raise UsageError(f"{path} has no {name}{ENDINGS[0]} (nor {', '.join(ENDINGS[1:])})")
        files.append(found)
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
        raise EnvironmentFailure(f"the datasets package is not installed: pip install datasets, or {remedy}") from error
    try:
        loaded = [datasets.load_dataset(name, config, split=split) for split in splits]
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EnvironmentFailure(f"cannot load {called} from the Hugging Face hub ({reason}): {remedy}") from error
    return [gather(((f"{called} row {i}", row) for i, row in enumerate(rows)), columns, called) for rows in loaded]


def load_suite(name: str, folder: Path | None) -> Questions:
    """A suite from the folder, or from the hub if there is no folder.

    Raises:
        UsageError: no such suite, or its file is not in the folder; it says what to put where.
        EnvironmentFailure: the hub cannot be reached; likewise.
    """
    suite = SUITES[name]
    remedy = (
        f"put its {suite.split} split ({suite.size} rows, {suite.hub} on the hub) as {name}.jsonl into a folder, one JSON "
        "object a line with `problem` or `question`, and `answer`; and pass --env.suites_folder with that folder"
    )
    if folder is None:
        return load_from_hub(suite.hub, suite.config, [suite.split], remedy=remedy)[0]
    path = file_named(folder, name) or file_named(folder / name, "test")
    if path is None:
        looked = f"{folder / name}.jsonl (or .json, .parquet, or {name}/test.jsonl)"
        raise UsageError(f"--env.suites_folder: the suite {name} is not at {looked}: {remedy}")
    return read_file(path)


def shuffled(questions: Sequence[Question], seed: int) -> list[Question]:
    """In the order of `datasets.Dataset.shuffle(seed=seed)`, which permutes with NumPy's default generator."""
    return [questions[i] for i in np.random.default_rng(seed).permutation(len(questions))]
