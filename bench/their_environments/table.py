"""The tables of docs/environments.md about environment files of the public repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.bridge_figures import markdown
from bench.results_book import Book, commit_of
from bench.their_environments.cases import CASES, NOT_RUN

RESULTS = "their_environments"
COMMANDS = {"serve": "training", "process": "`process`", "evaluate": "evaluation"}
VERDICTS = {"same": "same", "differs": "differs", "nothing": "nothing to compare"}


def their_environments(book: Book) -> str:
    """Return how many files ran with both SDKs, those with equal results by command, and a row for each other one."""
    found = book.get(RESULTS, "cases")
    runs = [found[case.name] for case in CASES if case.name in found]
    files = {row["file"] for row in runs if row["verdict"] != "nothing"}
    same = [row for row in runs if row["verdict"] == "same"]
    groups, sequences = (sum(row[name][1] for row in same) for name in ("groups", "sequences"))
    days = sorted(row["measured"]["date"].split()[0] for row in runs)
    commits = sorted({commit_of(row["measured"]) for row in runs})
    total = f"{len(files)} files in {len(runs)} runs, {len(same)} of them the same number for number ({groups} groups, "
    total += f"{sequences} sequences). Run on {days[-1]}, {', '.join(commits)}."
    equal = "\n".join(
        f"- {title}: {names_of([row for row in same if row['command'] == command])}." for command, title in COMMANDS.items()
    )
    other = [[name_of(row), f"{VERDICTS[row['verdict']]}: {row['why']}"] for row in runs if row["verdict"] != "same"]
    return f"{total}\n\nThe same:\n\n{equal}\n\n{markdown(['file', 'public and ours'], other)}"


def name_of(row: Mapping[str, Any]) -> str:
    return f"`{row['file'].removeprefix('environments/')}`"


def names_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return each file once, in the order of the runs."""
    return ", ".join(dict.fromkeys(map(name_of, rows)))


def not_run(book: Book) -> str:
    """Files that cannot run here, and what they would need."""
    return markdown(["file", "what it would need"], [[f"`{name}`", why] for name, why in NOT_RUN.items()])


NAMED = {"their_environments": their_environments, "their_environments_not_run": not_run}
