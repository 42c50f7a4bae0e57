"""The results of a run: summary.json, the plot and the closing table."""

from __future__ import annotations

import itertools
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from example_trainer.child_processes.files import write_whole
from example_trainer.launcher.quickstart.display import MetricsFile, number
from example_trainer.launcher.quickstart.options import Options


@dataclass
class Phases:
    """Seconds by phase of the run, in the order in which they began."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to a phase."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


@dataclass(frozen=True)
class Evaluation:
    """Greedy answers to held-out problems.

    Attributes:
        accuracy: fraction correct.
        problems: how many there were.
        response_length: mean tokens per response.
        weight_version: the oldest version of the weights that answered; None if the server named
            none.
        tool_use: fraction of the problems for which a tool was used; None of an environment that
            has none.
    """

    accuracy: float
    problems: int
    response_length: float
    weight_version: int | None
    tool_use: float | None = None


def span(seconds: float) -> str:
    """`8.3 s` or `2 min 31 s`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def machine() -> str:
    """The hardware in a few words."""
    return f"{len(os.sched_getaffinity(0))} CPU cores"


def summarise(
    options: Options, metrics: MetricsFile, before: Evaluation, after: Evaluation, phases: Phases
) -> dict[str, Any]:
    """Return the contents of summary.json.

    Args:
        options: what was asked for.
        metrics: the trainer's metrics.
        before, after: the two evaluations.
        phases: times, among them `train`.
    """
    last = metrics.steps[-1]
    return {
        "eval_before": before.accuracy,
        "eval_after": after.accuracy,
        "steps": len(metrics.steps),
        "weight_updates": weight_updates(metrics),
        "params_mapped": last.get("params_mapped"),
        "params_total": last.get("params_total"),
        "bridge": options.bridge,
        "seconds_setup": round(options.seconds_setup, 1),
        "seconds_train": round(phases.seconds["train"], 1),
        # beyond what is promised
        "eval_problems": after.problems,
        "response_length_before": before.response_length,
        "response_length_after": after.response_length,
        "reward_first": metrics.steps[0].get("reward_mean"),
        "reward_last": last.get("reward_mean"),
        "weight_version": after.weight_version,
        "checksum": last.get("checksum"),
        "tokens_trained": int(metrics.total("tokens")),
        "bytes_moved": int(metrics.total("bytes_moved")),
        "seconds_by_phase": {name: round(seconds, 1) for name, seconds in phases.seconds.items()},
        "seconds_trainer": {
            name: round(metrics.total(f"seconds_{name}"), 1) for name in ("wait", "train", "sync")
        },
        "environment": options.environment,
        "tool_use_before": before.tool_use,
        "tool_use_after": after.tool_use,
        "model": options.model,
        "device": options.device,
        "lr": options.lr,
        "seed": options.seed,
        "machine": f"{machine()}, {platform.machine()}, Python {platform.python_version()}",
    }


def weight_updates(metrics: MetricsFile) -> int:
    """Count the steps that ended with vLLM serving a newer version than before that step."""
    versions = [number(step, "weight_version") for step in metrics.steps]
    known = [0.0, *(version for version in versions if version is not None)]
    return sum(later > earlier for earlier, later in itertools.pairwise(known))


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write the summary so that a reader never sees half of it."""
    write_whole(path, (json.dumps(summary, indent=2) + "\n").encode())


def subtitle(summary: dict[str, Any]) -> str:
    """The line above the plot."""
    return (
        f"{summary['steps']} GRPO steps in {span(summary['seconds_train'])} on "
        f"{machine() if summary['device'] == 'cpu' else 'GPU'} · vLLM's weights updated {summary['weight_updates']} times "
        f"({summary['bridge']}) · seed {summary['seed']}, learning rate {summary['lr']:g}"
    )


def changed_answer(logs: Path) -> tuple[str, str, str] | None:
    """A held-out problem that only the trained model solved: question, answer before, answer after.

    An answer of several turns is all that came after the question. None if there is no such
    problem, or the evaluations kept no samples.
    """
    answers = []
    for which in ("before", "after"):
        path = logs / f"evaluation-{which}.samples.jsonl"
        if not path.exists():
            return None
        # Only a line feed ends a line: a model's answer may hold U+2028, which splitlines takes for
        # an end.
        answers.append([json.loads(line) for line in path.read_bytes().split(b"\n") if line])
    for before, after in zip(*answers, strict=True):
        if after["correct"] and not before["correct"]:
            return before["question"], *(
                " → ".join(said(sample["messages"])) for sample in (before, after)
            )
    return None


def said(messages: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the messages of the model and its tools, in order."""
    return [
        message["content"].strip()
        for message in messages
        if message["role"] in ("assistant", "tool")
    ]


def print_example(console: Console, question: str, before: str, after: str) -> None:
    """One problem with the answers before and after training."""
    console.print(f"\n[bold]{escape(question)}[/bold]", highlight=False)
    console.print(f"  before  [red]{escape(before)}[/red]", highlight=False)
    console.print(f"  after   [green]{escape(after)}[/green]\n", highlight=False)


def print_closing_table(
    console: Console, summary: dict[str, Any], paths: Mapping[str, Path | str]
) -> None:
    """The small table at the end and where everything lies."""

    results = Table(
        header_style="bold",
        title=f"{summary['eval_problems']} held-out problems, greedy",
        title_justify="left",
    )
    for name in ("", "before", "after"):
        results.add_column(name, justify="left" if not name else "right")
    results.add_row(
        "solved", f"{summary['eval_before']:.1%}", f"[bold]{summary['eval_after']:.1%}[/bold]"
    )
    results.add_row(
        "mean response length (tokens)",
        f"{summary['response_length_before']:.1f}",
        f"{summary['response_length_after']:.1f}",
    )
    if summary["tool_use_after"] is not None:
        results.add_row(
            "used the tool", *(f"{summary[f'tool_use_{when}']:.1%}" for when in ("before", "after"))
        )
    console.print(results)

    facts = Table(show_header=False)
    facts.add_column()
    facts.add_column(justify="right")
    facts.add_row("optimizer steps", str(summary["steps"]))
    facts.add_row(f"weight updates of vLLM ({summary['bridge']})", str(summary["weight_updates"]))
    facts.add_row("parameters mapped", f"{summary['params_mapped']}/{summary['params_total']}")
    facts.add_section()
    facts.add_row("set-up", span(summary["seconds_setup"]))
    for name, seconds in summary["seconds_by_phase"].items():
        facts.add_row(name, span(seconds))
        if name == "train":
            for part, part_seconds in summary["seconds_trainer"].items():
                facts.add_row(f"    of it {part}", span(part_seconds))
    console.print(facts)
    width = max(len(name) for name in paths)
    for name, path in paths.items():
        console.print(f"{name:<{width}}  {path}", highlight=False, soft_wrap=True)
