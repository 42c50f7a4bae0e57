"""The process that listens on a TCP port, for the error line of a port that is in use."""

from __future__ import annotations

import os
from pathlib import Path


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
    for process in proc.glob("[0-9]*"):
        try:
            if any(os.readlink(link) in inodes for link in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:  # The process belongs to another user, or has just ended.
            continue
    return "another process"
