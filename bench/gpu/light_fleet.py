"""Light vLLM servers of a given shape, forked from one process: the bridge's routes, updater and
checks, and no engine.

    python -m bench.gpu.light_fleet SHAPE       then lines as tests/fleet_server.py reads them

So the cost of an update beside generation can be measured with more servers than vLLM could run on
a machine without GPUs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx

from bench.gpu.processes import BenchError, Worker, free_port, tail

READY_SECONDS = 60.0


class LightFleet(Worker):
    """A process that starts servers, and ends them when it is stopped."""

    def __init__(self, shape: str, output: Path, timeout: float) -> None:
        """
        Args:
            shape: a key of SHAPES.
            output: where the logs go.
            timeout: seconds for each phase of an update.
        """
        log = output / f"light-fleet-{shape}.log"
        super().__init__(
            f"light fleet {shape}", "bench.gpu.light_fleet", [shape], log, {"OMP_NUM_THREADS": "1"}
        )
        self._timeout = timeout

    def start(self, folder: Path, device: str = "cpu") -> int:
        """Start one more server; returns its port once it answers.

        Its weights are float32 on a CPU, else bfloat16.
        """
        port, dtype = free_port(), "bfloat16"
        if device == "cpu":
            dtype = "float32"
        how = {"folder": str(folder), "timeout": self._timeout, "device": device, "dtype": dtype}
        self.send("start", port=port, **how)
        self.answer(READY_SECONDS, "start")
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
