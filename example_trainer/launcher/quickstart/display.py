"""Follow the metrics of a run, and show them: a table that updates itself in a terminal, plain lines anywhere else."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from example_trainer.launcher.command_line import LauncherError

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
            LauncherError: a line is not a JSON object.
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
                    f"{self.path}: line {len(self.steps) + len(new) + 1} is not a JSON object: "
                    f"{line[:80]!r}"
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

    A step has the reward (+1 for a right answer, -1 for a wrong one) and the response length. It
    has the use of tools if there are any. The environment may drop groups whose answers are all
    right. Rewards in the trainer's own metrics then stay near the middle while the model gets
    better.

    If several lines have the same step, only the first counts. At the end of a run, the environment
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
            if (used := number(line, TOOL_USE)) is not None:
                step["tool_use"] = used
            steps.append(step)
    return steps


COLUMNS = (
    "step",
    "solved",
    "reward",
    "loss",
    "KL",
    "entropy",
    "length",
    "tokens/s",
    "queue",
    "age",
    "version",
)
ROWS = 12
"""Steps that the live table shows."""


def columns(tools: bool) -> tuple[str, ...]:
    """Names of the columns; the use of tools has one where there are any."""
    if tools:
        return (*COLUMNS[:2], "used tool", *COLUMNS[2:])
    return COLUMNS


def cells(step: Step, tools: bool = False) -> tuple[str, ...]:
    """One line of metrics as text, in the order of the columns; a missing value is a dash.

    `solved` is the share of right answers among all that were sampled. The trainer's own reward is
    over the groups that it trained on: they have something to learn from.
    """

    def text(key: str, form: str) -> str:
        value = number(step, key)
        return "-" if value is None else format(value, form)

    return (
        text("step", ".0f"),
        text("solved", ".0%"),
        *([text("used", ".0%")] if tools else []),
        text("reward_mean", "+.3f"),
        text("loss", "+.4f"),
        text("kl", ".1e"),
        text("entropy", ".3f"),
        text("response_length_mean", ".1f"),
        text("tokens_per_second", ",.0f"),
        text("queue_size", ".0f"),
        f"{text('age_mean', '.1f')}/{text('age_max', '.0f')}",
        text("weight_version", ".0f"),
    )


def plain_line(step: Step, steps: int, tools: bool = False) -> str:
    """One line of metrics for a log."""
    first, *rest = cells(step, tools)
    return f"step {first}/{steps}  " + "  ".join(
        f"{name} {cell}" for name, cell in zip(columns(tools)[1:], rest, strict=True)
    )


class TrainingDisplay:
    """Shows steps as they come. Use as a context manager.

    Args:
        console: where to; the live table needs a terminal.
        steps: how many there will be.
        seconds_between_lines: without a terminal, the least time between two lines; first and last
            step always show.
        tools: whether the environment has any.
    """

    def __init__(
        self, console: Console, steps: int, seconds_between_lines: float = 2.0, tools: bool = False
    ) -> None:
        self.console, self.steps, self.pause, self.tools = (
            console,
            steps,
            seconds_between_lines,
            tools,
        )
        self.shown: list[Step] = []
        self.last_line = -float("inf")
        self.live: Live | None = None
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.task = self.bar.add_task("training", total=steps)

    def table(self) -> Table:
        """The last steps."""
        table = Table(
            header_style="bold",
            caption="solved: of all answers sampled; reward: of those trained on; age: in weight versions, mean/max",
        )
        for name in columns(self.tools):
            table.add_column(name, justify="right")
        for step in self.shown[-ROWS:]:
            table.add_row(*cells(step, self.tools))
        return table

    def add(self, new: list[Step]) -> None:
        """Show these steps, too."""
        for step in new:
            self.shown.append(step)
            self.bar.update(self.task, completed=len(self.shown))
            if self.live is None:
                now = time.monotonic()
                if len(self.shown) in (1, self.steps) or now - self.last_line >= self.pause:
                    self.console.print(
                        plain_line(step, self.steps, self.tools), highlight=False, soft_wrap=True
                    )
                    self.last_line = now
        if new and self.live is not None:
            self.live.update(Group(self.table(), self.bar))

    def __enter__(self) -> TrainingDisplay:
        if self.console.is_terminal:
            self.live = Live(
                Group(self.table(), self.bar), console=self.console, refresh_per_second=4
            )
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live is not None:
            self.live.stop()
