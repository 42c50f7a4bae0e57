"""Rendezvous and process groups of the bridge, apart from the ones that vLLM and the trainer have for themselves.

torch.distributed keeps one default group per process, and vLLM owns it. The bridge therefore builds its groups directly on a
TCPStore: rank 0 is the trainer (which hosts the store), rank 1 + r is vLLM's tensor-parallel rank r. Each epoch has its own
prefix in the store, so a trainer that comes back never meets the keys of the one before it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

TRAINER_RANK = 0


class RendezvousError(RuntimeError):
    """The other side did not appear, or its address cannot be used. The message names address, rank and deadline."""


@dataclass(frozen=True)
class Rendezvous:
    """Where and as whom to meet.

    Attributes:
        host, port: address of the trainer's TCPStore (MASTER_ADDR and MASTER_PORT).
        epoch: counts the trainers that have joined this server; separates their keys.
        rank, world_size: 0 is the trainer; a worker is 1 + its tensor-parallel rank.
        data_backend: `nccl` for GPU weights, `gloo` for CPU weights.
        timeout: seconds for each collective step.
    """

    host: str
    port: int
    epoch: int
    rank: int
    world_size: int
    data_backend: str
    timeout: float


def host_store(host: str, port: int, timeout: float) -> dist.TCPStore:
    """Open the store that everyone meets at, in this process.

    Raises:
        RendezvousError: the port is taken or the address is not this machine's.
    """
    try:
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"cannot open the rendezvous on {host}:{port} ({_first_line(error)}). "
            f"Another trainer may still be running; stop it, or set MASTER_PORT to a free port for this trainer."
        ) from error


def join_store(rendezvous: Rendezvous) -> dist.TCPStore:
    """Connect to the trainer's store from a worker. Raises RendezvousError after the deadline."""
    where = f"{rendezvous.host}:{rendezvous.port}"
    try:
        return dist.TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=rendezvous.timeout),
        )
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {rendezvous.rank} cannot reach the trainer's rendezvous at {where} within {rendezvous.timeout:g} s "
            f"({_first_line(error)}); check MASTER_ADDR and MASTER_PORT on the trainer"
        ) from error


class BridgeGroups:
    """The two process groups of one epoch: `control` (always Gloo: barriers) and `data` (NCCL or Gloo: weights)."""

    def __init__(self, rendezvous: Rendezvous, store: dist.TCPStore, device: torch.device) -> None:
        """Form both groups; blocks until every rank has come or the deadline has passed.

        Raises:
            RendezvousError: somebody did not come.
        """
        self.rendezvous = rendezvous
        self.device = device
        # Kept referenced: the groups use it in the background for as long as they live.
        self._store = dist.PrefixStore(f"lockstep/epoch{rendezvous.epoch}", store)
        logger.info("[Bridge] Creating Gloo process group... (rank %d of %d)", rendezvous.rank, rendezvous.world_size)
        self.control = self._form("control", "gloo")
        logger.info("[Bridge] ✓ Gloo group created")
        self.data = self._form("data", rendezvous.data_backend)
        if rendezvous.data_backend == "nccl":
            logger.info("[Bridge] ✓ NCCL group created")
        else:
            logger.info("[Bridge] ✓ Second Gloo group created for the weights (with GPUs: [Bridge] ✓ NCCL group created)")
        self.barrier()
        logger.info("[Bridge] ✓ All ranks synchronized and ready")

    def _form(self, name: str, backend: str) -> Any:
        r = self.rendezvous
        store = dist.PrefixStore(name, self._store)
        store.set_timeout(timedelta(seconds=r.timeout))
        try:
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=r.timeout)
                return dist.ProcessGroupNCCL(store, r.rank, r.world_size, options)
            return dist.ProcessGroupGloo(store, r.rank, r.world_size, timedelta(seconds=r.timeout))
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {r.rank} waited {r.timeout:g} s for the other {r.world_size - 1} rank(s) of the {name} group "
                f"(epoch {r.epoch}, {r.host}:{r.port}): {_first_line(error)}"
            ) from error

    def barrier(self) -> None:
        """Return when every rank has called this. Raises RuntimeError after the deadline."""
        self.control.barrier().wait(timedelta(seconds=self.rendezvous.timeout))

    def send(self, tensor: torch.Tensor, to: int, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Send a contiguous tensor to a rank; returns when it has been handed over, or raises after the deadline."""
        self._finish(self.data.send([tensor], to, 0), should_stop)

    def receive(self, tensor: torch.Tensor, source: int, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Fill a contiguous tensor from a rank; returns when it is complete, or raises after the deadline."""
        self._finish(self.data.recv([tensor], source, 0), should_stop)

    def _finish(self, work: Any, should_stop: Callable[[], bool]) -> None:
        timeout = self.rendezvous.timeout
        if self.rendezvous.data_backend != "nccl":
            work.wait(timedelta(seconds=timeout))
            return
        # NCCL's wait() only orders CUDA streams. Poll, so that a dead peer costs a deadline and not a hung process.
        work.wait()
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + timeout
        while not done.query():
            if should_stop():
                self.abort()
                raise RuntimeError("the transfer was called off")
            if time.monotonic() > deadline:
                self.abort()
                raise RuntimeError(f"NCCL transfer not finished after {timeout:g} s")
            time.sleep(0.0002)

    def abort(self) -> None:
        """Break off whatever is in flight, so that a blocked peer or stream comes free."""
        if self.rendezvous.data_backend == "nccl":
            self.data.abort()

    def close(self) -> None:
        """Drop both groups. Closing sockets makes a peer's pending operation fail at once."""
        # NCCL's orderly shutdown waits for every peer to do the same; a peer that goes on serving never does.
        self.abort()
        del self.data
        del self.control


def rendezvous_address() -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT, by default localhost:29500.

    NUM_INFERENCE_NODES says on how many other machines vLLM runs; 0 means on this one.

    Raises:
        RendezvousError: a variable holds no number, or the address is one that another machine cannot reach.
    """
    host = os.environ.get("MASTER_ADDR", "localhost")
    nodes = os.environ.get("NUM_INFERENCE_NODES", "0")
    if not nodes.isdigit():
        raise RendezvousError(f"NUM_INFERENCE_NODES={nodes!r} is not a number (0: vLLM runs on this machine)")
    if int(nodes) > 0 and host in ("localhost", "127.0.0.1", "::1"):
        raise RendezvousError(
            f"NUM_INFERENCE_NODES={nodes} says that vLLM runs elsewhere, but nobody there can reach MASTER_ADDR={host}; "
            "set MASTER_ADDR to this machine's address"
        )
    text = os.environ.get("MASTER_PORT", "29500")
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise RendezvousError(f"MASTER_PORT={text!r} is not a port number (1 to 65535)")
    return host, int(text)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
