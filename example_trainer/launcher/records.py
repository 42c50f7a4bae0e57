"""What a run folder knows about its processes: one file each, which names a process so that no
other is taken for it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atroposlib.utils.processes import Identity, boot_id, identify
from example_trainer.child_processes.files import write_whole
from example_trainer.launcher.errors import LauncherError
from example_trainer.launcher.parts import in_order, kind_of

FOLDER = "processes"
OWNED_LOG = "trainer/vllm.log"
"""Log of a vLLM server that the trainer started, from the run's folder."""


@dataclass(frozen=True)
class Record:
    """One process of the stack, as start.sh left it.

    Attributes:
        part: `service`, `vllm`, `vllm-2` …, `environment` or `trainer`.
        keeper: the process to signal.
        since: Unix time of the start.
        log: its log.
        port: where it listens, or for a trainer the vLLM server that it owns; 0 if nowhere.
        grace: seconds that it has between SIGTERM and SIGKILL.
        may_finish: ending with status 0 is no failure.
    """

    part: str
    keeper: Identity
    since: float
    log: str
    port: int = 0
    grace: float = 10.0
    may_finish: bool = False

    def leftovers(self) -> list[Identity]:
        """Processes of this part that outlived their keeper, which only SIGKILL of the keeper makes
        possible.

        The engine of a server of another project is one: it may rename itself, so `pkill -f` misses
        it, and not notice that its server has ended. It is recognized by this part's log, which is
        its standard output. Only processes of this user that were started after the keeper are
        considered.
        """
        if self.keeper.is_alive() or self.keeper.boot != boot_id():
            return []
        logs = {os.path.realpath(self.log)}
        if self.part == "trainer":  # which may own a vLLM server with a log of its own
            logs.add(os.path.join(os.path.dirname(os.path.realpath(self.log)), OWNED_LOG))
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            process = identify(int(entry.name))
            if process is None or process.ticks < self.keeper.ticks or not owner_is_me(process):
                continue
            if logs & outputs_of(process.pid):
                found.append(process)
        return found


@dataclass(frozen=True)
class Exit:
    """How a process ended: its status (128 + n for signal n) and the Unix time."""

    code: int
    at: float


class Records:
    """The files of one run folder."""

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER

    def exit_file(self, part: str) -> Path:
        """Where the keeper writes how the part ended."""
        return self.folder / f"{part}.exit"

    def write(self, record: Record) -> None:
        """Keep a record; an earlier one of the same part is replaced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(
            self.folder / f"{record.part}.json", json.dumps(asdict(record), indent=1).encode()
        )

    def read(self, part: str) -> Record | None:
        """The record of a part; None if it was not started, or was stopped.

        Raises:
            LauncherError: the file cannot be read.
        """
        path = self.folder / f"{part}.json"
        try:
            values: dict[str, Any] = json.loads(path.read_text())
            return Record(**{**values, "keeper": Identity(**values["keeper"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LauncherError(
                f"{path} is no record of a process ({error}): remove it if nothing of this run is left"
            ) from None

    def parts(self) -> tuple[str, ...]:
        """The parts that were started and not stopped, in the order of a start."""
        return in_order(file.stem for file in self.folder.glob("*.json") if kind_of(file.stem))

    def exit_of(self, part: str) -> Exit | None:
        """How a part ended; None if it runs, or was killed together with its keeper."""
        try:
            return Exit(**json.loads(self.exit_file(part).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def remove(self, part: str) -> None:
        """Forget a part."""
        for path in (self.folder / f"{part}.json", self.exit_file(part)):
            path.unlink(missing_ok=True)


def outputs_of(pid: int) -> set[str]:
    """The files that a process has as standard output and standard error; none if it is gone or
    another user's.
    """
    found = set()
    for number in (1, 2):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{number}").removesuffix(" (deleted)"))
        except OSError:
            continue
    return found


def owner_is_me(identity: Identity) -> bool:
    """Whether the process belongs to this user."""
    try:
        return Path("/proc", str(identity.pid)).stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False
