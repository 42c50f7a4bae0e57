"""`python -m example_trainer.launcher.quickstart`, or by path; scripts/quickstart.sh calls it after
set-up.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:
    sys.path[0] = str(
        Path(__file__).resolve().parents[3]
    )  # run by path: import from the repository

from example_trainer.child_processes.processes import CHECK_ONLY, ProcessError
from example_trainer.launcher.command_line import run_command
from example_trainer.launcher.quickstart.options import parse

if TYPE_CHECKING:
    from example_trainer.launcher.quickstart.run import Quickstart


def main(arguments: list[str]) -> int:
    """Run the quick start; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="quickstart: %(message)s", stream=sys.stderr)
    try:
        options = parse(arguments)
    except ProcessError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    if os.environ.get(CHECK_ONLY) == "1":
        return 0
    # Only now, so that --help and a wrong flag need nothing installed and no time.
    from rich.console import Console

    from example_trainer.launcher.quickstart.run import Quickstart

    return guarded(Quickstart(options, Console()))


def guarded(quickstart: Quickstart) -> int:
    """Run it, and turn its end into a last line and an exit status."""
    from example_trainer.launcher.quickstart.run import Interrupted

    def work() -> int:
        quickstart.run()
        return 0

    try:
        return run_command("quickstart", work)
    except Interrupted as interruption:
        print(f"quickstart: {interruption}: stopped, nothing is left running", file=sys.stderr)
        return 128 + interruption.number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
