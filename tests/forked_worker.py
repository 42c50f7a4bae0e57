"""What pytest-xdist starts in the place of Python: a worker that has imported already what the tests import, forked.

python tests/forked_worker.py -u -c PROGRAM

Stands in for the worker while that lives, and passes its standard input and output on; it dies with this process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from tests.forked_commands import STANDARD_ERROR, Command, fork_server  # noqa: E402


def main() -> int:
    """Returns the worker's exit status."""
    _, unbuffered, dash_c, program = sys.argv
    assert (unbuffered, dash_c) == ("-u", "-c"), sys.argv
    command = Command("-c", False, [program], unbuffered=True)
    return fork_server("light").fork(command, os.environ, Path.cwd(), STANDARD_ERROR, talks=(0, 1)).wait()


if __name__ == "__main__":
    sys.exit(main())
