"""The files of bench/results/ to look values up in, each of which has a commit and a date."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
        """Whether there is a FILE.json."""
        return (self.folder / f"{file}.json").exists()

    def get(self, file: str, path: str) -> Any:
        """What lies at `path`, keys separated by `/` (of a list: the index).

        Raises FigureError if nothing does.
        """
        return self._walk(file, path)[-1]

    def number(self, file: str, path: str) -> float:
        """A number at `path` whose measurement is known. Raises FigureError otherwise."""
        value = self.get(file, path)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise FigureError(f"{file}.json {path}: {value!r} is no number")
        self.measured(file, path)
        return value

    def maybe(self, file: str, path: str) -> float | None:
        """As `number`; None where the file has nothing there."""
        try:
            self.get(file, path)
        except FigureError:
            return None
        return self.number(file, path)

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


def commit_of(measured: dict[str, str]) -> str:
    """What a table says of where a row's code stands: `commit X`, or `recorded in X`."""
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
    """The topmost places below `node` that hold values of which none above is dated; a list of rows
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
