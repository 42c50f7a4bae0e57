"""Puts the figures of the READMEs and docs/ where they belong: from bench/results/, and nowhere else.

    python bench/figures.py            rewrites them
    python bench/figures.py --check    says what differs, and ends with status 1 (a test runs this)

In a document a figure stands between two comments, `<!--= WHAT -->31.3<!--/-->`. WHAT is either

    FILE KEY/KEY/… @SPEC    one value of bench/results/FILE.json. SPEC is a format of Python's, `*FACTOR` before it if wanted:
                            `@.1f`, `@,`, `@*100 .1f`
    NAME                    what a function of bench/figure_tables.py returns: a table, or something computed

What is measured in ms, GB/s, % and the like and stands outside must be named, with its source, in figure_tables.ELSEWHERE.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Mapping

from bench.figure_tables import ELSEWHERE, NAMED
from bench.results_book import Book, FigureError

MARKED = re.compile(r"<!--= (?P<what>[^>]*?) -->(?P<text>.*?)<!--/-->", re.DOTALL)
UNITS = re.compile(
    r"\d[\d.,]*(?:e-?\d+)? ?(?:ms|µs|GB/s|groups/s|tokens/s|MiB|%)(?!\w)|\d{2,3}(?:,\d{3})+|\d(?:,\d{3}){2,}|\d ± \d"
)
"""What a measured figure looks like: a number with such a unit, one of five digits or more, or one with its error."""


def documents(root: Path) -> list[Path]:
    """README.md, example_trainer/README.md and docs/*.md."""
    return [root / "README.md", root / "example_trainer" / "README.md", *sorted((root / "docs").glob("*.md"))]


def rewritten(text: str, book: Book, named: Mapping[str, Callable[[Book], str]] = NAMED) -> str:
    """A document with all of its marked figures as the results have them.

    Raises:
        FigureError: a figure names what is not there, or a value without commit and date.
    """

    def put(match: re.Match[str]) -> str:
        what = match["what"]
        found = named[what](book) if what in named else _value(what, book)
        found = f"\n{found}\n" if "\n" in found else found
        return f"<!--= {what} -->{found}<!--/-->"

    result = MARKED.sub(put, text)
    left = MARKED.sub("", text)
    if "<!--=" in left or "<!--/" in left:
        raise FigureError("a figure's comments do not close: write <!--= WHAT -->…<!--/-->")
    return result


def unsourced(text: str, elsewhere: Iterable[str]) -> list[str]:
    """Lines with a figure that is neither marked nor in one of `elsewhere` (passages as the document has them)."""
    plain = MARKED.sub("", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    for passage in elsewhere:
        plain = plain.replace(passage, "")
    return [line.strip() for line in plain.splitlines() if UNITS.search(line)]


def _value(what: str, book: Book) -> str:
    place, at, spec = what.rpartition(" @")
    file, space, path = place.partition(" ")
    if not (at and space):
        raise FigureError(f"{what!r} is neither the name of a figure nor FILE KEY/KEY/… @SPEC")
    value = book.number(file, path)
    factor, star, rest = spec.removeprefix("*").partition(" ") if spec.startswith("*") else ("1", "", spec)
    try:
        return format(value * float(factor) if star else value, rest)
    except ValueError as error:
        raise FigureError(f"{what!r}: {error}") from None


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, and end with status 1 if something would change")
    check = parser.parse_args(arguments).check
    problems: list[str] = []
    book = Book(root / "bench" / "results")
    problems += book.undated()
    for document in documents(root):
        name = str(document.relative_to(root))
        text = document.read_text(encoding="utf-8")
        try:
            new = rewritten(text, book)
            problems += [f"{name}: no source for: {line}" for line in unsourced(new, ELSEWHERE.get(name, {}))]
        except FigureError as error:
            problems.append(f"{name}: {error}")
            continue
        if new != text and check:
            lines = difflib.unified_diff(text.splitlines(), new.splitlines(), name, "as measured", lineterm="", n=0)
            problems.append("\n".join(lines))
        elif new != text:
            document.write_text(new, encoding="utf-8")
            print(f"rewritten: {name}")
    for problem in problems:
        print(problem)
    if problems:
        print("\nRun `python bench/figures.py` to take figures over from bench/results/.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
