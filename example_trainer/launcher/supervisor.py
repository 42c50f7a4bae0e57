"""Stays between the shell and one process of the stack, so that it can be stopped whole, long after
start.sh has ended.

    python -I -S supervisor.py EXIT_FILE GRACE_SECONDS COMMAND [ARGUMENT...]

SIGTERM ends the command and everything that it started (see guard.py, which does it). When the
command has ended, EXIT_FILE holds {"code", "at"}: its exit status, 128 + n for signal n, and the
Unix time. Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from example_trainer.child_processes.guard import PR_SET_CHILD_SUBREAPER, Guard, prctl
from example_trainer.child_processes.whole_files import cannot_write, write_whole

ENDING_BYTES = 128


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    exit_file, grace, command = Path(arguments[0]), float(arguments[1]), arguments[2:]
    ending = Ending(exit_file)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    control, _held_open = (
        os.pipe()
    )  # closes with this process alone, which is asked to stop by a signal
    code = Guard(command, control, grace).run()
    ending.write(code)
    return code


class Ending:
    """The file with the command's end.

    Its space is taken at the start, since the disk may be full at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._draft, self._file = path, path.with_suffix(".draft"), -1
        try:
            self._file = os.open(
                self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666
            )
            os.write(self._file, b" " * ENDING_BYTES)
        except OSError as error:
            print(
                f"keeper: {cannot_write(path, error, ENDING_BYTES)}; make room there",
                file=sys.stderr,
                flush=True,
            )

    def write(self, code: int) -> None:
        """Write the exit status and the present time."""
        content = json.dumps({"code": code, "at": time.time()}).encode().ljust(ENDING_BYTES)
        try:
            if self._file < 0:
                write_whole(self._path, content)
            else:
                os.pwrite(self._file, content, 0)
                self._draft.replace(self._path)
        except OSError as error:
            reason = cannot_write(self._path, error, ENDING_BYTES)
            print(
                f"keeper: {reason}; the command's exit status was {code}",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
