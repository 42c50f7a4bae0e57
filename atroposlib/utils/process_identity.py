"""Name a process so that no other is taken for it."""

from __future__ import annotations

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
    return None if fields[0] in ("Z", "X") else Identity(pid, int(fields[19]), boot_id())
