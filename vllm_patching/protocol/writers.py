"""The processes that can write a server's weights, and whether one is known to have ended.

Known is the word: what follows from it is that nothing of that process can reach memory any more. A
process that cannot be looked up (on another machine, in another process-id namespace) is never
known to have ended, however long it is silent.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.lockstep.bridge")

_PROC = Path("/proc")
_START_TIME = 19
"""Place of the start time among the fields of /proc/PID/stat that follow the command's name."""


@dataclass(frozen=True)
class Writer:
    """One process.

    Attributes:
        host: name of its machine.
        pid: its process id there.
        started: clock ticks from the machine's start to its own, which tells it apart from a later
            process of the same id.
    """

    host: str
    pid: int
    started: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Writer:
        return cls(str(data["host"]), int(data["pid"]), int(data["started"]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"

    def is_here(self) -> bool:
        """Whether this process sees that one, so that it will see it end."""
        return self.host == os.uname().nodename and _start_time(self.pid) == self.started

    def has_ended(self) -> bool:
        """Whether a process that was seen here is known to have ended, with every thread of it.

        The first thread of a killed process may be a zombie while others still run. With the last
        of them the memory and the GPU contexts of the process go, and what they had enqueued.
        """
        try:
            started = _start_time(self.pid)
            if started is None:
                return (_PROC / "self/stat").exists()  # and not the whole of /proc is gone
            if started != self.started:
                return True
            return _is_dead(_PROC / f"{self.pid}/stat") and all(
                map(_is_dead, _PROC.glob(f"{self.pid}/task/*/stat"))
            )
        except OSError as error:  # too many open files, say
            logger.warning("whether process %s has ended cannot be looked up: %s", self, error)
            return False


def this_process() -> Writer:
    """The one that asks."""
    return process_here(os.getpid())


def process_here(pid: int) -> Writer:
    """A process of this machine; `started` is 0 if it has ended."""
    return Writer(os.uname().nodename, pid, _start_time(pid) or 0)


def _fields(stat: Path) -> list[str]:
    """The fields after the command's name, which may hold anything; none if there is no such
    process.
    """
    try:
        return stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _start_time(pid: int) -> int | None:
    fields = _fields(_PROC / f"{pid}/stat")
    return int(fields[_START_TIME]) if len(fields) > _START_TIME else None


def _is_dead(stat: Path) -> bool:
    fields = _fields(stat)
    return not fields or fields[0] in "ZX"
