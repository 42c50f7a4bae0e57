"""The listening TCP sockets of processes, as the kernel lists them."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_LISTEN = "0A"


class Listener(NamedTuple):
    """One socket."""

    pid: int
    address: str
    port: int

    @property
    def on_loopback(self) -> bool:
        """Return whether this machine alone can reach it."""
        address = ipaddress.ip_address(self.address)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listeners(pids: Iterable[int]) -> list[Listener]:
    """The listening sockets of these processes, each once for each process that has it open."""
    addresses = {
        inode: place
        for name in ("tcp", "tcp6")
        for inode, place in _table(Path("/proc/net") / name)
    }
    return sorted(
        {
            Listener(pid, *addresses[inode])
            for pid in pids
            for inode in _sockets(pid)
            if inode in addresses
        }
    )


def _table(path: Path) -> list[tuple[str, tuple[str, int]]]:
    rows = [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
    return [(row[9], _place(row[1])) for row in rows if row[3] == _LISTEN]


def _place(text: str) -> tuple[str, int]:
    """`0100007F:1F90` → ("127.0.0.1", 8080); the kernel writes each word of an address in the
    machine's order.
    """
    address, _, port = text.partition(":")
    words = [struct.pack("=I", int(word, 16)) for word in re.findall("." * 8, address)]
    raw = b"".join(words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw), int(
        port, 16
    )


def _sockets(pid: int) -> set[str]:
    found = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path))
            except OSError:  # it was closed
                continue
            if match:
                found.add(match[1])
    except OSError:  # the process has ended
        return set()
    return found
