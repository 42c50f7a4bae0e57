"""Read which processes of a run still exist, from the records that scripts/start.sh keeps in the
run's folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.dashboard.run_folders.events import number, whole
from atroposlib.dashboard.run_folders.folder import read_object
from atroposlib.utils.process_identity import Identity, boot_id

FOLDER = "processes"
MAX_RECORDS = 256


@dataclass(frozen=True)
class RunProcess:
    """One process of a run.

    Attributes:
        part: `service`, `environment`, `trainer`, `vllm`, `vllm-2` ….
        port: where it listens; 0 if nowhere.
        exists: whether it runs on this machine; None if that cannot be known here, as after another
            boot or on another machine.
        code: exit status, 128 + n for signal n; None if it was not recorded.
        ended: Unix time of the end; None if it was not recorded.
    """

    part: str
    port: int = 0
    exists: bool | None = None
    code: int | None = None
    ended: float | None = None

    @property
    def has_ended(self) -> bool:
        """True if its end was recorded."""
        return self.code is not None

    def describe_end(self) -> str:
        """A few words about its end."""
        if self.code is None:
            return "its process is gone"
        return (
            f"killed by signal {self.code - 128}"
            if self.code > 128
            else f"ended with status {self.code}"
        )


def read_processes(folder: Path) -> list[RunProcess]:
    """Read the records of a run's folder; empty if there are none. A record that cannot be read is
    left out.

    Args:
        folder: of the run.
    """
    try:
        paths = sorted((folder / FOLDER).glob("*.json"))[:MAX_RECORDS]
        boot = boot_id()
    except OSError:
        return []
    return [record for path in paths if (record := _read(path, boot)) is not None]


def _read(path: Path, boot: str) -> RunProcess | None:
    record = read_object(path)
    keeper: Any = record.get("keeper")
    if not isinstance(keeper, dict):
        return None
    pid, ticks, its_boot = whole(keeper.get("pid")), whole(keeper.get("ticks")), keeper.get("boot")
    if pid is None or ticks is None or not isinstance(its_boot, str):
        return None
    end = read_object(path.with_suffix(".exit"))
    exists = Identity(pid, ticks, its_boot).is_alive() if its_boot == boot else None
    # An exit file beside a process that runs is of an earlier process of this part.
    code, ended = (None, None) if exists else (whole(end.get("code")), number(end.get("at")))
    return RunProcess(path.stem, whole(record.get("port")) or 0, exists, code, ended)
