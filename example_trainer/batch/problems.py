r"""Questions with a number for an answer, for `simple_rl.py`: sums made on the fly, or a file such as GSM8K's."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atroposlib.utils.boxed import last_boxed
from atroposlib.utils.math_scoring import as_number
from example_trainer.errors import ConfigError

ANSWER_MARK = "####"
"""GSM8K's final answer stands behind it."""
INSTRUCTION = "\n\nReason step by step, and put the final answer within \\boxed{}."
"""Behind each question of a file; the starter model does so unasked."""


@dataclass(frozen=True)
class Problem:
    """A question, and its answer as text that `as_number` reads."""

    question: str
    answer: str

    def score(self, text: str) -> float:
        r"""+1 if the last \boxed{} of the text holds the answer, else -1."""
        found = last_boxed(text)
        number = None if found is None else as_number(found)
        return 1.0 if number is not None and number == as_number(self.answer) else -1.0


def sums(seed: int, digits: int = 2) -> Iterator[Problem]:
    """An endless stream of additions and subtractions, the same for the same seed.

    Args:
        digits: of each operand, at most.
    """
    rng = random.Random(seed)
    while True:
        left, right = sorted((rng.randrange(10**digits), rng.randrange(10**digits)), reverse=True)
        if rng.random() < 0.5:
            yield Problem(f"What is {left} plus {right}?", str(left + right))
        else:
            yield Problem(f"What is {left} minus {right}?", str(left - right))


def from_file(path: Path, seed: int) -> Iterator[Problem]:
    """The problems of a JSON lines file with `question` and `answer`, shuffled anew each time round.

    Args:
        path: an answer is a number, or has one behind `####`, as in GSM8K.

    Raises:
        ConfigError: the file cannot be read, is empty, or has a line that is no such problem (the line is named).
    """
    problems = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--problems: cannot read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            problems.append(_read(line, f"--problems: {path} line {number}"))
    if not problems:
        raise ConfigError(f"--problems: {path} holds no problem; give JSON lines with question and answer")
    return _shuffled(problems, random.Random(seed))


def _read(line: str, where: str) -> Problem:
    try:
        row = json.loads(line)
        question, answer = row["question"], str(row["answer"]).rpartition(ANSWER_MARK)[2].strip()
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{where} is no JSON object with question and answer ({error})") from error
    if not isinstance(question, str) or as_number(answer) is None:
        raise ConfigError(f"{where}: the answer {answer!r} is no number, and the question must be text")
    return Problem(question + INSTRUCTION, answer)


def _shuffled(problems: list[Problem], rng: random.Random) -> Iterator[Problem]:
    while True:
        order = list(problems)
        rng.shuffle(order)
        yield from order
