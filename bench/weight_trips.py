"""Trace an update of two servers' weights, and one in which a server dies and comes back.

The trainer's half runs in this process, without a GPU. The servers are processes with the bridge's
own controller, routes, worker extension and receiving thread (tests/fleet_server.py); the file that
stands in for vLLM's engine there does not count. A server's calls are traced in its process, and
its files are added to the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.call_trip import Trip
from example_trainer.child_processes.ports import PortReservations
from tests.fleet_trainer import Trainer, training
from tests.light_servers import SOON, LightServer, Starter, bring_back

STAND_IN = "example_trainer/parameter_server/receiving.py"
BUCKET_BYTES = 2048
"""So that the tiny model goes in several buckets."""


@contextmanager
def servers(folder: Path, ports: PortReservations) -> Iterator[list[LightServer]]:
    """Two traced servers, for the time of the block."""
    starter = Starter(folder)
    started = [LightServer(starter, ports.pick(), bucket=BUCKET_BYTES, traced=True) for _ in "ab"]
    try:
        for server in started:
            server.start()
        yield started
    finally:
        starter.close()


def files_of(server: LightServer) -> set[str]:
    """Return the files that a server's calls have entered since it was asked last."""
    answer = httpx.post(f"{server.url}/test/trip", timeout=SOON).raise_for_status()
    return set(answer.json()) - {STAND_IN}


def weight_update(trainer: Trainer, started: list[LightServer]) -> Trip:
    """Trace one update, from the trainer's parameters to the answers that it is served."""
    trip = Trip()
    for server in started:
        files_of(server)
    with trip.traced():
        trainer.step()
    for server in started:
        trip.files |= files_of(server)
        assert server.serves(trainer.version), server.state()
    return trip


def dying_server(trainer: Trainer, started: list[LightServer]) -> Trip:
    """Trace the trainer's side of an update in which a server is killed, until it serves again."""
    trip, lost = Trip(), started[1]
    lost.fault("receive", "kill")
    with trip.traced():
        trainer.step()
        lost.start()
        bring_back(trainer, lost)
    assert started[0].serves(trainer.version)
    return trip


def weight_trips(folder: Path) -> dict[str, Trip]:
    """Trace both trips."""
    ports = PortReservations()
    with servers(folder / "fleet", ports) as started:
        places = [server.place for server in started]
        options = {"bucket": BUCKET_BYTES}
        with training(places, "overlapped", ports.pick(), **options) as trainer:
            return {
                "weight_update": weight_update(trainer, started),
                "dying_server": dying_server(trainer, started),
            }
