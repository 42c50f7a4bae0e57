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
    """Return one row for each file that ran with both SDKs, and their sum."""
    found = book.get(RESULTS, "cases")
    runs = [found[case.name] for case in CASES if case.name in found]
    files = {row["file"] for row in runs if row["verdict"] != "nothing"}
    same = [row for row in runs if row["verdict"] == "same"]
    groups, sequences = (sum(row[name][1] for row in same) for name in ("groups", "sequences"))
    days = sorted(row["measured"]["date"].split()[0] for row in runs)
    commits = sorted({commit_of(row["measured"]) for row in runs})
    total = f"{len(files)} files in {len(runs)} runs, {len(same)} of them the same number for number ({groups} groups, "
    total += f"{sequences} sequences). Run on {days[-1]}, {', '.join(commits)}."
    table = markdown(["file (`environments/…`)", "what it is", "public and ours"], [row_of(row) for row in runs])
    return f"{table}\n\n{total}"


def row_of(row: Mapping[str, Any]) -> list[str]:
    """Return file, kind, and verdict with its reason."""
    name = row["file"].removeprefix("environments/")
    verdict = VERDICTS[row["verdict"]]
    return [f"`{name}`", row["kind"], f"{verdict}: {row['why']}" if row["why"] else verdict]


def not_run(book: Book) -> str:
    """Files that cannot run here, and what they would need."""
    return markdown(["file", "what it would need"], [[f"`{name}`", why] for name, why in NOT_RUN.items()])


NAMED = {"their_environments": their_environments, "their_environments_not_run": not_run}
