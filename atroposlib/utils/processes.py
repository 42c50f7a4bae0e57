"""Processes of this machine, as /proc shows them: one that is still the same, and the users of a
port or a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """A process: its id, its start (clock ticks since boot, as the kernel counts them), and the
    boot.

    A process id alone is given to another process sooner or later; the three together never are.
    """

    pid: int
    ticks: int
    boot: str

    def is_alive(self) -> bool:
        """Return whether this very process still runs; a zombie does not."""
        return identify(self.pid) == self


def boot_id() -> str:
    """Return the id of the machine's present boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Identity | None:
    """Return the process that has this id now; None if there is none, or only a zombie."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command's name in brackets and may itself hold spaces and brackets.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return None
    return Identity(pid, int(fields[19]), boot_id())


def port_user(port: int, proc: Path = Path("/proc")) -> str:
    """Return the process that listens on a TCP port, as "python (pid 123)", or "another process" if
    /proc does not show it.
    """
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for pid in _users(lambda link: os.readlink(link) in inodes, proc):
        return f"{(proc / str(pid) / 'comm').read_text().strip()} (pid {pid})"
    return "another process"


def file_users(file: os.stat_result, proc: Path = Path("/proc")) -> list[int]:
    """Return the ids of the processes that have a file open, as far as this user may see them."""
    return sorted(_users(lambda link: os.path.samestat(link.stat(), file), proc))


def _users(is_of: Callable[[Path], bool], proc: Path) -> Iterator[int]:
    """Yield the processes with a descriptor for which `is_of` returns True."""
    for process in proc.glob("[0-9]*"):
        try:
            if any(is_of(link) for link in (process / "fd").iterdir()):
                yield int(process.name)
        except OSError:  # The process belongs to another user, or has just ended.
            continue
