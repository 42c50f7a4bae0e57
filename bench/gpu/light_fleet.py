"""Light vLLM servers of a given shape, forked from one process: the bridge's routes, updater and
checks, and no engine.

    python -m bench.gpu.light_fleet SHAPE       then lines as tests/fleet_server.py reads them

So the cost of an update beside generation can be measured with more servers than vLLM could run on
a machine without GPUs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from bench.gpu.processes import BenchError, Child, free_port, tail

READY_SECONDS = 60.0


class LightFleet(Child):
    """A process that starts servers, and ends them when it is stopped."""

    def __init__(self, shape: str, output: Path, timeout: float) -> None:
        """
        Args:
            shape: a key of SHAPES.
            output: where the logs go.
            timeout: seconds for each phase of an update.
        """
        command = [sys.executable, "-m", "bench.gpu.light_fleet", shape]
        super().__init__(
            f"light fleet {shape}",
            command,
            output / f"light-fleet-{shape}.log",
            {"OMP_NUM_THREADS": "1"},
            pipes=True,
        )
        self._timeout = timeout

    def start(self, folder: Path, device: str = "cpu") -> int:
        """Start one more server; returns its port once it answers.

        Its weights are float32 on a CPU, else bfloat16.
        """
        port, dtype = free_port(), "float32" if device == "cpu" else "bfloat16"
        told = {"do": "start", "port": port, "folder": str(folder), "timeout": self._timeout}
        self._tell({**told, "device": device, "dtype": dtype})
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/bridge/info", timeout=10).raise_for_status()
                return port
            except httpx.HTTPError as error:
                if time.monotonic() > deadline or self.poll() is not None:
                    raise BenchError(
                        f"{self.name}: no server at port {port} ({error}):\n{tail(self.log_path)}"
                    ) from error
                time.sleep(0.1)

    def _tell(self, line: dict[str, Any]) -> dict[str, Any]:
        pipes = self.guard
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        try:
            pipes.stdin.write(json.dumps(line).encode() + b"\n")
            pipes.stdin.flush()
            answer: dict[str, Any] = json.loads(pipes.stdout.readline())
        except (OSError, ValueError) as error:
            raise BenchError(f"{self.name} ended:\n{tail(self.log_path)}") from error
        return answer


def main() -> None:
    """Be the process of a LightFleet."""
    from bench.gpu.shapes import SHAPES
    from tests import fleet_server

    fleet_server.CONFIG = SHAPES[sys.argv[1]]
    # Looking at all weights in every step is a test's; here it would take the time that is
    # measured.
    fleet_server.Engine._step = lambda self: None  # type: ignore[method-assign]
    fleet_server.main()


if __name__ == "__main__":
    main()
