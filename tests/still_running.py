"""Readers of files that others still write, and of processes that may end. Each is looked at once,
and a half-written or missing one is not an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def json_rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of JSON lines; an empty list without a file.

    The last line may be on its way.
    """
    if not path.exists():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in whole]


def command_line(pid: int) -> str:
    """The words of a process's command line, with spaces in between; nothing of one that has ended."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def resident_pages(pids: Iterable[int]) -> int:
    """Return the pages of RAM of processes; ended ones have none."""
    return sum(int((_read(pid, "statm").split() or [0, 0])[1]) for pid in pids)


def _read(pid: int, file: str) -> bytes:
    try:
        return Path("/proc", str(pid), file).read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
