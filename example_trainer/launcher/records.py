"""The parts of a stack (service, vllm, vllm-2, …, environment, trainer), and the facts that a run
folder keeps of them. These are keys, and one file for each process, so that no other process is
taken for it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atroposlib.utils.processes import Identity, boot_id, identify, started_at
from example_trainer.child_processes.files import write_whole
from example_trainer.child_processes.guard import EXIT_SUFFIX
from example_trainer.child_processes.run_keys import KEYS_FILE, SERVICE, VLLM, make_keys, read_keys
from example_trainer.child_processes.vllm_flags import flag_value
from example_trainer.launcher.command_line import LauncherError

PARTS = ("service", "vllm", "environment", "trainer")
"""The kinds of part, in the order in which they are started. There can be several vLLM servers, one
of each of the others."""
SERVERS = "servers"
"""Names every vLLM server where parts are named."""
_SERVER = re.compile(r"vllm(?:-([2-9]|[1-9][0-9]+))?")
_STOP_ORDER = ("environment", "trainer", "vllm", "service")


def server_name(number: int) -> str:
    """`vllm` for the first server (number 0), `vllm-2` for the second one, and so on."""
    return "vllm" if number == 0 else f"vllm-{number + 1}"


def server_number(part: str) -> int | None:
    """Which server a part is, counted from 0; None for another part, or for no part at all."""
    found = _SERVER.fullmatch(part)
    return None if found is None else int(found[1] or 1) - 1


def kind_of(part: str) -> str:
    """The kind, one of PARTS; empty for a name that no part has."""
    if server_number(part) is not None:
        return "vllm"
    return part if part in PARTS else ""


def parts_of(servers: int) -> tuple[str, ...]:
    """Every part of a stack with so many vLLM servers, in the order in which they are started."""
    names = {"vllm": tuple(server_name(number) for number in range(servers))}
    return tuple(name for kind in PARTS for name in names.get(kind, (kind,)))


def in_order(parts: Iterable[str]) -> tuple[str, ...]:
    """Parts in the order in which they are started, each once."""
    return tuple(
        sorted(set(parts), key=lambda part: (PARTS.index(kind_of(part)), server_number(part) or 0))
    )


def to_stop(parts: Iterable[str]) -> tuple[str, ...]:
    """Parts in the order in which they are stopped: a part that feeds others before them."""
    return tuple(
        sorted(
            set(parts),
            key=lambda part: (_STOP_ORDER.index(kind_of(part)), server_number(part) or 0),
        )
    )


def chosen(named: Sequence[str], there: Sequence[str]) -> tuple[str, ...]:
    """The parts that were named, or all.

    Args:
        named: names as they were typed; `servers` stands for every vLLM server.
        there: the parts that there are.

    Raises:
        LauncherError: no part has a name, or there is no such server.
    """
    found: set[str] = set()
    for name in named:
        if name == SERVERS:
            found |= {part for part in there if kind_of(part) == "vllm"}
        elif kind_of(name) == "vllm" and name not in there and name != "vllm":
            servers = (
                ", ".join(part for part in there if kind_of(part) == "vllm") or "no vLLM server"
            )
            raise LauncherError(
                f"{name!r} is not there: this stack has {servers}; --vllm-servers sets how many"
            )
        elif not kind_of(name):
            known = ", ".join((*PARTS, SERVERS))
            raise LauncherError(
                f"{name!r} is not a part of the stack: give some of {known} or vllm-2 and so on, "
                "or none for all"
            )
        else:
            found.add(name)
    return in_order(found) if named else in_order(there)


__all__ = [
    "KEYS_FILE",
    "NEEDED_BY",
    "SERVICE",
    "VLLM",
    "make_keys",
    "read_keys",
    "refuse_keys",
    "variables_of",
]
BOTH = (SERVICE, VLLM)
NEEDED_BY = {"service": BOTH, "vllm": (VLLM,), "environment": BOTH, "trainer": BOTH}
"""Kind of part -> the variables that it gets. The service asks the servers how they are, for its
page."""


def variables_of(
    part: str, environment: Mapping[str, str], keys: Mapping[str, str]
) -> dict[str, str]:
    """The environment with the keys that a part needs, and without all other keys."""
    others = {name: value for name, value in environment.items() if name not in (SERVICE, VLLM)}
    return others | {name: keys[name] for name in NEEDED_BY[kind_of(part)]}


def refuse_keys(part: str, words: tuple[str, ...]) -> None:
    """Refuse a key among the further flags of a part.

    Raises:
        LauncherError: there is one; all users could read it in `ps` and in the run's folder.
    """
    found = [flag for word in words if "api-key" in (flag := word.split("=")[0]).replace("_", "-")]
    if found:
        raise LauncherError(
            f"--{part}-args holds {found[0]}, which all users could read in `ps`: leave it out; "
            "start.sh takes keys from "
            f"{SERVICE} and {VLLM}, or makes them"
        )


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
        may_finish: ending with status 0 is not a failure.
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

        The engine of a server of another project is one. It may rename itself, so `pkill -f` misses
        it. It may not notice that its server has ended. It is recognized by this part's log, which
        is its standard output. Only processes of this user that were started after the keeper are
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
    """The end of a process: its status (128 + n for signal n) and the Unix time."""

    code: int
    at: float


class Records:
    """The files of one run folder.

    A part whose file is gone, because the folder was removed under a living run, is found by its
    keeper's command line.
    """

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER

    def exit_file(self, part: str) -> Path:
        """Where the keeper writes how the part ended."""
        return self.folder / f"{part}{EXIT_SUFFIX}"

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
            return self.unrecorded().get(part)
        except NotADirectoryError:
            raise LauncherError(
                f"{self.folder} is a file, and records of processes belong into a folder of that "
                "name: remove the file, or give another --run"
            ) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LauncherError(
                f"{path} is not a record of a process ({error}): remove it if nothing of this run "
                "is left"
            ) from None

    def parts(self) -> tuple[str, ...]:
        """The parts that were started and not stopped, in the order of a start."""
        files = (file.stem for file in self.folder.glob("*.json") if kind_of(file.stem))
        return in_order([*files, *self.unrecorded()])

    def living(self) -> list[str]:
        """The parts whose processes live, in the order of a start."""
        return [
            part
            for part in self.parts()
            if (record := self.read(part)) and record.keeper.is_alive()
        ]

    def is_recorded(self, part: str) -> bool:
        """Report if the part has its file."""
        return (self.folder / f"{part}.json").exists()

    def unrecorded(self) -> dict[str, Record]:
        """Return the living parts of this run and user that have no file, by name."""
        found = {}
        folder = os.path.realpath(self.folder)
        for entry in Path("/proc").glob("[0-9]*"):
            words = command_of(int(entry.name))
            # Python, its two flags, the guard, the file, the grace period, the command
            if len(words) < 7 or os.path.basename(words[3]) != "guard.py":
                continue
            exit_file, grace, *command = words[4:]
            part, suffix = os.path.splitext(os.path.basename(exit_file))
            if suffix != EXIT_SUFFIX or not kind_of(part) or self.is_recorded(part):
                continue
            keeper, since = identify(int(entry.name)), started_at(int(entry.name))
            if os.path.realpath(os.path.dirname(exit_file)) != folder or keeper is None:
                continue
            if since is None or not owner_is_me(keeper):
                continue
            log = next(iter(outputs_of(keeper.pid)), os.devnull)
            port = int(flag_value(command, "--port") or 0)
            ends = kind_of(part) in ("environment", "trainer")
            found[part] = Record(part, keeper, since, log, port, float(grace), ends)
        return found

    def exit_of(self, part: str) -> Exit | None:
        """Return the end of a part; None if it runs, or was killed together with its keeper."""
        try:
            return Exit(**json.loads(self.exit_file(part).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def remove(self, part: str) -> None:
        """Forget a part."""
        for path in (self.folder / f"{part}.json", self.exit_file(part)):
            path.unlink(missing_ok=True)


def command_of(pid: int) -> list[str]:
    """Return a process's command line, word by word; empty if it has ended or is a kernel thread."""
    try:
        line = Path("/proc", str(pid), "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return line.decode(errors="replace").split("\0")[:-1]


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
    """Report if the process belongs to this user."""
    try:
        return Path("/proc", str(identity.pid)).stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False
