"""The frame of every measurement: the command line, commit and date of each row, results files.

Needs nothing but Python.
"""

from __future__ import annotations

import argparse
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

Options = dict[str, dict[str, Any]]
"""Options of a command line: name -> keyword arguments of `add_argument`."""


def command_line(doc: str | None, options: Options) -> argparse.ArgumentParser:
    """Make the parser of a script, with its docstring as help."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, keywords in options.items():
        parser.add_argument(name, **keywords)
    return parser


def commit() -> str:
    """Return the commit of this code, shortened, with `+` if files differ from it; `unknown` if
    neither git nor the variable names one.
    """
    stated = os.environ.get(COMMIT_VARIABLE, "").strip()
    if stated:
        return stated
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
    """Return the object of a JSON file; an empty one if the file is missing."""
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
