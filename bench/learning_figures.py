"""Tables of bench/learning.py's trainings, as documents show them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench.bridge_figures import markdown, sources
from bench.learning_plan import CHAPTERS, shown_in
from bench.learning_summary import HEADS, variant_rows
from bench.results_book import Book

LEARNING = "learning"


def chapter_table(chapter: str, book: Book) -> str:
    """The variants of a chapter and those that it is compared with: means over the seeds, and their standard deviations."""
    runs, variants = book.get(LEARNING, "runs"), shown_in(chapter)
    names = {variant.name for variant in variants}
    places = {run: (LEARNING, f"runs/{run}") for run, found in runs.items() if found["variant"] in names}
    rows = variant_rows(runs, [(variant.name, variant.label) for variant in variants])
    return f"{markdown(list(HEADS), rows)}\n\n{sources(book, places)}"


def divergences(book: Book) -> str:
    """Which trainings diverged, and how; or that none did."""
    runs = book.get(LEARNING, "runs")
    wrong = [f"{name} ({run['diverged']})" for name, run in runs.items() if run["diverged"]]
    return f"{len(wrong)} of {len(runs)} trainings diverged" + (f": {'; '.join(wrong)}" if wrong else "")


NAMED: dict[str, Callable[[Book], str]] = {
    **{f"learning_{chapter}": partial(chapter_table, chapter) for chapter in CHAPTERS},
    "learning_divergences": divergences,
}
