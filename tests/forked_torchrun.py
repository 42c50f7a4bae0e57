"""torchrun whose ranks are forked from it, where it would execute them and each would import
everything again.

python -m tests.forked_torchrun OPTIONS… SCRIPT ARGUMENTS…      as python -m torch.distributed.run

Who watches the ranks, signals them and ends is torchrun itself.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)

import example_trainer.grpo
import example_trainer.parallel.fsdp  # noqa: F401 - imported once, before the ranks part
from tests.forked_commands import end

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that torchrun has handlers for, and its ranks have not."""


class ForkedRank:
    """torchrun's view of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0)
            time.sleep(0.02)
        return status


def fork_rank(self: Any, args: tuple[str, ...], env: dict[str, str]) -> ForkedRank:
    """As SubprocessHandler._popen, for `python -u SCRIPT ARGUMENTS…`."""
    executable, unbuffered, *command = args
    assert (executable, unbuffered) == (sys.executable, "-u"), args
    if pid := os.fork():
        return ForkedRank(pid)

    def be_rank() -> None:
        os.setsid()
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream, descriptor in ((self._stdout, 1), (self._stderr, 2)):
            if stream is not None:
                os.dup2(stream.fileno(), descriptor)
        os.environ.clear()
        os.environ |= env
        sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")

    end(be_rank)


if __name__ == "__main__":
    SubprocessHandler._popen = fork_rank
    run.main(sys.argv[1:])
