"""The tables of docs/environments.md about environment files of the public repository."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.bridge_figures import markdown
from bench.results_book import Book, commit_of
from bench.their_environments.cases import CASES, NOT_RUN

RESULTS = "their_environments"
VERDICTS = {"same": "same", "differs": "differs", "nothing": "nothing to compare"}


def their_environments(book: Book) -> str:
    """One row for each file that ran, with both SDKs."""
    found = book.get(RESULTS, "cases")
    rows = [row_of(found[case.name]) for case in CASES if case.name in found]
    head = ["file (`environments/…`)", "what it is", "compared", "public and ours", "what differs, and why"]
    files = {row["file"] for row in found.values() if row["verdict"] != "nothing"}
    same = sum(row["verdict"] == "same" for row in found.values())
    days = sorted(row["measured"]["date"].split()[0] for row in found.values())
    commits = sorted({commit_of(row["measured"]) for row in found.values()})
    told = f"{len(files)} files in {len(found)} runs, {same} of them the same number for number. Run on {days[-1]}, "
    return f"{markdown(head, rows)}\n\n{told}{', '.join(commits)}."


def row_of(row: Mapping[str, Any]) -> list[str]:
    if row["command"] == "evaluate":
        compared = "metrics and samples"
    else:
        turns = f", up to {row['turns']} answers each" if row["turns"] > 1 else ""
        compared = f"{row['groups'][1]} groups, {row['sequences'][1]} sequences{turns}"
    name = row["file"].removeprefix("environments/")
    return [f"`{name}`", row["kind"], compared, VERDICTS[row["verdict"]], row["why"]]


def not_run(book: Book) -> str:
    """Files that cannot run here, and what they would need."""
    return markdown(["file", "what it would need"], [[f"`{name}`", why] for name, why in NOT_RUN.items()])


NAMED = {"their_environments": their_environments, "their_environments_not_run": not_run}
