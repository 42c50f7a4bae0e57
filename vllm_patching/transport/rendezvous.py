"""Where the trainer and its receivers meet: a TCPStore that the trainer hosts, and how it is noticed that it has ended."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from vllm_patching.transport.addresses import REACH_SECONDS, RendezvousError, reach

_environment = threading.Lock()


def host_store(host: str, port: int, timeout: float, is_host: bool = True) -> dist.TCPStore:
    """Open the store that everyone meets at, in this process; or, for the trainer's other ranks, connect to it.

    Raises:
        RendezvousError: the port is taken or the address is not this machine's.
    """
    try:
        # Who hosts it listens on every address, and reaches itself whatever others call it.
        where = "localhost" if is_host else host
        return dist.TCPStore(where, port, is_master=is_host, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"cannot open the rendezvous on {host}:{port} ({first_line(error)}). "
            f"Another trainer may still be running; stop it, or set MASTER_PORT to a free port for this trainer."
        ) from error


def connect_store(host: str, port: int, who: str, timeout: float) -> dist.TCPStore:
    """Connect to the trainer's store, with a connection of one's own: a wait over one connection holds up all others over it.

    Args:
        who: for messages, such as `vLLM rank 0`.
        timeout: seconds, also for each later wait.

    Raises:
        RendezvousError: it cannot be reached in time.
    """
    # Half of the deadline: the trainer, whose own is as long, is still there to be told of an address that is wrong.
    reach(host, port, who, min(REACH_SECONDS, timeout / 2))
    try:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"{who} cannot reach the trainer's rendezvous at {host}:{port} within {timeout:g} s "
            f"({first_line(error)}); check MASTER_ADDR and MASTER_PORT on the trainer"
        ) from error


class PeerWatch:
    """Notices that the process which hosts a store has ended: the kernel closes its connections."""

    def __init__(self, host: str, port: int, timeout: float) -> None:
        """Raises OSError if nobody listens there."""
        self._socket = socket.create_connection((host, port), timeout)
        self._socket.setblocking(False)

    def gone(self) -> bool:
        """Whether the process has ended. A process that is merely stopped has not."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()


@contextmanager
def quiet_nccl_watchdog() -> Iterator[None]:
    """Make a group whose watchdog reports nothing and ends nothing: by default it aborts the whole process, vLLM's worker,
    when an operation takes too long, and the first group of a process writes a stack to its log each second once the trainer
    that holds the store has ended. The deadlines are ours.
    """
    # The environment is the whole process's, and lanes are formed side by side.
    with _environment:
        yield from _set_for_a_moment()


def _set_for_a_moment() -> Iterator[None]:
    ours = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def first_line(error: BaseException) -> str:
    """What a person wants to read of torch's errors."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
