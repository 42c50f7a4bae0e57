"""Look up values in bench/results/, with their commits and dates, and render them.

The one renderer of the documents' figures: templates whose placeholders name places in the files.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NO_ROWS = ("machine", "settings", "measured")
"""Keys that hold no measurement."""


class FigureError(ValueError):
    """A figure cannot be had. The message names the file and the place in it."""


class Book:
    """All results files, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pages: dict[str, Any] = {}

    def page(self, file: str) -> dict[str, Any]:
        """The whole of FILE.json. Raises FigureError if it is not there."""
        if file not in self._pages:
            path = self.folder / f"{file}.json"
            if not path.exists():
                raise FigureError(f"there is no {path.name} in bench/results")
            self._pages[file] = json.loads(path.read_text(encoding="utf-8"))
        page: dict[str, Any] = self._pages[file]
        return page

    def has(self, file: str) -> bool:
        """Report if FILE.json exists."""
        return (self.folder / f"{file}.json").exists()

    def get(self, file: str, path: str) -> Any:
        """Return the value at `path`, keys separated by `/` (for a list: the index).

        Raises FigureError if nothing does.
        """
        return self._walk(file, path)[-1]

    def number(self, file: str, path: str) -> float:
        """A number at `path` whose measurement is known. Raises FigureError otherwise."""
        value = self.get(file, path)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise FigureError(f"{file}.json {path}: {value!r} is not a number")
        self.measured(file, path)
        return value

    def values(self, file: str, pattern: str) -> list[Any]:
        """Return the dated values of each place that a pattern names; `*` stands for any key."""
        places = [""]
        for key in pattern.split("/"):
            keys = [key]
            grown = []
            for place in places:
                if key == "*":
                    keys = self._keys(file, place)
                grown += [f"{place}/{each}".lstrip("/") for each in keys]
            places = grown
        for place in places:
            self.measured(file, place)
        return [self.get(file, place) for place in places]

    def value(self, file: str, path: str) -> Any:
        """Return a dated value; None if there is none.

        Args:
            path: as for `get`; or `min:PATTERN`, with any key of AGGREGATES. Or `all:PATTERN`, the
                number of values, which must all be true; or two of these, `A ÷ B`.
        """
        above, divided, below = path.partition(" ÷ ")
        if divided:
            numbers = [self.value(file, part) for part in (above, below)]
            if None in numbers:
                return None
            return numbers[0] / numbers[1]
        name, colon, pattern = path.partition(":")
        if colon and name == "all":
            values = self.values(file, pattern)
            if not all(value is True for value in values):
                raise FigureError(f"{file}.json {pattern}: a document states that all are true")
            return len(values)
        if colon and name in AGGREGATES:
            return AGGREGATES[name](self.values(file, pattern))
        try:
            value = self.get(file, path)
        except FigureError:
            return None
        self.measured(file, path)
        return value

    def _keys(self, file: str, place: str) -> list[str]:
        node = self.get(file, place)
        if isinstance(node, list):
            return [str(index) for index in range(len(node))]
        return [key for key in node if key not in NO_ROWS]

    def measured(self, file: str, path: str) -> dict[str, str]:
        """Commit (or `recorded_in`), date and run of what lies at `path`: of the row itself, or of
        what it lies in.
        """
        for node in reversed(self._walk(file, path)):
            if isinstance(node, dict) and _is_dated(node.get("measured")):
                found: dict[str, str] = node["measured"]
                return found
        raise FigureError(f"{file}.json {path}: no commit and date; see bench/results/README.md")

    def undated(self) -> list[str]:
        """Every place of every file that holds measurements without a commit and a date."""
        names = sorted(path.stem for path in self.folder.glob("*.json"))
        return [
            f"bench/results/{name}.json {place}: no commit and date"
            for name in names
            for place in _undated(self.page(name))
        ]

    def _walk(self, file: str, path: str) -> list[Any]:
        """The nodes from the page to what lies at `path`."""
        nodes = [self.page(file)]
        for key in path.split("/") if path else []:
            node = nodes[-1]
            inside = isinstance(node, dict) and key in node
            if not inside and not (
                isinstance(node, list) and key.isdecimal() and int(key) < len(node)
            ):
                raise FigureError(f"{file}.json has no {path} (nothing at {key!r})")
            nodes.append(node[key] if inside else node[int(key)])
        return nodes


AGGREGATES: dict[str, Callable[[list[Any]], Any]] = {
    "min": min,
    "max": max,
    "sum": sum,
    "mean": statistics.fmean,
    "count": len,
}
PLACEHOLDER = re.compile(r"\{([^{}@]+) @([^{}]+)\}")


def minutes(seconds: float) -> str:
    """Return `2 min 41 s`."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole} min {rest:02d} s"


def milliseconds(value: float) -> str:
    """Format with one decimal below 100, and without one above."""
    if value < 100:
        return f"{value:.1f}"
    return f"{value:.0f}"


def three_digits(value: float) -> str:
    """Return `480` or `34,600`."""
    step = 10 ** (len(str(int(value))) - 3)
    return f"{round(value / step) * step:,.0f}"


SPECS: dict[str, Callable[[float], str]] = {
    "minutes": minutes,
    "ms": milliseconds,
    "three digits": three_digits,
}
"""Formats that Python does not have, by name."""


def formatted(value: Any, spec: str) -> str:
    """Format a value by a spec: a format of Python's, `*FACTOR FORMAT`, or a name of SPECS.

    Raises:
        FigureError: the spec does not fit the value.
    """
    if spec in SPECS:
        return SPECS[spec](value)
    try:
        if spec.startswith("*"):
            factor, _, spec = spec[1:].partition(" ")
            value *= float(factor)
        return format(value, spec)
    except (TypeError, ValueError) as error:
        raise FigureError(f"@{spec}: {error}") from None


def filled(book: Book, file: str, template: str, row: str = "") -> str:
    """Put figures into a template's placeholders.

    Args:
        file: the results file of all placeholders.
        template: holds `{PATH @SPEC}`, where PATH is a value (see Book.value) and `ROW` in it
            stands for `row`. `PATH?` may be absent, which leaves nothing.
    """

    def put(match: re.Match[str]) -> str:
        path = match[1].replace("ROW", row)
        value = book.value(file, path.replace("?", ""))
        if value is None and "?" in path:
            return ""
        if value is None:
            raise FigureError(f"{file}.json has no {path}")
        return formatted(value, match[2])

    return PLACEHOLDER.sub(put, template)


@dataclass(frozen=True)
class Table:
    """A table of a document: one row for each place in a results file, one column for each template.

    Attributes:
        file: the results file.
        rows: label -> path, for which `ROW` stands in the templates.
        columns: heading -> template of its cells.
        note: template of the sentence below the table; `{sources}` and `{dates}` are added here.
        across: show the places as columns, and the templates as rows.
        corner: template of the heading of the labels.
        place: template of the place that has a row's commit and date.
    """

    file: str
    rows: Mapping[str, str]
    columns: Mapping[str, str]
    note: str = "{sources}"
    across: bool = False
    corner: str = ""
    place: str = "ROW"

    def __call__(self, book: Book) -> str:
        labels = [filled(book, self.file, text, path).strip() for text, path in self.rows.items()]
        cells = [
            [filled(book, self.file, template, path) for template in self.columns.values()]
            for path in self.rows.values()
        ]
        heads = [heading.strip() for heading in self.columns]
        paths = [self.place.replace("ROW", path) for path in self.rows.values()]
        places = {label: (self.file, path) for label, path in zip(labels, paths, strict=True)}
        if self.across:
            labels, heads = heads, labels
            cells = [list(row) for row in zip(*cells, strict=True)]
        corner = filled(book, self.file, self.corner)
        rows = [[label, *row] for label, row in zip(labels, cells, strict=True) if any(row)]
        note = filled(book, self.file, self.note)
        if "{sources}" in note:
            note = note.replace("{sources}", sources(book, places))
        if "{dates}" in note:
            note = note.replace("{dates}", dates(book, places))
        return f"{markdown([corner, *heads], rows)}\n\n{note}".rstrip()


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


LONG = 4
"""Rows of one run, above which a long table names only the rows of other runs."""


def sources(book: Book, places: Mapping[str, tuple[str, str]]) -> str:
    """Return one line on the runs that a table's rows come from.

    Args:
        places: for each side of the table, a file and a path in it.
    """
    runs: dict[tuple[str, str, str], list[str]] = {}
    for side, (file, path) in places.items():
        row = book.measured(file, path)
        runs.setdefault((commit_of(row), row["date"].split()[0], row["run"]), []).append(side)
    if len(runs) == 1:
        ((commit, date, _),) = runs
        return f"One run of {date}, {commit}."
    parts = []
    most = max(runs.values(), key=len)
    for (commit, date, _), sides in runs.items():
        if sides is not most or len(sides) <= LONG:
            parts.append(f"{', '.join(sides)}: {date}, {commit}")
    for (commit, date, _), sides in runs.items():
        if sides is most and len(sides) > LONG:
            parts.append(f"all others: {date}, {commit}")
    return "Not of one run. " + "; ".join(parts) + "."


def dates(book: Book, places: Mapping[str, tuple[str, str]]) -> str:
    """Return one line with the dates of a table's rows, and the file that has each row's commit."""
    days = sorted(book.measured(file, path)["date"].split()[0] for file, path in places.values())
    ((file, _), *_) = places.values()
    return (
        f"Measured from {days[0]} to {days[-1]}; `bench/results/{file}.json` has each row's commit."
    )


def commit_of(measured: dict[str, str]) -> str:
    """Name the commit of a row in a table: `commit X`, or `recorded in X`."""
    return (
        f"commit {measured['commit']}"
        if "commit" in measured
        else f"recorded in {measured['recorded_in']}"
    )


def _is_dated(measured: Any) -> bool:
    if not isinstance(measured, dict):
        return False
    commit = measured.get("commit") or measured.get("recorded_in")
    return bool(measured.get("date") and commit and commit != "unknown")


def _undated(node: Any, place: str = "") -> Iterator[str]:
    """Return the topmost places below `node` whose values have no date above them; a list of rows
    needs one for each.
    """
    if isinstance(node, dict):
        if not _is_dated(node.get("measured")):
            held = [value for key, value in node.items() if key not in NO_ROWS]
            if any(not isinstance(value, dict | list) for value in held):
                yield place or "/"
                return
            for key, value in node.items():
                if key not in NO_ROWS:
                    yield from _undated(value, f"{place}/{key}")
            return
        for key, value in node.items():
            if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
                for index, row in enumerate(value):
                    if not _is_dated(row.get("measured")):
                        yield f"{place}/{key}/{index}"
