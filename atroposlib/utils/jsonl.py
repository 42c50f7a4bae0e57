"""JSON for what environments make; and JSON lines: one object per line, written at once, so that a killed process leaves
whole lines."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from atroposlib.errors import EnvironmentFailure

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
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise EnvironmentFailure(f"cannot write to {self.path}: {error.strerror}; name another path") from error

    def write(self, row: Any) -> None:
        """Append one row, or nothing of it.

        Raises:
            TypeError: the row cannot be written as JSON.
            EnvironmentFailure: the disk refused it.
        """
        left = memoryview(encode(row) + b"\n")
        size = os.fstat(self._file.fileno()).st_size
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            if size < os.fstat(self._file.fileno()).st_size:  # the disk took a part: what comes later must begin a line
                self._file.truncate(size)
            raise EnvironmentFailure(
                f"cannot write to {self.path}: {error.strerror}; make room there, or name another path"
            ) from error

    def close(self) -> None:
        self._file.close()


def unused_path(path: Path) -> Path:
    """The path itself, or the first of `name_1`, `name_2`, … that does not exist: earlier data is never overwritten."""
    candidate, counter = path, 0
    while candidate.exists():
        counter += 1
        candidate = path.with_stem(f"{path.stem}_{counter}")
    if counter:
        logger.info("%s exists: writing to %s", path, candidate)
    return candidate
