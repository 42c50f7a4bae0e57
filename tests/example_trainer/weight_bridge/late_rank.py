"""Started by test_fleet_senders.py: a trainer of two ranks; one is stopped while weights are sent.

Arguments: a folder for rank 1's process id, which is there when it is about to stop. It is also for
a file that marks the end of the last version. Then `cpu`, or `cuda` for a GPU of each rank's own;
the ports of the servers. Version v is v in all weights. There are three versions for each way of
transfer; rank 1 is late in the second one's third bucket.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from example_trainer.models.decoder import Decoder
from example_trainer.parallel.fsdp import sharded_decoder
from example_trainer.parallel.ranks import Ranks, join_ranks
from example_trainer.weight_bridge import broadcast
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.stream import Cohort, WeightStream
from tests.example_trainer.weight_bridge.cohort_world import BUCKET_BYTES, DENSE, SECONDS
from vllm_patching.transport.lane import Lane

PATIENCE, TIMEOUT = 12.0, 20.0
"""Seconds, more than a busy machine stops a process; the servers' timeout is between the two."""
VERSIONS = 3


class LateStream(WeightStream):
    """Stops its process between two buckets, once, on request."""

    stops = ""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, bucket_bytes=BUCKET_BYTES)

    def _begin(self, cohort: Cohort, number: int, packed: Any) -> tuple[Lane, Any]:
        if (
            number == 2 and (name := LateStream.stops) != ""
        ):  # all servers have what was sent before
            LateStream.stops = ""
            written = Path(sys.argv[1]) / "being written"
            written.write_text(str(os.getpid()))
            written.rename(Path(sys.argv[1]) / name)
            os.kill(os.getpid(), signal.SIGSTOP)
        return super()._begin(cohort, number, packed)


def train(ranks: Ranks, model: Decoder, transfer: str, weight_epoch: int) -> None:
    """Send the versions."""
    servers = [
        BridgeServer("127.0.0.1", int(port), TIMEOUT, None, SECONDS, time.sleep, weight_epoch)
        for port in sys.argv[3:]
    ]
    bridge = BroadcastBridge(servers, transfer, ranks, patience=PATIENCE, port=0)
    try:
        bridge.serving_dtype()
        bridge.connect(model)
        for version in range(1, VERSIONS + 1):

            def write(version: int = version) -> None:
                for parameter in model.parameters():
                    model.shards.local(parameter).fill_(float(version))

            LateStream.stops = transfer if version == 2 and not ranks.is_main else ""
            bridge.sync(version, write)
            logging.getLogger("test").info(
                "version %d is served after a %s transfer", version, transfer
            )
    finally:
        bridge.close()


def wait_for(path: Path) -> None:
    """Return when the file is there."""
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    broadcast.WeightStream = LateStream  # type: ignore[misc]
    device = torch.device("cpu")
    if sys.argv[2] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    with join_ranks(SECONDS, device) as ranks:
        model = sharded_decoder(DENSE, torch.float32, device, ranks.world_size)
        for number, transfer in enumerate(("direct", "overlapped")):
            train(ranks, model, transfer, 5 + number)
            wait_for(Path(sys.argv[1]) / f"{transfer} was seen")


if __name__ == "__main__":
    main()
