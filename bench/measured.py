"""When a row was measured, and by which code: what every row of a results file carries.

Needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMIT_VARIABLE = "LOCKSTEP_COMMIT"
"""Names the commit where the files lie without the .git folder."""

_BEGAN = datetime.now(UTC)


def commit() -> str:
    """The commit of this code, shortened, with `+` if files differ from it; `unknown` if neither
    git nor the variable says.
    """
    told = os.environ.get(COMMIT_VARIABLE, "").strip()
    if told:
        return told
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        if _git("status", "--porcelain", "--untracked-files=no"):
            head += "+"
        return head
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def measured() -> dict[str, str]:
    """`commit`, `date` (UTC, of this moment) and `run` (when this process began: rows of one run
    have it in common).
    """
    return {"commit": commit(), "date": _minutes(datetime.now(UTC)), "run": _minutes(_BEGAN)}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one if there is no file."""
    if not path.exists():
        return {}
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def put_into(path: Path, key: str, value: dict[str, Any]) -> None:
    """Put what one script found into a results file that several share, in place of what it had
    under that key.
    """
    data = read_json(path)
    path.write_text(json.dumps(data | {key: value}, indent=1), encoding="utf-8")


def _minutes(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=True
    ).stdout.strip()
