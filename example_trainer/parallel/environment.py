"""What the environment tells a process about the ranks of its job: who started it, which rank it
is, and where the ranks meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from example_trainer.errors import ConfigError

LOOPBACK = "127.0.0.1"
STORE_VARIABLE = "LOCKSTEP_RANK_STORE"
"""Names host:port of the store of `launch.py`, at which its ranks meet. torchrun's ranks meet at
MASTER_ADDR:MASTER_PORT.
"""


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as a rank, possibly as the only one. torchrun and
    `launch.py` set LOCAL_RANK.
    """
    return "LOCAL_RANK" in environment or environment.get("WORLD_SIZE", "1") != "1"


def place_of(environment: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Rank, world size and local rank that the launcher gave this process; None for a trainer of
    one process.

    Raises:
        ConfigError: some of the variables are missing or not numbers.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    values = [environment.get(name, "") for name in names]
    if not all(value.isdigit() for value in values):
        found = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
        raise ConfigError(
            f"{found}: a launcher such as torchrun sets all three; unset them to start the trainer without one"
        )
    rank, world_size, local_rank = map(int, values)
    return rank, world_size, local_rank


def meeting_place(environment: Mapping[str, str]) -> str:
    """host:port of the store at which the ranks meet."""
    return (
        environment.get(STORE_VARIABLE)
        or f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
    )


def meeting_host(environment: Mapping[str, str]) -> str:
    """Return the host of the store at which the ranks meet."""
    place = environment.get(STORE_VARIABLE)
    return place.rpartition(":")[0] if place else environment.get("MASTER_ADDR", LOOPBACK)


def meeting_store(environment: Mapping[str, str], limit: timedelta) -> dist.Store:
    """The store at which the ranks meet: the launcher's, or torchrun's.

    Raises:
        RuntimeError: the store cannot be reached in time.
        ValueError: torchrun's variables are incomplete.
    """
    if STORE_VARIABLE not in environment:
        store, _, _ = next(rendezvous("env://", timeout=limit))
        return store
    host, _, port = environment[STORE_VARIABLE].rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=limit, wait_for_workers=False)
