"""JSON and JSON lines: encode values, write lines, read a file of lines, and follow one that grows.

The writer appends each line at once, so that a killed process leaves whole lines. The readers count
a line that they cannot read, and go on.

- Only a line feed ends a line. Other characters that Python's `splitlines` knows, such as U+2028,
  are legal inside JSON strings.
- A byte order mark is skipped at the start of each line: files that were joined have several.
- NaN and infinities, which JSON does not have, are read.

`rows_of_file` reads data files: JSON lines, JSON, CSV and Parquet. A row that cannot be read is returned
with its fault, so that the caller can count it. A file is refused only if none of it can be read.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO, Generic, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.utils.files import KeptLines, cannot_write, remedy, write_whole
from atroposlib.wire import as_plain, encode, unstorable

logger = logging.getLogger(__name__)

PIECE = 4 << 20
"""Bytes that a follower reads at once."""
MAX_LINE = 16 << 20
"""Bytes of a line that a follower reads, unless it has another limit. A file without line ends must
not fill the memory."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MARK = 256
"""Bytes at the beginning and before the offset that a follower compares: they differ in a file that
was rewritten in place."""


def encode_repaired(value: Any, indent: bool = False) -> bytes:
    """JSON of a value for a file that people read; half a surrogate pair is written as an escape, a
    large integer as text.

    Programs that were sampled print what they like, and one character must not cost the whole file.

    Raises:
        TypeError: it holds something that JSON cannot.
    """
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    if indent:
        options |= orjson.OPT_INDENT_2
    try:
        return orjson.dumps(value, option=options, default=as_plain)
    except TypeError:
        return orjson.dumps(
            _repaired(value), option=options, default=lambda other: _repaired(as_plain(other))
        )


def _repaired(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", errors="backslashreplace").decode()
    if isinstance(value, int) and (reason := unstorable(value)):
        logger.warning("an integer of %d bits is written as text: %s", value.bit_length(), reason)
        return hex(value)
    if isinstance(value, Mapping):
        return {_repaired(key): _repaired(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_repaired(item) for item in value]
    return value


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole, and its folder: a reader, or a run after a failure, sees the earlier
    content or the new.

    Raises:
        EnvironmentFailure: the file cannot be written; the earlier content is kept.
    """
    target = path.resolve()  # a link stays a link
    try:
        if target.exists() and not target.is_file():  # a device or a pipe, such as /dev/stdout
            target.write_bytes(content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, content)
    except OSError as error:
        line = cannot_write(path, error, len(content))
        raise EnvironmentFailure(f"{line}; {remedy(error, 'name another path')}") from error


def unencodable_fields(fields: Mapping[Any, Any]) -> dict[Any, str]:
    """Field -> why it cannot be written as JSON, for each field that cannot."""
    wrong = {}
    for name, value in fields.items():
        try:
            encode({name: value})
        except TypeError as error:
            wrong[name] = str(error.__cause__ or error)
    return wrong


class JsonLinesWriter:
    """Appends to a file, whose folder it makes.

    Raises:
        EnvironmentFailure: there can be no such file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lines = open_kept_lines(self.path)

    def write_later(self, row: Any) -> None:
        """Append one row. While the disk refuses it, it waits in memory.

        Raises:
            TypeError: the row cannot be written as JSON.
        """
        self._lines.write(encode_repaired(row))

    def write(self, row: Any) -> None:
        """Append one row, or nothing of it.

        Raises:
            TypeError: the row cannot be written as JSON.
            EnvironmentFailure: the disk refused it.
        """
        line = encode_repaired(row)
        try:
            self._lines.write_now(line)
        except OSError as error:
            reason = cannot_write(self.path, error, len(line) + 1)
            raise EnvironmentFailure(f"{reason}; {remedy(error, 'name another path')}") from error

    def close(self) -> None:
        self._lines.close()


def open_kept_lines(path: Path) -> KeptLines:
    """Open a file of lines that may wait for space on the disk. Its folder is made.

    Raises:
        EnvironmentFailure: there can be no such file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return KeptLines(path)
    except OSError as error:
        raise EnvironmentFailure(f"{cannot_write(path, error)}; name another path") from error


def unused_path(path: Path) -> Path:
    """The path itself, or the first of `name_1`, `name_2`, … that does not exist: earlier data is
    never overwritten.
    """
    candidate, counter = path, 0
    while candidate.exists():
        counter += 1
        candidate = path.with_stem(f"{path.stem}_{counter}")
    if counter:
        logger.info("%s exists: writing to %s", path, candidate)
    return candidate


class UnreadableLine(ValueError):
    """A line that is not JSON. The message is the reason."""


@dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
        where: file and line, for messages.
        value: the row as JSON gives it; None if it has a fault.
        fault: the reason why it cannot be read; "" if it can.
    """

    where: str
    value: Any
    fault: str = ""


def parse_line(line: bytes) -> Any:
    """Return the value of a line.

    Raises:
        UnreadableLine: it is not JSON in UTF-8.
    """
    try:
        return json.loads(line.removeprefix(BYTE_ORDER_MARK).decode())
    except json.JSONDecodeError as error:
        raise UnreadableLine(f"not JSON ({error.msg} at column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise UnreadableLine(f"not UTF-8 (byte {error.start}); save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or too many brackets
        raise UnreadableLine(f"not JSON that Python reads ({error})") from error


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; None if it holds something else."""
    try:
        value = orjson.loads(line)
    except ValueError:
        try:
            value = parse_line(line)
        except UnreadableLine:
            return None
    return value if isinstance(value, dict) else None


def rows_of_lines(content: bytes, path: Path) -> Iterator[Row]:
    """Return the rows of a file's content, each with its fault. Empty lines are skipped."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield Row(where, parse_line(line))
            except UnreadableLine as error:
                yield Row(where, None, str(error))


@dataclass(slots=True)
class NewLines:
    """The result of one reading of a file that is followed.

    Attributes:
        lines: new lines without their ends, oldest first.
        rewritten: the file was replaced, cut or removed since the last reading: `lines` begin with
            its first.
        more: the file holds more than one reading returns; read again.
    """

    lines: list[bytes] = field(default_factory=list)
    rewritten: bool = False
    more: bool = False


class LineFollower:
    """One file, which may not exist yet, may grow, and may be cut, replaced or removed.

    A line without its end is being written: it is returned when it has one. Not safe for several
    threads at a time.

    Args:
        path: of the file.
        last_bytes: start with the first line that lies wholly in the last bytes of the file; None
            for its beginning.
        max_line: bytes of a line. A longer one is counted and skipped.
    """

    def __init__(
        self, path: Path, last_bytes: int | None = None, max_line: int | None = None
    ) -> None:
        self.path = path
        self.too_long = 0
        """Lines of the present file that were skipped."""
        self.changed = 0.0
        """Unix time of the file's last change; 0 while it does not exist."""
        self.tail = b""
        """Bytes behind the last line that has an end."""
        self._last_bytes, self._max_line = last_bytes, max_line or MAX_LINE
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._head = b""
        self._mark = b""
        self._skipping = False

    def read_new(self) -> NewLines:
        """Return the lines since the last reading, of at most PIECE bytes (or one line, if that is
        longer).

        Raises:
            OSError: the file exists and cannot be read.
        """
        try:
            file = _opened(self.path)
        except (FileNotFoundError, NotADirectoryError):
            is_gone = self._identity is not None
            self._forget()
            return NewLines(rewritten=is_gone)
        with file:
            stat = os.fstat(file.fileno())
            identity, self.changed = (stat.st_dev, stat.st_ino), stat.st_mtime
            rewritten = False
            if (
                identity != self._identity
                or stat.st_size < self._offset
                or not self._is_unchanged(file.fileno())
            ):
                rewritten = self._identity is not None
                self._forget()
                self._identity, self.changed = identity, stat.st_mtime
                self._skip_to_last_bytes(file.fileno(), stat.st_size)
            if stat.st_size <= self._offset:
                return NewLines(rewritten=rewritten)
            lines = self._whole_lines(file.fileno(), stat.st_size)
            return NewLines(lines, rewritten, more=stat.st_size - self._offset > len(self.tail))

    def take_tail(self) -> None:
        """Count the bytes behind the last whole line as a line that was read."""
        self._advance(self.tail)
        self.tail = b""

    def _forget(self) -> None:
        self._identity, self._offset, self._head, self._mark, self.tail = None, 0, b"", b"", b""
        self._skipping, self.too_long, self.changed = False, 0, 0.0

    def _skip_to_last_bytes(self, file: int, size: int) -> None:
        if self._last_bytes is not None and size > self._last_bytes:
            # The byte in front decides: behind a line's end, the first line of the last bytes is
            # whole.
            self._offset = size - self._last_bytes - 1
            self._skipping = True

    def _is_unchanged(self, file: int) -> bool:
        """Return False for a file that was rewritten in place, unless its marks are equal by
        chance.
        """
        head = os.pread(file, len(self._head), 0)
        return (
            head == self._head
            and os.pread(file, len(self._mark), self._offset - len(self._mark)) == self._mark
        )

    def _advance(self, data: bytes) -> None:
        if self._offset == len(self._head) < _MARK:
            self._head += data[: _MARK - len(self._head)]
        self._offset += len(data)
        self._mark = (self._mark + data[-_MARK:])[-_MARK:]

    def _whole_lines(self, file: int, size: int) -> list[bytes]:
        """Return the next lines that have their ends.

        The bytes behind the last end are read again next time.
        """
        for length in (PIECE, self._max_line):
            data = os.pread(file, min(length, size - self._offset), self._offset)
            end = data.rfind(b"\n") + 1
            if end or len(data) < length:
                break
        if not end and len(data) == self._max_line:  # skip a line that is too long, up to its end
            self.too_long += not self._skipping
            self._skipping = True
            end = len(data)
            lines: list[bytes] = []
        else:
            lines = data[:end].split(b"\n")[:-1]
            if self._skipping and lines:
                self._skipping = False
                del lines[0]
        self.tail = data[end:]
        self._advance(data[:end])
        return lines


@dataclass(slots=True)
class NewRows:
    """The objects of new lines; see `NewLines`."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    rewritten: bool = False
    more: bool = False


class JsonLinesFollower(LineFollower):
    """A followed file with one object in each line. Another line is counted and skipped."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._no_objects = 0
        self._reported = ""

    @property
    def unreadable(self) -> int:
        """Lines of the present file that were skipped."""
        return self.too_long + self._no_objects

    def read_rows(self) -> NewRows:
        """Return the objects since the last reading; see `read_new`.

        Raises:
            OSError: the file exists and cannot be read.
        """
        new = self.read_new()
        rows = [parse_object(line) for line in new.lines if line.strip()]
        self._no_objects += sum(row is None for row in rows)
        return NewRows([row for row in rows if row is not None], new.rewritten, new.more)

    def new_rows(self) -> Iterator[NewRows]:
        """Yield the objects since the last reading, a piece at a time.

        A file that cannot be read has none. The log names it, and the number of skipped lines.
        """
        more = True
        while more:
            try:
                new = self.read_rows()
            except OSError as error:
                self._report(
                    f"cannot read {self.path}: {error.strerror or error}; let this user read it"
                )
                return
            more = new.more
            yield new
        if self.unreadable:
            self._report(
                f"{self.unreadable} lines of {self.path} are damaged and skipped: each line must be "
                "a JSON object; the rest of the file is shown"
            )

    def _report(self, line: str) -> None:
        if line != self._reported:
            self._reported = line
            logger.warning("%s", line)

    def _forget(self) -> None:
        super()._forget()
        self._no_objects = 0


def last_rows(path: Path, max_bytes: int = 1 << 16) -> list[dict[str, Any]]:
    """Return the objects of the last lines of a file, oldest first, as far as they lie within its
    last bytes.

    A file that does not exist or cannot be read has none.
    """
    try:
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - max_bytes)
            lines = os.pread(file.fileno(), max_bytes, begin).split(b"\n")
    except OSError:
        return []
    whole = lines[1 if begin else 0 : -1]
    return [row for line in whole if line.strip() and (row := parse_object(line)) is not None]


def _opened(path: Path) -> BinaryIO:
    """Open a regular file.

    Anything else is refused: a pipe would block until a process writes to it.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is not a file, but a folder, a pipe or a device")
    return os.fdopen(file, "rb")


T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
_OTHER_FORMATS = {
    b"\xff\xfe": "it is UTF-16; save it as UTF-8",
    b"\xfe\xff": "it is UTF-16; save it as UTF-8",
    b"\x1f\x8b": "it is compressed by gzip; unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "it is compressed by Zstandard; unpack it with unzstd",
    b"PK\x03\x04": "it is a zip archive or a spreadsheet; save its rows as JSON lines",
    b"PAR1": "it is Parquet; call it .parquet",
    b"version https://git-lfs": "it is a pointer of Git LFS; run git lfs pull in its folder",
    b"<": "it is HTML or XML, perhaps the page around the file; download the file itself",
}
"""First bytes of a file that has no JSON -> the reason, with the remedy."""


class BadRow(ValueError):
    """A row that a task cannot use; the message has the reason."""


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

    def report_faults(self, what: str, count: Callable[[str, int], None]) -> None:
        """Count the other rows, and log how many there are and the first of them.

        Args:
            what: name of the rows.
            count: adds a number of rows that were left out to a counter, given by its name.
        """
        if self.faults:
            count("bad_rows", len(self.faults))
            logger.warning(
                "%d of %d rows of %s are left out, mend or remove them; the first: %s",
                len(self.faults),
                len(self.faults) + len(self.good),
                what,
                self.faults[0],
            )


def usable_rows(rows: Iterable[Row], read: Callable[[Any], T]) -> Rows[T]:
    """Read every row with a function that raises BadRow for a row that it cannot use."""
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
    """Return the items of train.jsonl and test.jsonl in a folder, or one file's items twice.

    Args:
        path: a folder or a file.
        read: returns the item of a row, or raises BadRow.
        items: their name in messages, such as "problems".
        count: see `Rows.report_faults`.

    Raises:
        UsageError: a file cannot be read, or has no item.
    """
    both = []
    for file in (path / "train.jsonl", path / "test.jsonl") if path.is_dir() else (path,):
        rows = usable_rows(rows_of_file(file), read)
        if not rows.good:
            reasons = "; ".join([f"{file} has no {items}", *rows.faults[:1]])
            raise UsageError(f"--env.dataset_path: {reasons}")
        rows.report_faults(str(file), count)
        both.append(rows.good)
    return both[0], list(both[-1])


def rows_of_file(path: Path) -> Iterator[Row]:
    """Return the rows of a `.parquet`, `.csv` or `.tsv` (with a header), `.json` (a list) or JSON lines file
    (any other name). Empty lines are skipped.

    Raises:
        UsageError: the file cannot be read at all, or its format does not match its name.
    """
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    try:
        content = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    for first_bytes, reason in _OTHER_FORMATS.items():
        if content.startswith(first_bytes):
            raise UsageError(f"cannot read {path}: {reason}")
    read = {".json": _json_rows, ".csv": _csv_rows, ".tsv": _csv_rows}.get(
        path.suffix.lower(), _line_rows
    )
    return read(path, content)


def _csv_rows(path: Path, content: bytes) -> Iterator[Row]:
    """Return a row for each record behind the header, whose cells name the columns."""
    between = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        reader = csv.DictReader(
            io.StringIO(content.decode(), newline=""), delimiter=between, strict=True
        )
        rows = [(reader.line_num, row) for row in reader]
    except UnicodeDecodeError as error:
        raise UsageError(
            f"cannot read {path}: not UTF-8 (byte {error.start}); save it as UTF-8"
        ) from error
    except csv.Error as error:
        raise UsageError(
            f"cannot read {path}, below line {reader.line_num}: {error}; mend it"
        ) from error
    names = reader.fieldnames or []
    if len(names) == 1 and (found := [mark for mark in ",;\t" if mark in names[0]]):
        raise UsageError(
            f"{path}, line 1: its columns are separated by {found[0]!r}: separate them by {between!r}"
        )
    return (
        Row(f"{path}, line {line}", row)
        if None not in row and None not in row.values()
        else Row(f"{path}, line {line}", None, f"not {len(names)} cells, as the header has")
        for line, row in rows
    )


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
