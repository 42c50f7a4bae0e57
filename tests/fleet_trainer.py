"""A trainer that trains nothing: the bridge's sending half over a tiny model whose weights of version v are v everywhere.

Used in a test's own process, and by tests/fleet_server.py, which forks one that ends in the middle of an update:

    {"do": "train", "ports": [9001, 9002], "rendezvous": 29500, "transfer": "direct", "folder": "/tmp/x", "bucket": 1024,
     "dies": {"version": 2, "buckets": 1}}          kills itself once so many buckets of that version have been sent; or
     "dies": {"version": 2, "at": "commit"}         when all of them have, before it asks anybody to commit
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from example_trainer.weight_bridge import broadcast
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.fleet_updates import FleetUpdates
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.stream import WeightStream
from tests.fleet_server import tiny_model
from vllm_patching.transport.lane import Lane, nobody_lost
from vllm_patching.transport.shared_lane import NearSender

TIMEOUT, PATIENCE, LIMIT = 30.0, 2.0, 60.0
"""Seconds: of a server's steps; for one that is late; for which servers are waited for."""


class Trainer:
    """Joins the servers and sends them version 1."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        transfer: str,
        *,
        limit: float = LIMIT,
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
        **options: Any,
    ) -> None:
        self.model = tiny_model(full=True)

        def client(host: str, port: int) -> BridgeServer:
            return BridgeServer(host, port, timeout, None, limit, time.sleep, 5)

        clients = [client(host, port) for host, port in addresses]

        def another(url: str) -> BridgeServer:
            host, _, port = url.removeprefix("http://").rpartition(":")
            return client(host, int(port))

        self.bridge = BroadcastBridge(clients, transfer, patience=patience, make_server=another, **options)
        self.version = 0
        try:
            self.bridge.serving_dtype()
            self.bridge.connect(self.model)
            self.step()
        except BaseException:
            self.bridge.close()
            raise

    def step(self) -> float:
        """One update. Returns the seconds that it took."""
        self.version += 1
        begun = time.monotonic()

        def write() -> None:
            for parameter in self.model.parameters():
                parameter.data.fill_(float(self.version))

        self.bridge.sync(self.version, write)
        return time.monotonic() - begun

    def look_after(self) -> None:
        """What training does while it waits for rollouts."""
        if self.bridge.server_restarted():
            self.bridge.keep_serving(lambda: None)


@contextlib.contextmanager
def training(addresses: Sequence[tuple[str, int]], transfer: str, rendezvous: int, **options: Any) -> Iterator[Trainer]:
    """A trainer, for the time of the block.

    Args:
        rendezvous: its MASTER_PORT.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(rendezvous))
        if bucket := options.pop("bucket", 0):
            patch.setattr(broadcast, "WeightStream", partial(WeightStream, bucket_bytes=bucket))
        trainer = Trainer(addresses, transfer, **options)
        try:
            yield trainer
        finally:
            trainer.bridge.close()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(told: dict[str, Any]) -> None:
    """Be the process that dies."""
    dies = told["dies"]
    place = [("localhost", port) for port in told["ports"]]
    with training(place, told["transfer"], told["rendezvous"], bucket=told["bucket"]) as trainer:
        begin, sent = NearSender.begin, list[Any]()

        def begin_or_die(self: Lane, pieces: Any, buffer: Any) -> Any:
            if len(sent) == dies.get("buckets"):
                for step in sent:
                    self.wait(step, math.inf, nobody_lost)
                _die()
            sent.append(begin(self, pieces, buffer))
            return sent[-1]

        while trainer.version + 1 < dies["version"]:
            trainer.step()
        if "at" in dies:
            FleetUpdates.commit = lambda *_: _die()  # type: ignore[method-assign]
        else:
            NearSender.begin = begin_or_die  # type: ignore[method-assign]
        trainer.step()
