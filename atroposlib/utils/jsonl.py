"""JSON for what environments make; and JSON lines: one object per line, written at once, so that a killed process leaves
whole lines."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from atroposlib.errors import EnvironmentFailure
from atroposlib.utils.whole_files import KeptLines, cannot_write, write_whole
from atroposlib.wire.number_bounds import unstorable

logger = logging.getLogger(__name__)


def as_plain(value: Any) -> Any:
    """Environments put numpy scalars, pydantic models and sets into their groups."""
    for method in ("model_dump", "tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, set | frozenset):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r:.80}")


def encode(value: Any) -> bytes:
    """JSON of a value.

    Raises:
        TypeError: it holds something that JSON cannot.
    """
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS, default=as_plain)


def encode_repaired(value: Any, indent: bool = False) -> bytes:
    """JSON of a value for a file that people read; half a surrogate pair is written as an escape, a large integer as text.

    Programs that were sampled print what they like, and one character must not cost the whole file.

    Raises:
        TypeError: it holds something that JSON cannot.
    """
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    try:
        return orjson.dumps(value, option=options, default=as_plain)
    except TypeError:
        return orjson.dumps(_repaired(value), option=options, default=lambda other: _repaired(as_plain(other)))


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
    """Write a file whole, and its folder: a reader, or a run after a failure, sees the earlier content or the new.

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
        raise EnvironmentFailure(f"{line}; make room there, or name another path") from error


def unencodable_fields(fields: Mapping[Any, Any]) -> dict[Any, str]:
    """Field -> why it cannot be written as JSON, for those that cannot."""
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
            raise EnvironmentFailure(f"{reason}; make room there, or name another path") from error

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
    """The path itself, or the first of `name_1`, `name_2`, … that does not exist: earlier data is never overwritten."""
    candidate, counter = path, 0
    while candidate.exists():
        counter += 1
        candidate = path.with_stem(f"{path.stem}_{counter}")
    if counter:
        logger.info("%s exists: writing to %s", path, candidate)
    return candidate
