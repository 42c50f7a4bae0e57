"""Tables of studies/learning/trainings.py's trainings, as documents show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.bridge_figures import markdown
from bench.results_book import Book
from studies.learning.plan import CHAPTERS, shown_in
from studies.learning.summary import COLUMNS, HEADS, variant_rows

LEARNING = "learning"
NOT_YET = "Not measured yet: there is no `bench/results/learning.json`."
SHOWN = ("staleness", "corrections_4", "damping_4", "losses_2x2", "arithmetic")
"""Chapters whose picture and table a document shows; studies/learning/trainings.py prints all of them."""
SHOWN_COLUMNS = [heading for heading in COLUMNS if heading != "solved before"]


def chapter_text(chapter: str, book: Book) -> str:
    """Return a chapter's picture and table: its variants and what they are compared with, mean ±
    deviation over the seeds.
    """
    if not _measured(book):
        return NOT_YET
    runs, variants = book.get(LEARNING, "runs"), shown_in(chapter)
    if not any(
        variant.name in {run["variant"] for run in runs.values()}
        for variant in variants
        if variant.chapter == chapter
    ):
        return "Not measured yet."
    names = {variant.label: variant.name for variant in variants}
    rows = [
        [
            cells[""],
            *(cells[heading] for heading in SHOWN_COLUMNS),
            f"{_diverged(runs, names[cells['']])} of {cells['runs']}",
        ]
        for row in variant_rows(runs, [(variant.name, variant.label) for variant in variants])
        if (cells := dict(zip(HEADS, row, strict=True)))
    ]
    picture = f"![{CHAPTERS[chapter][0]}](images/learning_{chapter}.png)"
    of_chapter = [name for name, run in runs.items() if run["variant"] in names.values()]
    dates = sorted(
        book.measured(LEARNING, f"runs/{name}")["date"].split()[0] for name in of_chapter
    )
    return f"{picture}\n\n{markdown(['', *SHOWN_COLUMNS, 'diverged'], rows)}\n\nMeasured from {dates[0]} to {dates[-1]}."


def divergences(book: Book) -> str:
    """Return how many trainings diverged, of how many."""
    if not _measured(book):
        return NOT_YET
    ended = [run for run in book.get(LEARNING, "runs").values() if run["status"] != "failed"]
    text = f"{sum(bool(run['diverged']) for run in ended)} of {len(ended)} trainings diverged."
    missing = len(book.page(LEARNING).get("missing", ()))
    return text + (f" {missing} of {missing + len(ended)} are still to be run." if missing else "")


def _diverged(runs: Mapping[str, Mapping[str, Any]], variant: str) -> int:
    return sum(
        run["variant"] == variant and bool(run["diverged"])
        for run in runs.values()
        if run["status"] != "failed"
    )


def _measured(book: Book) -> bool:
    return (book.folder / f"{LEARNING}.json").exists()


NAMED: dict[str, Callable[[Book], str]] = {
    **{f"learning_{chapter}": partial(chapter_text, chapter) for chapter in SHOWN},
    "learning_divergences": divergences,
}
