"""Find the processes of a run that have ended or give no sign any more.

scripts/start.sh records the processes in the run's folder. `read_processes` reads these records;
`signs_of` compares them with the stack.

The page shows such a state instead of the last one that was seen. `ended` needs a reason: a
recorded end, the end of the run, or a process that is gone. Otherwise a process that is merely slow
or cannot be reached is called silent, with its last sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from atroposlib.dashboard.events import number, whole
from atroposlib.dashboard.run_folders.folder import read_object
from atroposlib.utils.processes import Identity, boot_id
from atroposlib.web.keys import LOOPBACK

STALE_SECONDS = 30.0
"""A running service writes stack.json every ten seconds. An older file is of a service that has
stopped, or stands still."""
SILENCES = 2.0
"""A trainer that does not publish its servers may say nothing for this many times the service's
--silent-after.

It is a fault after that. So is the same silence of an environment for which the trainer waits."""
RECORDS = "processes"
"""Folder of the records in the run's folder."""
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

    def describe_end(self) -> str:
        """Return a few words about its end."""
        if self.code is None:
            return "its process is gone"
        if self.code > 128:
            return f"killed by signal {self.code - 128}"
        return f"ended with status {self.code}"


def read_processes(folder: Path) -> list[RunProcess]:
    """Read the records of a run's folder; empty if there are none. A record that cannot be read is
    left out.

    Args:
        folder: of the run.
    """
    try:
        paths = sorted((folder / RECORDS).glob("*.json"))[:MAX_RECORDS]
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
    process = RunProcess(path.stem, whole(record.get("port")) or 0)
    if its_boot == boot:
        process = replace(process, exists=Identity(pid, ticks, its_boot).is_alive())
    if process.exists:  # an exit file beside it is of an earlier process of this part
        return process
    end = read_object(path.with_suffix(".exit"))
    return replace(process, code=whole(end.get("code")), ended=number(end.get("at")))


class Sign(NamedTuple):
    """The state of a process that is not simply running.

    Attributes:
        state: `ended`, or `silent` if there is no sign of the process.
        text: the reason; empty for a silent process.
        seen: Unix time of its last sign, or of its end; None if that is not known.
    """

    state: Literal["ended", "silent"]
    text: str = ""
    seen: float | None = None


@dataclass(frozen=True)
class Known:
    """Facts about a run beside its stack.

    Attributes:
        now: Unix seconds.
        written: Unix time at which the service wrote the stack down; None if the service itself
            answers.
        ended: Unix time of the end of the run; None if it has not ended, as far as is known.
        processes: records of the run's folder.
        stopped: the service wrote the stack when it was stopped, so that nothing in it is fresh.
    """

    now: float
    written: float | None = None
    ended: float | None = None
    processes: Sequence[RunProcess] = ()
    stopped: bool = False

    @property
    def age(self) -> float:
        """Seconds since the stack was seen; 0 if the service answers.

        A clock that is behind makes nothing older.
        """
        if self.written is None:
            return 0.0
        return max(0.0, self.now - self.written)

    @property
    def is_stale(self) -> bool:
        """True if the service has stopped writing."""
        return self.age > STALE_SECONDS or self.stopped

    def of_kind(self, kind: str) -> list[RunProcess]:
        """Return the processes whose parts are of a kind, such as `vllm`."""
        return [one for one in self.processes if one.part.partition("-")[0] == kind]


def signs_of(stack: Mapping[str, Any], known: Known) -> dict[str, dict[str, Any]]:
    """Return the signs by the names that the page has for processes. Those that run, as far as is
    known, are left out.

    The names are `service`, `trainer`, `environment-ID` and `server-URL`.

    Args:
        stack: as the service answers it or has written it.
        known: facts beside it.
    """
    if known.written is not None and stack.get("stopped") is not None:
        known = replace(known, stopped=True)
    signs = dict(_signs(stack, known)) if stack.get("service") else {}
    return {name: sign._asdict() for name, sign in signs.items() if sign is not None}


def _signs(stack: Mapping[str, Any], known: Known) -> Iterator[tuple[str, Sign | None]]:
    run_over = bool(stack["service"].get("run_ended")) or known.ended is not None
    yield "service", _of_service(stack, known, run_over)
    yield "trainer", _of_trainer(stack, known, run_over)
    for one in stack.get("environments", ()):
        yield f"environment-{one['env_id']}", _of_environment(stack, one, known, run_over)
    for one in stack.get("servers", ()):
        yield f"server-{one['url']}", _of_server(one, known, run_over)


def _judged(
    quiet: bool, seen: float | None, processes: Sequence[RunProcess], run_over: bool
) -> Sign | None:
    """Judge a process by its records and by how long it has been quiet.

    A recorded end counts at once. A process that does not exist here counts as ended only if it is
    quiet as well: it may run in another container.
    """
    if processes and all(one.code is not None for one in processes):
        last = max(processes, key=lambda one: one.ended or 0.0)
        return Sign("ended", last.describe_end(), last.ended)
    if not quiet:
        return None
    if processes and all(one.exists is False for one in processes):
        return Sign("ended", processes[0].describe_end(), seen)
    if run_over:
        return Sign("ended", "no sign since the end of the run", seen)
    return Sign("silent", seen=seen)


def _of_service(stack: Mapping[str, Any], known: Known, run_over: bool) -> Sign | None:
    if known.written is None:
        return None
    stopped = stack.get("stopped")
    if isinstance(stopped, int | float):
        return Sign("ended", "stopped", float(stopped))
    return _judged(known.is_stale, known.written, known.of_kind("service"), run_over)


def _of_trainer(stack: Mapping[str, Any], known: Known, run_over: bool) -> Sign | None:
    trainer = stack["trainer"]
    if run_over:
        return Sign("ended", "the run has ended", known.ended)
    if not trainer.get("registered"):
        return None
    silent = float(trainer.get("seconds_silent") or 0.0) + known.age
    publishes = bool(trainer.get("publishes"))
    holds = any(lease.get("sent") for lease in stack.get("leases", ()))
    limit = float(stack["service"].get("silent_after") or 0.0)
    if not publishes:
        limit *= SILENCES
    # A trainer that publishes nothing may train on its batch for as long as it takes.
    quiet = known.is_stale or (silent > limit and (publishes or not holds))
    return _judged(quiet, known.now - silent, known.of_kind("trainer"), run_over)


def _of_environment(
    stack: Mapping[str, Any], one: Mapping[str, Any], known: Known, run_over: bool
) -> Sign | None:
    if one.get("connected") is False and run_over:
        return Sign("ended", "disconnected")
    if one.get("connected") is False:
        return None
    silent = float(one.get("seconds_silent") or 0.0) + known.age
    quiet = known.is_stale or silent > float(stack["service"].get("silent_after") or 0.0)
    return _judged(quiet, known.now - silent, known.of_kind("environment"), run_over)


def _of_server(one: Mapping[str, Any], known: Known, run_over: bool) -> Sign | None:
    address = urlsplit(str(one["url"]))
    # The record of a trainer that owns its server has the server's port.
    processes = [
        process
        for process in (*known.of_kind("vllm"), *known.of_kind("trainer"))
        if address.hostname in LOOPBACK and process.port and process.port == address.port
    ]
    quiet = known.is_stale or (run_over and one.get("health") == "silent")
    seen = one.get("answered")
    if known.is_stale:
        seen = seen or known.written
    return _judged(quiet, seen, processes, run_over)
