"""Tables of bench/learning.py's trainings, as documents show them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench.bridge_figures import markdown, sources
from bench.learning_plan import CHAPTERS, shown_in
from bench.learning_summary import HEADS, variant_rows
from bench.results_book import Book

LEARNING = "learning"
NOT_YET = "Not measured yet: there is no `bench/results/learning.json`."


def chapter_text(chapter: str, book: Book) -> str:
    """A chapter's picture and table: the variants and those that they are compared with, means over the seeds, and their
    standard deviations."""
    if not _measured(book):
        return NOT_YET
    runs, variants = book.get(LEARNING, "runs"), shown_in(chapter)
    names = {variant.name for variant in variants}
    places = {run: (LEARNING, f"runs/{run}") for run, found in runs.items() if found["variant"] in names}
    rows = variant_rows(runs, [(variant.name, variant.label) for variant in variants])
    if not any(variant.name in {run["variant"] for run in runs.values()} for variant in variants if variant.chapter == chapter):
        return "Not measured yet."
    picture = f"![{CHAPTERS[chapter][0]}](images/learning_{chapter}.png)"
    return f"{picture}\n\n{markdown(list(HEADS), rows)}\n\n{sources(book, places)}"


def divergences(book: Book) -> str:
    """Which trainings diverged, and how; or that none did."""
    if not _measured(book):
        return NOT_YET
    runs = book.get(LEARNING, "runs")
    ended = {name: run for name, run in runs.items() if run["status"] != "failed"}
    wrong = [f"{name} ({run['diverged']})" for name, run in ended.items() if run["diverged"]]
    told = f"{len(wrong)} of {len(ended)} trainings diverged" + (f": {'; '.join(wrong)}" if wrong else "") + "."
    missing = len(book.page(LEARNING).get("missing", ()))
    return told + (f" {missing} of {missing + len(ended)} are still to be run." if missing else "")


def _measured(book: Book) -> bool:
    return (book.folder / f"{LEARNING}.json").exists()


NAMED: dict[str, Callable[[Book], str]] = {
    **{f"learning_{chapter}": partial(chapter_text, chapter) for chapter in CHAPTERS},
    "learning_divergences": divergences,
}
