"""CUDA's MPS, under which processes on one GPU compute at the same time, and not in turns.

python -m bench.gpu.mps COMMAND…    run a command under it
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.gpu.processes import BenchError, ended_by_sigterm

END_SECONDS = 60.0
"""Limit for a command that is asked to end, and for MPS itself."""


def start_mps(folder: Path, stack: ExitStack) -> dict[str, str]:
    """Start MPS for the programs that get the variables returned; it ends with the stack.

    Raises:
        BenchError: it does not start.
    """
    variables = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }
    for path in variables.values():
        Path(path).mkdir(parents=True)
    environment = {**os.environ, **variables}
    # With it, MPS would give those GPUs other numbers, for all of its programs.
    environment.pop("CUDA_VISIBLE_DEVICES", None)

    def control(*arguments: str, told: str = "") -> None:
        command = ["nvidia-cuda-mps-control", *arguments]
        try:
            subprocess.run(
                command, env=environment, input=told, text=True, timeout=END_SECONDS, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise BenchError(f"MPS: {shlex.join(command)}: {error}; do without it") from error

    control("-d")
    stack.callback(control, told="quit\n")
    return variables


def main(command: list[str]) -> int:
    """Return the command's status."""
    with ended_by_sigterm(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        variables = start_mps(Path(folder), stack)
        process = subprocess.Popen(command, env={**os.environ, **variables})
        try:
            return process.wait()
        finally:
            process.terminate()
            process.wait(END_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
