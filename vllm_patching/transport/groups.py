"""Rendezvous and process groups of the bridge, apart from the ones that vLLM and the trainer have for themselves.

torch.distributed keeps one default group per process, and vLLM owns it. The bridge therefore builds its groups directly on a
TCPStore that the trainer hosts. Each of vLLM's ranks has a pair of groups with the one trainer process that sends to it, so
what one rank waits for never depends on another rank. Each epoch has its own prefix in the store, so a trainer or server that
comes back never meets the keys of the one before it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vllm_patching.transport.addresses import RendezvousError, gloo_group
from vllm_patching.transport.rendezvous import connect_store, first_line, quiet_nccl_watchdog

logger = logging.getLogger(__name__)

SENDER, RECEIVER = 0, 1
"""The trainer's and the worker's rank in a pair."""

PART_BYTES = 256 << 20
"""How much is handed to NCCL at once (see manifest.parts). Both sides must agree."""

_ASK_SECONDS = 0.25


@dataclass(frozen=True)
class Rendezvous:
    """Where a worker and its sender meet.

    Attributes:
        host, port: address of the trainer's TCPStore (MASTER_ADDR and MASTER_PORT).
        key: prefix of their keys in the store, which no other pair and no other epoch has.
        epoch: counts the trainers that have joined the server; for messages.
        tp_rank: the worker's tensor-parallel rank.
        data_backend: `nccl` for GPU weights, `gloo` for CPU weights.
        timeout: seconds for each collective step.
    """

    host: str
    port: int
    key: str
    epoch: int
    tp_rank: int
    data_backend: str
    timeout: float


def join_store(rendezvous: Rendezvous) -> dist.TCPStore:
    """Connect to the trainer's store from a worker. Raises RendezvousError after the deadline."""
    return connect_store(rendezvous.host, rendezvous.port, f"vLLM rank {rendezvous.tp_rank}", rendezvous.timeout)


class BridgeGroups:
    """The two groups of a pair: `control` (always Gloo: barriers) and `data` (NCCL or Gloo: weights)."""

    def __init__(self, rendezvous: Rendezvous, store: dist.TCPStore, device: torch.device, role: int) -> None:
        """Form both groups; blocks until the other side has come or the deadline has passed.

        Args:
            role: SENDER or RECEIVER.

        Raises:
            RendezvousError: the other side did not come.
        """
        self.rendezvous = rendezvous
        self.device = device
        self._role = role
        self._store = dist.PrefixStore(f"lockstep/{rendezvous.key}", store)  # referenced by the groups while they live
        logger.info("[Bridge] Creating Gloo process group... (vLLM rank %d)", rendezvous.tp_rank)
        self.control = self._form("control", "gloo")
        logger.info("[Bridge] ✓ Gloo group created")
        self.data = self._form("data", rendezvous.data_backend)
        if rendezvous.data_backend == "nccl":
            # The connection is made and the kernels are loaded now, and not in the first update, beside a running model.
            first = [torch.zeros(8, device=device) for _ in range(2)]
            self.broadcast(first)
            self.finish()
            logger.info("[Bridge] ✓ NCCL group created")
        else:
            logger.info("[Bridge] ✓ Second Gloo group created for the weights (with GPUs: [Bridge] ✓ NCCL group created)")
        self.control.barrier().wait(timedelta(seconds=rendezvous.timeout))
        logger.info("[Bridge] ✓ All ranks synchronized and ready")

    def _form(self, name: str, backend: str) -> Any:
        r = self.rendezvous
        store = dist.PrefixStore(name, self._store)
        store.set_timeout(timedelta(seconds=r.timeout))
        try:
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=2 * r.timeout + 60)  # ours comes first, and says more
                with quiet_nccl_watchdog():
                    return dist.ProcessGroupNCCL(store, self._role, 2, options)
            return gloo_group(store, self._role, 2, r.host, r.timeout)
        except RuntimeError as error:
            other = f"vLLM rank {r.tp_rank}" if self._role == SENDER else "the trainer"
            raise RendezvousError(
                f"waited {r.timeout:g} s for {other} in the {name} group of rank {r.tp_rank} "
                f"(epoch {r.epoch}, {r.host}:{r.port}): {first_line(error)}"
            ) from error

    def broadcast(self, pieces: Sequence[torch.Tensor]) -> None:
        """Copy contiguous tensors from the sender to the receiver.

        NCCL: as one operation, enqueued in the order of the current stream; `finish` waits for it. Gloo: it is done on return.

        Raises:
            RuntimeError: the other side has gone, or (Gloo) did not take part within the deadline.
        """
        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        if self.rendezvous.data_backend != "nccl":
            deadline = timedelta(seconds=self.rendezvous.timeout)
            for piece in pieces:
                self.data.broadcast([piece], options).wait(deadline)
            return
        self.data._start_coalescing()
        for piece in pieces:
            self.data.broadcast([piece], options)
        self.data._end_coalescing().wait()  # orders the current stream behind it, and returns at once

    def finish(self, lost: Callable[[], str] = lambda: "") -> None:
        """Wait until everything enqueued on the current stream is done.

        Args:
            lost: asked now and then; a reason why waiting is in vain, or an empty string.

        Raises:
            RuntimeError: `lost` gave a reason, or the deadline passed. The groups are of no use any more.
        """
        if self.rendezvous.data_backend != "nccl":
            return
        # NCCL itself would wait for a dead peer for ever: poll.
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + self.rendezvous.timeout
        next_question = time.monotonic() + _ASK_SECONDS
        while not done.query():
            now = time.monotonic()
            reason = ""
            if now > deadline:
                reason = f"not finished after {self.rendezvous.timeout:g} s"
            elif now > next_question:
                reason, next_question = lost(), now + _ASK_SECONDS
            if reason:
                self.abort()
                raise RuntimeError(f"the transfer was broken off: {reason}")
            time.sleep(0.0001)

    def abort(self) -> None:
        """Break off whatever is in flight, so that a blocked stream comes free."""
        if self.rendezvous.data_backend == "nccl":
            self.data.abort()

    def close(self) -> None:
        """Drop both groups. Closing sockets makes a peer's pending operation fail at once."""
        # NCCL's orderly shutdown waits for every peer to do the same; a peer that goes on serving never does.
        self.abort()
        del self.data
        del self.control
