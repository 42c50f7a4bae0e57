"""Addresses at which a trainer and its servers meet, and a plain error when one of them cannot be
reached.

A machine has several addresses. Its name often resolves to 127.0.1.1, which no other machine
reaches. So the address on the way to the other side is used, by the kernel's routes. MASTER_ADDR
(the trainer's rendezvous) and GLOO_SOCKET_IFNAME (each side's groups) come before it where they are
set.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

REACH_SECONDS = 10.0
"""Seconds for a rendezvous to accept a connection. It listens before a server gets its address."""

_ASK_SECONDS = 0.2
_DISCARD = 9
"""A port for questions about routes; nothing is sent to it."""


class RendezvousError(RuntimeError):
    """The other side did not appear, or its address cannot be used.

    The message names address, rank and deadline.
    """


def own_address(host: str, port: int = _DISCARD) -> str:
    """Return the address of this machine on its way to another host. Sends nothing.

    Raises:
        RendezvousError: the host's name is not known, or the machine has no route to the host.
    """
    reason = OSError("the name has no address")
    try:
        found = socket.getaddrinfo(host, port or _DISCARD, type=socket.SOCK_DGRAM)
    except OSError as error:
        found, reason = [], error
    # Both sides must choose alike where a name has addresses of both kinds.
    for family, kind, protocol, _, target in sorted(
        found, key=lambda entry: entry[0] != socket.AF_INET
    ):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as error:
            reason = error
    raise RendezvousError(
        f"{socket.gethostname()} has no way to {host} ({reason.strerror or reason}); check the name and the routes of this host"
    ) from reason


def is_loopback(host: str) -> bool:
    """Return whether a name or address means, on every machine, that machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_here(host: str) -> bool:
    """Return whether a host is this machine: the way to it begins at its own address."""
    if is_loopback(host):
        return True
    try:
        own = own_address(host)
        return any(own == str(entry[4][0]) for entry in socket.getaddrinfo(host, None))
    except (RendezvousError, OSError):
        return False


def under_torchrun() -> bool:
    """Report if torchrun started this process, and set MASTER_ADDR and MASTER_PORT."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rendezvous_address(servers: Sequence[str] = ()) -> tuple[str, int]:
    """Return where servers and trainer meet: MASTER_ADDR and MASTER_PORT.

    Where MASTER_ADDR is not set, it is this machine's address on the way to the first server that
    is elsewhere. It is localhost if all are here. NUM_INFERENCE_NODES is the number of servers on
    other machines to wait for. Under torchrun, which sets MASTER_ADDR and uses MASTER_PORT itself,
    a loopback address counts as not set, and the port is the one after that.

    Args:
        servers: the hosts of the servers, as this trainer calls them.

    Raises:
        RendezvousError: a variable holds no number, or the address is one that another machine
            cannot reach.
    """
    torchrun = under_torchrun()
    host = os.environ.get("MASTER_ADDR", "")
    if torchrun and is_loopback(host):
        host = ""
    nodes = os.environ.get("NUM_INFERENCE_NODES", "0")
    if not nodes.isdigit():
        raise RendezvousError(
            f"NUM_INFERENCE_NODES={nodes!r} is not a number (0: vLLM runs on this machine)"
        )
    elsewhere = [server for server in servers if not is_here(server)]
    if (not host and not elsewhere) or is_loopback(host):
        host = host or "localhost"
        if elsewhere:
            raise RendezvousError(
                f"the vLLM server {elsewhere[0]} is on another machine, and MASTER_ADDR={host} "
                f"means itself there. Set MASTER_ADDR={own_address(elsewhere[0])}, this machine's "
                "address on the way to it, or leave it unset"
            )
        if int(nodes) > 0 and not servers:
            raise RendezvousError(
                f"NUM_INFERENCE_NODES={nodes} means that vLLM runs elsewhere, but no machine there "
                f"can reach MASTER_ADDR={host}; "
                "set MASTER_ADDR to this machine's address"
            )
    text = os.environ.get("MASTER_PORT", "29500")
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise RendezvousError(f"MASTER_PORT={text!r} is not a port number (1 to 65535)")
    return host or own_address(elsewhere[0]), int(text) + torchrun


def listening_address(host: str, elsewhere: str = "") -> str:
    """Return the address of this machine on which to listen for peers that call it `host`.

    Args:
        host: a name or an address.
        elsewhere: a peer on another machine; empty if all are here.

    Returns:
        empty, with a warning, where no address is known: behind a forwarded address whose peers are
        not known yet.

    Raises:
        RendezvousError: `elsewhere` cannot be reached.
    """
    own = [address for address in _addresses(host) if _is_own(address)]
    # A machine's name is often 127.0.1.1 in its own /etc/hosts. Other machines know it by another
    # address.
    if own and (is_loopback(host) or not elsewhere or not is_loopback(own[0])):
        return own[0]
    if elsewhere:
        return own_address(elsewhere)
    logger.warning(
        "[Bridge] MASTER_ADDR=%s is not an address of this machine, and no server on another machine is known yet: "
        "the rendezvous listens on every address", host,
    )  # fmt: skip
    return ""


def _addresses(host: str) -> list[str]:
    """The IP addresses of a name, IPv4 first."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [
        str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    ]


def _is_own(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def reach(host: str, port: int, who: str, seconds: float = REACH_SECONDS) -> None:
    """Return once the trainer's rendezvous accepts a connection.

    Args:
        who: what asks, for messages, such as `vLLM rank 0`.
        seconds: how long to try.

    Raises:
        RendezvousError: it does not. The message names the address, this machine's own, what came
            back and what to set.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            left, reason = deadline - time.monotonic(), error
        if left <= _ASK_SECONDS:
            break
        time.sleep(_ASK_SECONDS)
    raise RendezvousError(
        f"{who} on {_here(host)} cannot reach the trainer's rendezvous at {host}:{port} ({_came_back(reason, seconds)}); "
        + _remedy(host, port)
    ) from reason


def gloo_group(store: dist.Store, rank: int, size: int, host: str, timeout: float) -> Any:
    """A Gloo group whose connections begin at this machine's address on the way to a host, or on
    GLOO_SOCKET_IFNAME's.

    Gloo alone takes the address of the machine's name.

    Args:
        store: where the members meet; their keys are under its prefix.
        rank, size: this member, of how many.
        host: of the rendezvous: what the other members reach.
        timeout: seconds for each operation, and for the members to come.

    Raises:
        RendezvousError: the host cannot be reached.
        RuntimeError: not all members came, or one cannot be connected to.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface:
        options._devices = [
            dist.ProcessGroupGloo.create_device(interface=name) for name in interface.split(",")
        ]
    else:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(host))]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _here(host: str) -> str:
    """This machine, for messages: its name, and its address on the way to a host if there is one."""
    try:
        return f"{socket.gethostname()} ({own_address(host)})"
    except RendezvousError:
        return socket.gethostname()


def _came_back(error: OSError, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s: the address is not the trainer's, or a firewall drops what is sent to the port"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: no trainer listens there"
    return error.strerror or str(error)


def _remedy(host: str, port: int) -> str:
    if is_loopback(host):
        return f"{host} is this machine itself: set MASTER_ADDR on the trainer to its machine's address, or leave it unset"
    return (
        "set MASTER_ADDR on the trainer to an address of its machine that this one reaches. Let "
        f"this one in to its port {port} (MASTER_PORT) and to its ports for connections between "
        "processes"
    )
