"""JSON lines: one object per line, flushed as it is written, so that a killed process leaves whole lines."""

from pathlib import Path
from typing import Any

import orjson

from atroposlib.envs.service_client import as_plain


class JsonLinesWriter:
    """Appends to a file, whose folder it makes."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")

    def write(self, row: Any) -> None:
        option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
        self._file.write(orjson.dumps(row, option=option, default=as_plain))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
