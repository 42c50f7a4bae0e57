"""Rows of data files: JSON lines, JSON and Parquet. The one reader for every task and report.

- Only a line feed ends a line of JSON lines. Other characters that Python's `splitlines` knows, such as U+2028,
  are legal inside JSON strings.
- A byte order mark is skipped, at the start of each line too: files that were joined have several.
- A row that cannot be read is returned with its fault, so that the caller can count it. A file is refused only
  if none of it can be read.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from atroposlib.errors import UsageError

T = TypeVar("T")

ENDINGS = (".jsonl", ".json", ".parquet")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class BadRow(ValueError):
    """A row that a task cannot use. The message says what is wrong with it."""


@dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
        where: file and line, for messages.
        value: the row as JSON gives it; None if it has a fault.
        fault: what is wrong with it; "" if it was read.
    """

    where: str
    value: Any
    fault: str = ""


@dataclass
class Rows(Generic[T]):
    """The usable rows of a file.

    Attributes:
        good: in the file's order.
        faults: place and fault of every other row.
    """

    good: list[T] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def usable_rows(rows: Iterable[Row], read: Callable[[Any], T]) -> Rows[T]:
    """Read every row with a function that raises BadRow for those that it cannot use."""
    result: Rows[T] = Rows()
    for row in rows:
        fault = row.fault
        if not fault:
            try:
                result.good.append(read(row.value))
                continue
            except BadRow as error:
                fault = str(error)
        result.faults.append(f"{row.where}: {fault}")
    return result


def rows_of_file(path: Path) -> Iterator[Row]:
    """Return the rows of a `.parquet`, `.json` (a list) or JSON lines file (any other name). Empty lines are skipped.

    Raises:
        UsageError: the file cannot be read at all, or has another format than its name says.
    """
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    try:
        content = path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    if content.startswith(_UTF16_MARKS):
        raise UsageError(f"cannot read {path}: it is UTF-16; save it as UTF-8")
    return _json_rows(path, content) if path.suffix == ".json" else _line_rows(path, content)


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
    except ModuleNotFoundError as error:
        raise UsageError(f"{path}: reading Parquet needs the pyarrow package: pip install pyarrow") from error
    except (OSError, ValueError) as error:  # pyarrow raises a ValueError for another format
        raise UsageError(f"cannot read {path}: {error}") from error
    return (Row(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def _json_rows(path: Path, content: bytes) -> Iterator[Row]:
    try:
        rows = json.loads(content.decode())
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}, line {error.lineno}: not JSON ({error.msg} at column {error.colno}); mend it") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(rows, list):
        raise UsageError(f"{path}: not a list of rows; a file with one row in each line is called .jsonl")
    return (Row(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def _line_rows(path: Path, content: bytes) -> Iterator[Row]:
    if content.lstrip().startswith(b"[") and _is_list_of_objects(content):
        raise UsageError(f"{path}: it holds one JSON list and not one row in each line: call it .json instead")
    return (
        _line_row(f"{path}, line {number}", line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()
    )


def _line_row(where: str, line: bytes) -> Row:
    try:
        return Row(where, json.loads(line.removeprefix(_BYTE_ORDER_MARK).decode()))
    except json.JSONDecodeError as error:
        return Row(where, None, f"not JSON ({error.msg} at column {error.colno})")
    except UnicodeDecodeError as error:
        return Row(where, None, f"not UTF-8 (byte {error.start})")
    except (ValueError, RecursionError) as error:
        return Row(where, None, f"not JSON that Python reads ({error})")


def _is_list_of_objects(content: bytes) -> bool:
    try:
        rows = json.loads(content.decode())
    except (ValueError, RecursionError):
        return False
    return isinstance(rows, list) and bool(rows) and all(isinstance(row, dict) for row in rows)
