"""scripts/start.sh and its like, typed in a folder as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from example_trainer.child_processes.guard import descendants
from tests.conftest import ROOT


class Operations:
    """Types the commands in a folder."""

    def __init__(self, folder: Path, ports: Mapping[str, int | str]) -> None:
        self.folder, self.run_folder, self.ports = folder, folder / "run", ports
        variables = {f"LOCKSTEP_{name}_PORT": str(port) for name, port in ports.items()}
        # The packages of these tests, wherever they are installed.
        self.environment = {
            "LOCKSTEP_VENV": sys.prefix,
            **os.environ,
            **variables,
            "LOCKSTEP_RUN": str(self.run_folder),
        }
        self.environment["OMP_NUM_THREADS"] = "1"

    def type(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(ROOT / "scripts" / f"{command}.sh"), *arguments],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.type("status", "--json").stdout)
        return found

    def pids(self) -> list[int]:
        keepers = [row["pid"] for row in self.status()["rows"] if row["pid"]]
        return [pid for keeper in keepers for pid in (keeper, *descendants(keeper))]


def eventually(done: Callable[[], bool], what: Callable[[], str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)
