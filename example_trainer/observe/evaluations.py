"""Where the results of evaluations go: evaluations.jsonl, a line in the log, scalars for dashboards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from example_trainer.batch.environment_names import safe_name
from example_trainer.batch.evaluations import Evaluation

_OWN = "eval/"
"""What names of metrics begin with in many environments, and all names on dashboards do here."""


class EvaluationFile:
    """A line of JSON for each evaluation, on the disk when `write` returns.

    Args:
        path: the file. A new run moves that of an earlier one aside, as it does with metrics.jsonl.
        continued: whether the run is resumed. What is in the file then stays, later steps than the one resumed from too: the
            weights that were measured there were those, even if they have been learned anew.
    """

    def __init__(self, path: Path, continued: bool) -> None:
        rows: list[dict[str, Any]] = []
        if path.exists() and not continued:
            move_aside(path)
        elif path.exists():
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # killed while it wrote
            rows = [json.loads(line) for line in whole.splitlines()]
            if whole != text:
                path.write_text(whole, encoding="utf-8")
        self.seen = [(int(row["id"]), float(row["time"])) for row in rows]
        """Keys of the evaluations that are in the file already, in their order."""
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, evaluation: Evaluation) -> None:
        """Add one. `step` is that of the trainer when it learned of it."""
        self._file.write(json.dumps(vars(evaluation) | {"step": step}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def evaluation_line(evaluation: Evaluation) -> str:
    """One line for people: `Evaluation gsm8k_0 at version 12: eval/percent_correct 0.412 …`."""
    version = "?" if evaluation.weight_version is None else evaluation.weight_version
    numbers = "  ".join(f"{name} {value:.4g}" for name, value in sorted(evaluation.metrics.items()))
    return " ".join(f"Evaluation {evaluation.name} at version {version}: {numbers or 'no numbers'}".splitlines())


def scalars(evaluation: Evaluation) -> tuple[str, dict[str, float]]:
    """What the axis of its weight version is called, and its numbers, by names for dashboards: `eval/<name>/<metric>`."""
    prefix = f"{_OWN}{safe_name(evaluation.name)}/"
    return f"{prefix}weight_version", {prefix + name.removeprefix(_OWN): value for name, value in evaluation.metrics.items()}


def move_aside(path: Path) -> Path:
    """Rename an earlier run's `name.jsonl` to the first free `name.<number>.jsonl`."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)
