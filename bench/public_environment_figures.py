"""The table of docs/environments.md about environment files of the public repository."""

from __future__ import annotations

from bench.bridge_figures import markdown
from bench.results_book import Book, commit_of
from tests.environments.public.cases import CASES, NOT_RUN

RESULTS = "their_environments"
COMMANDS = {"serve": "training", "process": "`process`", "evaluate": "evaluation"}
VERDICTS = {"same": "same", "differs": "differs", "nothing": "nothing to compare"}


def their_environments(book: Book) -> str:
    """Return how many files ran with both SDKs, with equal results by command, and a row for each
    other file.
    """
    found = book.get(RESULTS, "cases")
    runs = [found[case.name] for case in CASES if case.name in found]
    files = {row["file"] for row in runs if row["verdict"] != "nothing"}
    same = [row for row in runs if row["verdict"] == "same"]
    groups, sequences = (sum(row[name][1] for row in same) for name in ("groups", "sequences"))
    days = sorted(row["measured"]["date"].split()[0] for row in runs)
    commits = sorted({commit_of(row["measured"]) for row in runs})
    commands = ", ".join(
        f"{sum(row['command'] == command for row in same)} {title}"
        for command, title in COMMANDS.items()
    )
    total = (
        f"{len(files)} files in {len(runs)} runs, {len(same)} of them the same number for number "
    )
    total += f"({commands}; {groups} groups, "
    total += f"{sequences} sequences). Run on {days[-1]}, {', '.join(commits)}. The others:"
    other = [
        [name_of(row["file"]), f"{VERDICTS[row['verdict']]}: {row['why']}"]
        for row in runs
        if row["verdict"] != "same"
    ]
    other += [[name_of(file), f"runs with neither: {why}"] for file, why in NOT_RUN.items()]
    return f"{total}\n\n{markdown(['file', 'public and ours'], other)}"


def name_of(file: str) -> str:
    return f"`{file.removeprefix('environments/')}`"


NAMED = {"their_environments": their_environments}
