"""Where the results of evaluations go: evaluations.jsonl, a line in the log, scalars for
dashboards.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from atroposlib.utils.files import KeptLines
from example_trainer.batch.environment_names import safe_name
from example_trainer.batch.evaluations import Evaluation

logger = logging.getLogger(__name__)

_OWN = "eval/"
"""What names of metrics begin with in many environments, and all names on dashboards do here."""


class EvaluationFile:
    """A line of JSON for each evaluation, in the file when `write` returns, unless the disk is
    full: then it waits in memory.

    Args:
        path: the file. A new run moves that of an earlier one aside, as it does with metrics.jsonl.
        continued: whether the run is resumed. What is in the file then stays, later steps than the
            one resumed from too: the weights that were measured there were those, even if they have
            been learned anew. Lines that cannot be read stay, with a warning; half a line at the
            end, as of a trainer that was killed, is cut off.
    """

    def __init__(self, path: Path, continued: bool) -> None:
        self.seen: list[tuple[int, float]] = []
        """Keys of the evaluations that are in the file already, in their order."""
        if path.exists() and not continued:
            move_aside(path)
        elif path.exists():
            self._continue(path)
        self._file = KeptLines(path)

    def _continue(self, path: Path) -> None:
        *lines, half = path.read_bytes().split(b"\n")
        unreadable = []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                self.seen.append((int(row["id"]), float(row["time"])))
            except (ValueError, KeyError, TypeError, OverflowError):
                unreadable.append(number)
        if unreadable:
            logger.warning(
                "%d lines of %s are no evaluations, the first is line %d; they stay, and are passed over",
                len(unreadable), path, unreadable[0],
            )  # fmt: skip
        if half:
            os.truncate(
                path, path.stat().st_size - len(half)
            )  # in place: there is no moment without what is whole

    def write(self, step: int, evaluation: Evaluation) -> None:
        """Add one. `step` is that of the trainer when it learned of it."""
        self._file.write(json.dumps(vars(evaluation) | {"step": step}).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def evaluation_line(evaluation: Evaluation) -> str:
    """One line for people: `Evaluation gsm8k_0 at version 12: eval/percent_correct 0.412 …`."""
    version = "?" if evaluation.weight_version is None else evaluation.weight_version
    numbers = "  ".join(f"{name} {value:.4g}" for name, value in sorted(evaluation.metrics.items()))
    return " ".join(
        f"Evaluation {evaluation.name} at version {version}: {numbers or 'no numbers'}".splitlines()
    )


def scalars(evaluation: Evaluation) -> tuple[str, dict[str, float]]:
    """What the axis of its weight version is called, and its numbers, by names for dashboards:
    `eval/<name>/<metric>`.
    """
    prefix = f"{_OWN}{safe_name(evaluation.name)}/"
    return f"{prefix}weight_version", {
        prefix + name.removeprefix(_OWN): value for name, value in evaluation.metrics.items()
    }


def move_aside(path: Path) -> Path:
    """Rename an earlier run's `name.jsonl` to the first free `name.<number>.jsonl`."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)
