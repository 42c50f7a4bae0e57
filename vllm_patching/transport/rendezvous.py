"""The store of the trainer at which it meets its receivers, and how they notice that the trainer
has ended.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm_patching.transport.addresses import (
    REACH_SECONDS,
    RendezvousError,
    listening_address,
    reach,
)
from vllm_patching.transport.keyed_store import KeyedStore, connect
from vllm_patching.transport.store_host import StoreHost
from vllm_patching.transport.store_wire import StoreRefused

_environment = threading.Lock()


@dataclass(frozen=True)
class Meeting:
    """Where the members of a cohort meet.

    Attributes:
        host, port: of the trainer's store (MASTER_ADDR and MASTER_PORT), as the members reach it.
        secret: what the store requires of each member. Servers get it over their keyed HTTP route.
    """

    host: str
    port: int
    secret: str = field(repr=False)


def host_store(meeting: Meeting, timeout: float, address: str | None = None) -> KeyedStore:
    """Open the store at which all members meet, in this process.

    Args:
        meeting: with port 0, any free port is taken: the store's `kept.port`.
        timeout: seconds for later waits.
        address: an IP address of this machine to listen on, and no other; empty for every address.
            By default the address that the meeting's host has here.

    Raises:
        RendezvousError: the port is taken, or the address belongs to another machine.
    """
    host, port = meeting.host, meeting.port
    try:
        where = listening_address(host) if address is None else address
        hosted = StoreHost(where, port, meeting.secret)
        return KeyedStore(where or "localhost", hosted.port, meeting.secret, timeout, hosted)
    except (OSError, StoreRefused) as error:
        raise RendezvousError(
            f"cannot open the rendezvous on {host}:{port} ({first_line(error)}). "
            f"Another trainer may still be running; stop it, or set MASTER_PORT to a free port for this trainer."
        ) from error


def connect_store(meeting: Meeting, who: str, timeout: float) -> KeyedStore:
    """Connect to the trainer's store, with a connection of one's own: a wait over one connection
    holds up all others over it.

    Args:
        who: for messages, such as `vLLM rank 0`.
        timeout: seconds, also for each later wait.

    Raises:
        RendezvousError: it cannot be reached in time, or it does not accept the secret.
    """
    host, port = meeting.host, meeting.port
    # Half of the deadline: the trainer, whose own is as long, is still there to be told of an
    # address that is wrong.
    reach(host, port, who, min(REACH_SECONDS, timeout / 2))
    try:
        return KeyedStore(host, port, meeting.secret, timeout)
    except (OSError, StoreRefused) as error:
        raise RendezvousError(
            f"{who} cannot join the trainer's rendezvous at {host}:{port} within {timeout:g} s "
            f"({first_line(error)}); check MASTER_ADDR and MASTER_PORT on the trainer"
        ) from error


class PeerWatch:
    """Notices that the process which hosts a store has ended: the kernel closes its connections."""

    def __init__(self, meeting: Meeting, timeout: float) -> None:
        """Raises OSError or StoreRefused if that store is not there."""
        self._socket = connect(meeting.host, meeting.port, meeting.secret, timeout)
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
    """Make a group whose watchdog reports nothing and ends nothing: by default it aborts the whole
    process, vLLM's worker, when an operation takes too long, and the first group of a process
    writes a stack to its log each second once the trainer that holds the store has ended. The
    deadlines are ours.
    """
    # The environment is the whole process's, and lanes are formed side by side.
    with _environment:
        yield from _set_for_a_moment()


def _set_for_a_moment() -> Iterator[None]:
    ours = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
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
