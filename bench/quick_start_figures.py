"""Tables of the quick starts: the README's closing lines, the range of its runs, and the
calculator's runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.bridge_figures import markdown, sources
from bench.results_book import Book

SHOWN = "seed 0"
"""Row of quick_starts.json that the README shows; seed 0 is the default."""


def span(seconds: float) -> str:
    """Return `2 min 41 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def quickstart_table(book: Book) -> str:
    """Return the closing lines of a quick start, as the README shows them."""
    run = book.get("quick_starts", SHOWN)
    book.measured("quick_starts", SHOWN)
    before, after = (f"{run[f'eval_{when}']:.1%}" for when in ("before", "after"))
    lengths = [f"{run[f'response_length_{when}']:.1f}" for when in ("before", "after")]
    title = f"{run['eval_problems']} held-out problems, greedy"
    facts = {
        "optimizer steps": str(run["steps"]),
        f"weight updates of vLLM ({run['bridge']})": str(run["weight_updates"]),
        "parameters mapped": f"{run['params_mapped']}/{run['params_total']}",
    }
    lines = [
        f"{title:<34}{'before':>7}{'after':>9}",
        f"{'solved':<34}{before:>7}{after:>9}",
        f"{'mean response length (tokens)':<34}{lengths[0]:>7}{lengths[1]:>9}",
        "",
        *(f"{name:<34}{value:>7}" for name, value in facts.items()),
        f"{'train':<31}{span(run['seconds_train']):>10}",
    ]
    return "```\n" + "\n".join(lines) + "\n```"


def quick_starts(book: Book) -> dict[str, dict[str, Any]]:
    """Return the rows of quick_starts.json, sorted by seed."""
    runs: dict[str, dict[str, Any]] = book.page("quick_starts")
    for name in runs:
        book.measured("quick_starts", name)
    return dict(sorted(runs.items(), key=lambda item: (item[1]["seed"], item[0])))


def quick_start_range(book: Book) -> str:
    """Return one clause about all runs: their number, the load of the machine and the range of
    their ends.
    """
    runs = quick_starts(book).values()
    ends = [run["eval_after"] for run in runs]
    loads = [run["load"]["mean"] for run in runs]
    cpus = {run["machine"]["cpus"] for run in runs}
    return (
        f"All {len(ends)} runs on {max(cpus)} cores, at a load of {min(loads):.0f} to {max(loads):.0f}, ended between "
        f"{min(ends):.1%} and {max(ends):.1%}"
    )


def calculator_table(book: Book) -> str:
    """Return the table of the quick starts in the calculator's environment."""
    if not book.has("calculator"):
        return "Not measured yet."
    runs = book.page("calculator")
    head = ["", "solved before", "after", "used the tool before", "after", "steps", "run"]
    rows = []
    for name, run in sorted(runs.items()):
        row = [f"{run[f'eval_{when}']:.1%}" for when in ("before", "after")]
        row += [f"{run[f'tool_use_{when}']:.1%}" for when in ("before", "after")]
        label = name.replace(" flat", ", learning rate 0")
        rows.append([label, *row, str(run["steps"]), span(run["seconds"])])
    problems = {run["eval_problems"] for run in runs.values()}
    note = f"Of {max(problems)} held-out problems, answered greedily, on two cores."
    return f"{markdown(head, rows)}\n\n{note} {sources(book, {name: ('calculator', name) for name in runs})}"


NAMED: dict[str, Callable[[Book], str]] = {
    "quickstart_table": quickstart_table,
    "quick_start_range": quick_start_range,
    "calculator_table": calculator_table,
    "quickstart_in_all": lambda book: span(book.number("quickstart", "fresh_clone/seconds_in_all")),
}
"""Functions by the name that stands in the documents."""
