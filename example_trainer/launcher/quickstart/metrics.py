"""Follow the trainer's metrics file while it is being written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from example_trainer.launcher.errors import LauncherError

Step = dict[str, Any]
"""One line of the trainer's metrics.jsonl."""

SHARE = "train/percent_correct"
"""The environment's name for the fraction of right answers among those sampled since its last
line."""
TOOL_USE = "train/tool_use"
"""Its name for the fraction of answers that used a tool; only where there are tools."""


@dataclass
class MetricsFile:
    """Reads a growing JSON lines file. A line counts once its line feed is there.

    Attributes:
        path: the file; it need not exist yet.
        steps: every line so far.
    """

    path: Path
    steps: list[Step] = field(default_factory=list)
    position: int = 0

    def read_new(self) -> list[Step]:
        """The lines that were added since the last call.

        Raises:
            LauncherError: a line is no JSON object.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.position += len(whole)
        new: list[Step] = []
        for line in whole.splitlines():
            try:
                step = json.loads(line)
            except ValueError:
                step = None
            if not isinstance(step, dict):
                raise LauncherError(
                    f"{self.path}: line {len(self.steps) + len(new) + 1} is no JSON object: {line[:80]!r}"
                )
            new.append(step)
        self.steps += new
        return new

    def total(self, key: str) -> float:
        """Sum of one column."""
        return sum(number(step, key) or 0.0 for step in self.steps)


def number(step: Step, key: str) -> float | None:
    """One column of a line as a number; None if it is missing or null."""
    value = step.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def sampled(environment: list[Step]) -> list[Step]:
    """Return the environment's lines as steps to plot, over every answer that was sampled.

    A step has the reward (+1 for a right answer, -1 for a wrong one), the response length, and the
    use of tools if there are any. The environment may drop groups whose answers are all right.
    Rewards in the trainer's own metrics then stay near the middle while the model gets better.

    Of several lines with the same step, only the first counts: at the end of a run, the environment
    reports the few answers that came after the trainer's last batch.
    """
    steps: list[Step] = []
    for line in environment:
        correct = number(line, SHARE)
        if correct is not None and (not steps or steps[-1]["step"] != line.get("step")):
            length = number(line, "train/response_length")
            step = {
                "step": line.get("step"),
                "reward_mean": 2 * correct - 1,
                "response_length_mean": length,
            }
            used = number(line, TOOL_USE)
            steps.append(step if used is None else step | {"tool_use": used})
    return steps
