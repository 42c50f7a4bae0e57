"""Stays between the shell and one process of the stack, so that it can be stopped whole, long after start.sh has ended.

    python -I -S keeper.py EXIT_FILE GRACE_SECONDS COMMAND [ARGUMENT...]

SIGTERM ends the command and everything that it started (see guard.py, which does it). When the command has ended, EXIT_FILE
holds {"code", "at"}: its exit status, 128 + n for signal n, and the Unix time. Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from example_trainer.child_processes.guard import PR_SET_CHILD_SUBREAPER, Guard, prctl


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    exit_file, grace, command = Path(arguments[0]), float(arguments[1]), arguments[2:]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    control, _held_open = os.pipe()  # closes with this process alone, which is asked to stop by a signal
    code = Guard(command, control, grace).run()
    draft = exit_file.with_suffix(".draft")
    try:
        draft.write_text(json.dumps({"code": code, "at": time.time()}))
        draft.replace(exit_file)
    except OSError as error:
        print(f"keeper: cannot write {exit_file} ({error}); the command's exit status was {code}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
