"""Rows of data files: JSON lines, JSON and Parquet. The one reader for every task and report.

A row that cannot be read is returned with its fault, so that the caller can count it. A file is
refused only if none of it can be read.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from atroposlib.errors import UsageError
from atroposlib.utils.jsonl import BYTE_ORDER_MARK, Row, rows_of_lines

logger = logging.getLogger(__name__)

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

ENDINGS = (".jsonl", ".json", ".parquet")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class BadRow(ValueError):
    """A row that a task cannot use. The message says what is wrong with it."""


def read_model(model: type[Model], row: Any) -> Model:
    """Return a row as a model.

    Raises:
        BadRow: a field is missing or wrong. The message names the first one.
    """
    if not isinstance(row, dict):
        raise BadRow(f"not a JSON object with {', '.join(model.model_fields)}")
    try:
        return model.model_validate(row, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        raise BadRow(f"{place!r}: {message[0].lower()}{message[1:]}") from None


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


def train_and_test(
    path: Path, read: Callable[[Any], T], items: str, count: Callable[[str, int], None]
) -> tuple[list[T], list[T]]:
    """Return the items of train.jsonl and test.jsonl in a folder, or those of one file twice.

    Args:
        path: a folder or a file.
        read: returns the item of a row, or raises BadRow.
        items: their name in messages, such as "problems".
        count: adds a number of rows that were left out to a counter, given by its name.

    Raises:
        UsageError: a file cannot be read, or has no item.
    """
    both = []
    for file in (path / "train.jsonl", path / "test.jsonl") if path.is_dir() else (path,):
        rows = usable_rows(rows_of_file(file), read)
        if not rows.good:
            reasons = "; ".join([f"{file} has no {items}", *rows.faults[:1]])
            raise UsageError(f"--env.dataset_path: {reasons}")
        if rows.faults:
            count("bad_rows", len(rows.faults))
            total = len(rows.faults) + len(rows.good)
            logger.warning(
                "%d of %d rows are left out, mend or remove them; the first: %s",
                len(rows.faults),
                total,
                rows.faults[0],
            )
        both.append(rows.good)
    return both[0], list(both[-1])


def rows_of_file(path: Path) -> Iterator[Row]:
    """Return the rows of a `.parquet`, `.json` (a list) or JSON lines file (any other name). Empty
    lines are skipped.

    Raises:
        UsageError: the file cannot be read at all, or has another format than its name says.
    """
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    try:
        content = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
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
        raise UsageError(
            f"{path}: reading Parquet needs the pyarrow package: pip install pyarrow"
        ) from error
    except (OSError, ValueError) as error:  # pyarrow raises a ValueError for another format
        raise UsageError(f"cannot read {path}: {error}") from error
    return (Row(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def _json_rows(path: Path, content: bytes) -> Iterator[Row]:
    try:
        rows = json.loads(content.decode())
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}, line {error.lineno}: not JSON ({error.msg} at column {error.colno}); mend it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(rows, list):
        raise UsageError(
            f"{path}: not a list of rows; a file with one row in each line is called .jsonl"
        )
    return (Row(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def _line_rows(path: Path, content: bytes) -> Iterator[Row]:
    if content.lstrip().startswith(b"[") and _is_list_of_objects(content):
        raise UsageError(
            f"{path}: it holds one JSON list and not one row in each line: call it .json instead"
        )
    return rows_of_lines(content, path)


def _is_list_of_objects(content: bytes) -> bool:
    try:
        rows = json.loads(content.decode())
    except (ValueError, RecursionError):
        return False
    return isinstance(rows, list) and bool(rows) and all(isinstance(row, dict) for row in rows)
