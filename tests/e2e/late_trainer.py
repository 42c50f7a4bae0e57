"""A trainer of a single copy that stops itself (SIGSTOP) right before its first write, as if it had
been swapped out.

    python tests/e2e/late_trainer.py PORT MODEL_FOLDER BRIDGE_TIMEOUT

It writes `about to write` before it stops, and `served version 1` when its update has been served
after all.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from example_trainer.models.hf_checkpoint import load_model
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.single_copy import SingleCopyBridge

STALLS = 1


class StoppedBeforeItWrites(BridgeServer):
    """Gets the message that the server stands still, and is stopped."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stalls = STALLS

    def begin(self, epoch: int, version: int, cohort: str = "") -> dict[str, Any] | None:
        lease = super().begin(epoch, version, cohort)
        if self._stalls:
            self._stalls -= 1
            print("about to write", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return lease


def main(port: int, folder: str, timeout: float) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    model = load_model(folder, torch.float32)
    weights = {name: parameter.detach() + 0.01 for name, parameter in model.named_parameters()}
    bridge = SingleCopyBridge(StoppedBeforeItWrites("localhost", port, timeout))
    bridge.connect(model)

    def write() -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])

    report = bridge.sync(1, write)
    print(f"served version {report.version} with checksum {report.checksum}", flush=True)
    bridge.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
