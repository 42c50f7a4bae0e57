"""The questions of GSM8K, from local JSON lines or from the Hugging Face hub."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atroposlib.errors import EnvironmentFailure, UsageError

HUB_NAME, HUB_CONFIG = "gsm8k", "main"
ANSWER_MARK = "####"


@dataclass(frozen=True)
class Question:
    """A question and its gold answer, a number without thousands separators."""

    question: str
    gold: str


def read_row(row: Any, where: str) -> Question:
    """Check one row; the gold answer is the text after the last `####`.

    Raises:
        UsageError: says where, and what is wrong.
    """
    if not isinstance(row, dict):
        raise UsageError(f"{where}: not a JSON object with `question` and `answer`")
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise UsageError(f"{where}: {field!r} is missing or no text")
    _, mark, gold = row["answer"].rpartition(ANSWER_MARK)
    gold = gold.strip().replace(",", "")
    if not mark or not gold:
        raise UsageError(f"{where}: 'answer' has no final answer after {ANSWER_MARK}")
    return Question(row["question"].strip(), gold)


def read_file(path: Path) -> list[Question]:
    """All questions of a JSON lines file; empty lines are left out.

    Raises:
        UsageError: the file cannot be read, is empty, or has a broken line, which is named.
    """
    questions = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--env.dataset_path: cannot read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}); mend or remove it"
            ) from error
        questions.append(read_row(row, f"{path}, line {number}"))
    if not questions:
        raise UsageError(f"--env.dataset_path: {path} has no questions")
    return questions


def load_from_path(path: Path) -> tuple[list[Question], list[Question]]:
    """Train and test questions from a folder with train.jsonl and test.jsonl, or both from one file.

    Raises:
        UsageError: as `read_file`.
    """
    if path.is_dir():
        return read_file(path / "train.jsonl"), read_file(path / "test.jsonl")
    questions = read_file(path)
    return questions, questions


def load_from_hub() -> tuple[list[Question], list[Question]]:
    """Train and test questions from the hub, or from its cache on this machine.

    Raises:
        EnvironmentFailure: neither can be had.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise EnvironmentFailure(
            "the datasets package is not installed: pip install datasets, or pass --env.dataset_path"
        ) from error
    try:
        both = [datasets.load_dataset(HUB_NAME, HUB_CONFIG, split=split) for split in ("train", "test")]
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentFailure(
            f"cannot load {HUB_NAME}/{HUB_CONFIG} from the Hugging Face hub ({reason}): "
            "pass --env.dataset_path with a folder that holds train.jsonl and test.jsonl"
        ) from error
    train, test = ([read_row(row, f"{HUB_NAME} row {i}") for i, row in enumerate(rows)] for rows in both)
    return train, test


def shuffled(questions: Sequence[Question], seed: int) -> list[Question]:
    """In the order of `datasets.Dataset.shuffle(seed=seed)`, which permutes with NumPy's default generator."""
    return [questions[i] for i in np.random.default_rng(seed).permutation(len(questions))]
