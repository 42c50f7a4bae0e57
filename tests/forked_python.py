"""Stands for Python: a process that has imported the tests' modules already, forked.

python tests/forked_python.py -u -c PROGRAM ARGUMENT…

pytest-xdist starts its workers by it. It lives as long as what it stands for, whose standard input
and output are its own; that dies with it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from tests.forked_commands import STANDARD_ERROR, Command, fork_server  # noqa: E402


def main() -> int:
    """Returns its exit status."""
    _, unbuffered, dash_c, *program = sys.argv
    assert (unbuffered, dash_c) == ("-u", "-c"), sys.argv
    command = Command("-c", False, program, unbuffered=True)
    return (
        fork_server("light")
        .fork(command, os.environ, Path.cwd(), STANDARD_ERROR, talks=(0, 1))
        .wait()
    )


if __name__ == "__main__":
    sys.exit(main())
