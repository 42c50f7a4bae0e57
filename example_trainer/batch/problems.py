r"""Questions with a number for an answer, for `simple_rl.py`: sums made on the fly, a file such as GSM8K's, or a `Task`."""

from __future__ import annotations

import importlib
import itertools
import logging
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.errors import UsageError
from atroposlib.inference.responses import answer_part
from atroposlib.utils.jsonl import BadRow, Row, rows_of_file, usable_rows
from atroposlib.utils.math_scoring import as_number, last_boxed
from example_trainer.errors import ConfigError

logger = logging.getLogger(__name__)

ANSWER_MARK = "####"
"""GSM8K's final answer stands behind it."""
INSTRUCTION = "\n\nReason step by step, and put the final answer within \\boxed{}."
"""Behind each question of a file; the starter model does so unasked."""
GSM8K = "openai/gsm8k"
"""Grade school math on the Hugging Face hub (Cobbe et al., arXiv:2110.14168); its test split is
held out."""
HELD_OUT_ONE_IN = 10
"""One pair of operands in this many is held out."""


@dataclass(frozen=True)
class Problem:
    """A question, and its answer as text that `as_number` reads."""

    question: str
    answer: str

    def score(self, text: str, opened: str = "") -> float:
        r"""Return +1 if the last \boxed{} outside of the reasoning holds the answer, else -1.

        Args:
            text: the response.
            opened: what the prompt opened; see `atroposlib.inference.responses.opened_by`.
        """
        found = last_boxed(answer_part(text, opened))
        number = None if found is None else as_number(found)
        return 1.0 if number is not None and number == as_number(self.answer) else -1.0


@dataclass(frozen=True)
class Task:
    """Problems to train on, and others to measure with.

    Attributes:
        training: an endless stream, the same for the same seed.
        held_out: problems that are not in the stream, the same ones each time; None where there are
            none.
    """

    training: Callable[[int], Iterator[Problem]]
    held_out: Callable[[int], Sequence[Problem]] | None = None


def find_task(name: str | None, digits: int = 2) -> Task:
    """Return what --problems names: a task as `module:name`, GSM8K, or a file of problems; sums of
    so many digits if nothing.

    Raises:
        ConfigError: the task or file does not exist, the file holds no problems, or the hub cannot be
            reached.
    """
    if name is None:
        return Task(lambda seed: sums(seed, digits), lambda count: held_out_sums(count, digits))
    module, colon, attribute = name.partition(":")
    if colon and all(part.isidentifier() for part in [*module.split("."), attribute]):
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"--problems {name}: {error}; give a file, or module:name of a Task"
            ) from error
        if not isinstance(found, Task):
            raise ConfigError(
                f"--problems {name} is of type {type(found).__name__}; give a Task of batch/problems.py"
            )
        return found
    if name == GSM8K and not Path(name).exists():
        return gsm8k()
    problems = read_problems(Path(name))
    return Task(lambda seed: _shuffled(problems, random.Random(seed)))


def sums(seed: int, digits: int = 2) -> Iterator[Problem]:
    """Yield additions and subtractions without end, the same for the same seed. None of them is in
    `held_out_sums`.

    Args:
        digits: of each operand, at most.
    """
    return (problem for problem, held_out in _sums(random.Random(seed), digits) if not held_out)


def held_out_sums(count: int, digits: int = 2) -> list[Problem]:
    """Return the first held-out sums, always the same ones, no question twice.

    Args:
        count: at most so many; operands of one digit have only a few.
        digits: of each operand, at most.
    """
    draws = itertools.islice(_sums(random.Random("held-out sums"), digits), 100 * (count + 100))
    distinct = dict.fromkeys(problem for problem, held_out in draws if held_out)
    return list(distinct)[:count]


def _sums(rng: random.Random, digits: int) -> Iterator[tuple[Problem, bool]]:
    """Yield sums, and whether each is held out.

    A hash of the two operands decides, whichever operation they are in.
    """
    while True:
        left, right = sorted((rng.randrange(10**digits), rng.randrange(10**digits)), reverse=True)
        held_out = zlib.crc32(f"{left} {right}".encode()) % HELD_OUT_ONE_IN == 0
        if rng.random() < 0.5:
            yield Problem(f"What is {left} plus {right}?", str(left + right)), held_out
        else:
            yield Problem(f"What is {left} minus {right}?", str(left - right)), held_out


def read_problems(path: Path) -> list[Problem]:
    """Return the problems of a data file with the columns `question` and `answer`.

    A row that is not such a problem is skipped, and the log names the first one.

    Args:
        path: JSON lines, JSON or Parquet. An answer is a number, or has one behind `####`, as in
            GSM8K.

    Raises:
        ConfigError: the file cannot be read, or none of its rows is a problem.
    """
    try:
        return _problems(rows_of_file(path), str(path))
    except UsageError as error:
        raise ConfigError(f"--problems: {error}") from error


def _problems(given: Iterable[Row], source: str) -> list[Problem]:
    rows = usable_rows(given, _read)
    if not rows.good:
        first = f" ({rows.faults[0]})" if rows.faults else ""
        raise ConfigError(
            f"--problems: {source} holds no problem{first}; give rows with question and answer"
        )
    if rows.faults:
        total = len(rows.good) + len(rows.faults)
        logger.warning(
            "--problems: %d of %d rows are skipped; the first: %s",
            len(rows.faults),
            total,
            rows.faults[0],
        )
    return rows.good


def gsm8k() -> Task:
    """Return GSM8K from the Hugging Face hub, or from its cache on this machine.

    Raises:
        ConfigError: it cannot be had; one line with the reason and the remedy.
    """
    remedy = "give --problems with a file of JSON lines that have question and answer"
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{GSM8K} needs the datasets package: `pip install datasets`, or {remedy}"
        ) from error
    try:
        splits = {
            name: datasets.load_dataset(GSM8K, "main", split=name) for name in ("train", "test")
        }
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"cannot load {GSM8K} from the Hugging Face hub ({reason}); {remedy}"
        ) from error
    train, test = (
        _problems(
            (Row(f"{GSM8K} {name} row {number}", row) for number, row in enumerate(rows)),
            f"{GSM8K}, {name} split",
        )
        for name, rows in splits.items()
    )
    return Task(lambda seed: _shuffled(train, random.Random(seed)), lambda count: test[:count])


def _read(row: Any) -> Problem:
    if not isinstance(row, dict) or not isinstance(row.get("question"), str) or "answer" not in row:
        raise BadRow("not a JSON object with the text `question` and an `answer`")
    answer = str(row["answer"]).rpartition(ANSWER_MARK)[2].strip()
    if as_number(answer) is None:
        raise BadRow(f"the answer {answer!r:.80} is not a number")
    return Problem(row["question"] + INSTRUCTION, answer)


def _shuffled(problems: list[Problem], rng: random.Random) -> Iterator[Problem]:
    """All of them again and again, in another order each time."""
    while True:
        order = list(problems)
        rng.shuffle(order)
        yield from order
