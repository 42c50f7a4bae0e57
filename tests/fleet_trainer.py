"""A trainer that trains nothing: the bridge's sending half over a tiny model whose weights of
version v are v everywhere.

Used in a test's own process, and by tests/fleet_server.py, which forks one that ends or stops in
the middle of an update:

    {"do": "train", "ports": [9001, 9002], "rendezvous": 29500, "transfer": "direct", "folder": "/tmp/x", "bucket": 1024,
     "fault": {"version": 2, "buckets": 1, "signal": 9}}       which it gives itself once so many buckets of that version have
                                                               been sent; or
     "fault": {"version": 2, "at": "commit", "signal": 19}}    when all of them have, before it asks
     any to commit
    and "timeout": 20                                          as its servers' "timeout"
        "device": "cuda:0"                                     of its weights; a CPU by default
"""

from __future__ import annotations

import contextlib
import math
import os
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
from vllm_patching.transport.lane import Lane, NearSender, nobody_lost

TIMEOUT, PATIENCE, LIMIT = 90.0, 12.0, 120.0
"""Seconds: of a server's steps; for one that is late; for which servers are waited for.

A busy machine may stop a process for ten seconds, which must not make its server late.
"""


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
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.model = tiny_model(full=True, device=device)

        def client(host: str, port: int) -> BridgeServer:
            return BridgeServer(host, port, timeout, None, limit, time.sleep, 5)

        clients = [client(host, port) for host, port in addresses]

        def another(url: str) -> BridgeServer:
            host, _, port = url.removeprefix("http://").rpartition(":")
            return client(host, int(port))

        self.bridge = BroadcastBridge(
            clients, transfer, patience=patience, make_server=another, **options
        )
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
        """The work of training while it waits for rollouts."""
        if self.bridge.server_restarted():
            self.bridge.keep_serving(lambda: None)


@contextlib.contextmanager
def training(
    addresses: Sequence[tuple[str, int]], transfer: str, rendezvous: int, **options: Any
) -> Iterator[Trainer]:
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


def run(told: dict[str, Any]) -> None:
    """Be the process that suffers; one that is stopped makes its update when it goes on, and ends."""
    fault = told["fault"]
    place = [("localhost", port) for port in told["ports"]]
    options = {
        "bucket": told["bucket"],
        "timeout": told.get("timeout", TIMEOUT),
        "device": told.get("device", "cpu"),
    }
    with training(place, told["transfer"], told["rendezvous"], **options) as trainer:
        begin, commit, sent = NearSender.begin, FleetUpdates.commit, list[Any]()
        todo = [fault["signal"]]

        def suffer() -> None:
            if todo:
                os.kill(os.getpid(), todo.pop())

        def begin_faultily(self: Lane, pieces: Any, buffer: Any) -> Any:
            if todo and len(sent) == fault.get("buckets"):
                for step in sent:
                    self.wait(step, math.inf, nobody_lost)
                suffer()
            sent.append(begin(self, pieces, buffer))
            return sent[-1]

        def commit_faultily(*arguments: Any) -> None:
            suffer()
            commit(*arguments)

        while trainer.version + 1 < fault["version"]:
            trainer.step()
        if fault.get("at") == "commit":
            FleetUpdates.commit = commit_faultily  # type: ignore[method-assign]
        else:
            NearSender.begin = begin_faultily  # type: ignore[method-assign]
        trainer.step()
