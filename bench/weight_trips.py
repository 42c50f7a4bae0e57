"""Trace an update of two servers' weights, and one in which a server dies and comes back.

The trainer's half runs in this process, without a GPU. The servers are processes with the bridge's
own controller, routes, worker extension and receiving thread (tests/fleet_server.py). The file that
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


def dying_server(trainer: Trainer, started: list[LightServer]) -> tuple[Trip, Trip]:
    """Trace an update in which a server is killed, until the server serves again.

    Returns:
        the trainer's side: how it notices, goes on with the other server, and brings this one back.
        Then both sides, with the servers' work from the fault on, but for the second start of the
        lost server.
    """
    trainers_side, both, lost = Trip(), Trip(), started[1]
    lost.fault("receive", "kill")
    for server in started:
        files_of(server)
    with trainers_side.traced():
        trainer.step()
        lost.start()
        files_of(lost)  # its start is not a part of the trip
        bring_back(trainer, lost)
    both.files |= trainers_side.files
    for server in started:
        both.files |= files_of(server)
        assert server.serves(trainer.version), server.state()
    return trainers_side, both


def weight_trips(folder: Path) -> dict[str, Trip]:
    """Trace the trips of weights."""
    ports = PortReservations()
    with servers(folder / "fleet", ports) as started:
        places = [server.place for server in started]
        options = {"bucket": BUCKET_BYTES}
        with training(places, "overlapped", ports.pick(), **options) as trainer:
            update = weight_update(trainer, started)
            trainers_side, both = dying_server(trainer, started)
    return {"weight_update": update, "dying_server": trainers_side, "dying_server_both": both}
