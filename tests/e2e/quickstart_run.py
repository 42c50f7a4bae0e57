"""A quick start on the CPU, as tests cut it."""

from __future__ import annotations

import sys
from pathlib import Path

from example_trainer.child_processes.processes import ManagedProcess
from tests.conftest import Processes
from tests.forked_commands import FORK_CHILDREN

EVAL_SIZE = 64


def start_quickstart(processes: Processes, steps: int, output: Path) -> ManagedProcess:
    """Start one that measures EVAL_SIZE problems, trains for these steps, and measures again."""
    module = ("-m", "example_trainer.launcher.quickstart", "--cpu", "--bridge", "single-copy")
    sizes = ("--steps", str(steps), "--eval-size", str(EVAL_SIZE), "--output", output)
    command = [sys.executable, *module, *sizes]
    return processes.start("quickstart", command, FORK_CHILDREN, may_finish=True)
