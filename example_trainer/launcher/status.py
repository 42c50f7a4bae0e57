"""One table that shows whether the stack is up and whether it moves."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from atroposlib.utils.processes import is_stopped
from example_trainer.child_processes.guard import descendants
from example_trainer.child_processes.processes import (
    ERROR_LINE,
    describe_exit,
    get_json,
    http_probe,
    read_answer,
    tail,
)
from example_trainer.launcher.command_line import ROOT
from example_trainer.launcher.fleet import Fleet, look
from example_trainer.launcher.options import RUN
from example_trainer.launcher.records import KEYS_FILE, SERVICE, Record, Records, kind_of, read_keys

PROBE_SECONDS = 5.0


@dataclass(frozen=True)
class PartStatus:
    """One row.

    Attributes:
        part: its name.
        state: `up`, `stopped` (by a signal, until SIGCONT), `finished` (ended well, which this part
            may), `down`.
        detail: health while it is up, else how it ended.
        good: nothing is wrong with it.
        pid: of the keeper; 0 if it is gone.
        since: Unix time of the start, or of the end when that is known.
        port: see Record.
        last_error: last line of its log that names an error; empty if none.
        last_error_at: Unix time of that line; None if the log has no time.
    """

    part: str
    state: str
    detail: str
    good: bool
    pid: int
    since: float
    port: int
    log: str
    last_error: str
    last_error_at: float | None = None


@dataclass(frozen=True)
class Status:
    """The whole stack.

    Attributes:
        rows: one a part that was started.
        served: weight version that the first living vLLM server serves; None if it cannot be asked.
        step: the trainer's last step; None before the first.
        step_at: Unix time of that step.
        queue: groups that wait in the rollout service; None if it cannot be asked.
        refusing: the reason for which the rollout service refuses new groups; empty if it takes them.
        shut_out: how the rollout service refuses the key of the run's folder; empty if it takes it.
        fleet: what every vLLM server serves.
        page: address on which a person sees the run; empty while the rollout service is down.
    """

    rows: list[PartStatus] = field(default_factory=list)
    served: int | None = None
    step: int | None = None
    step_at: float | None = None
    queue: int | None = None
    refusing: str = ""
    shut_out: str = ""
    fleet: Fleet = field(default_factory=Fleet)
    page: str = ""

    @property
    def good(self) -> bool:
        """Something was started, nothing is down or unwell, and no vLLM server is kept out."""
        rows_are_good = bool(self.rows) and all(row.good for row in self.rows)
        return rows_are_good and self.fleet.good and not self.refusing and not self.shut_out

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return {**asdict(self), "good": self.good}


def collect(run: Path) -> Status:
    """Ask processes, ports and logs.

    Raises:
        LauncherError: a record, or the file with the keys, cannot be read.
    """
    records = Records(run)
    found = [record for part in records.parts() if (record := records.read(part))]
    ports = {record.part: record.port for record in found if record.keeper.is_alive()}
    rows = [look_at(record, records) for record in found]
    servers = [port for part, port in ports.items() if kind_of(part) == "vllm"]
    key, service, page = read_keys(run).get(SERVICE, ""), "", ""
    queue, refusing, shut_out = None, "", ""
    if "service" in ports:
        service = f"http://localhost:{ports['service']}"
        page = f"{service}/ui"
        queue, refusing, shut_out = queue_of(service, key)
    step, step_at = last_step(run / "trainer" / "metrics.jsonl")
    return Status(
        rows=rows,
        served=served_version([*servers, ports.get("trainer", 0)][0]),
        step=step,
        step_at=step_at,
        queue=queue,
        refusing=refusing,
        shut_out=shut_out,
        fleet=look(service, key, [f"http://localhost:{port}" for port in servers]),
        page=page,
    )


def look_at(record: Record, records: Records) -> PartStatus:
    """The row of one part."""
    log, since = Path(record.log), record.since
    ended, pid, good = records.exit_of(record.part), 0, False
    if record.keeper.is_alive():
        state, detail, pid = "up", health(record), record.keeper.pid
        good = detail in ("", "healthy")
        if stopped := [one for one in (pid, *descendants(pid)) if is_stopped(one)]:
            numbers = " ".join(map(str, stopped))
            state, good = "stopped", False
            detail = f"kill -CONT {numbers} lets it go on"
        elif not records.is_recorded(record.part):
            good = False
            detail = f"the run's folder was removed; scripts/stop.sh ends it, log {record.log}"
    elif ended is None:
        state, detail = "down", "was killed, or the machine was restarted"
    else:
        state, detail, since = "down", describe_exit(ended.code), ended.at
        if record.may_finish and ended.code == 0:
            state, good = "finished", True
    return PartStatus(
        *(record.part, state, detail, good, pid, since, record.port, record.log),
        *last_error(log, time.time()),
    )


def health(record: Record) -> str:
    """`healthy`, or what is wrong; empty for a part that cannot be asked."""
    paths = {"service": "/", "vllm": "/health"}
    if (kind := kind_of(record.part)) not in paths:
        return ""
    return http_probe(f"http://localhost:{record.port}{paths[kind]}", PROBE_SECONDS)() or "healthy"


def served_version(port: int) -> int | None:
    """The weight version on vLLM's metrics page; None if there is none, or for port 0."""
    try:
        page = read_answer(f"http://localhost:{port}/metrics", PROBE_SECONDS)
    except OSError:
        return None
    for line in page.decode(errors="replace").splitlines():
        if line.startswith("lockstep_weight_version"):
            return int(float(line.rpartition(" ")[2]))
    return None


def queue_of(service: str, key: str) -> tuple[int | None, str, str]:
    """Ask the rollout service for its groups.

    Returns:
        The number that waits, or None if that is not known. Why it refuses more; empty if it takes them.
        Its answer to a wrong key; empty if the key is right.
    """
    try:
        answer = get_json(f"{service}/stats", PROBE_SECONDS, key)
        store = answer.get("store") or {}
        return int(answer["queue"]["groups"]), str(store.get("refusing_posts") or ""), ""
    except HTTPError as error:
        refused = error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.TOO_MANY_REQUESTS)
        return None, "", f"{error.code} {error.reason}" if refused else ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None, "", ""


def last_step(metrics: Path) -> tuple[int | None, float | None]:
    """Return the trainer's last step and its Unix time, from its metrics."""
    for line in reversed(tail(metrics, lines=2, columns=100_000)):
        try:
            return int(json.loads(line)["step"]), metrics.stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being written at this moment
    return None, None


NO_ERROR = re.compile(
    r"(?:\(.*?\) )?[\d:,. -]*(?:DEBUG|INFO|WARNING) |\d\d:\d\d:\d\d (?!ERROR |CRITICAL )"
)
"""The begin of a line of a lower level: a warning may quote the error that a retry overcame. A
trainer leaves INFO out."""
TIME_OF_LINE = re.compile(r"(?:(?:(\d{4})-)?(\d\d)-(\d\d) )?(\d\d):(\d\d):(\d\d)\b")
"""The time of a line of a log: of the service, of vLLM, of a trainer or an environment."""


def last_error(log: Path, now: float) -> tuple[str, float | None]:
    """Return the last line of a log that names an error, within its last megabyte, and its Unix
    time. The end of a traceback has the time of the line before it.
    """
    lines = tail(log, lines=100_000, columns=160, size=1 << 20)
    for number in reversed(range(len(lines))):
        line = lines[number]
        # vLLM advises about `ulimit -n` at every start.
        if ERROR_LINE.search(line) and not NO_ERROR.match(line) and "ulimit -n" not in line:
            times = (time_of_line(lines[before], now) for before in range(number, -1, -1))
            return line.strip(), next((at for at in times if at is not None), None)
    return "", None


def time_of_line(line: str, now: float) -> float | None:
    """Return the Unix time near the begin of a line of a log; None if there is none.

    A day or a year that the line lacks is the last one that is not in the future.
    """
    found = TIME_OF_LINE.search(line[:60])
    if found is None:
        return None
    today = datetime.fromtimestamp(now)
    year, month, day, hour, minute, second = (int(part or 0) for part in found.groups())
    date = (year or today.year, month or today.month, day or today.day)
    try:
        at = datetime(*date, hour, minute, second)
        if at > today + timedelta(hours=1):
            at = at.replace(year=at.year - 1) if month else at - timedelta(days=1)
    except ValueError:  # digits of something else
        return None
    return at.timestamp()


def clock(at: float, now: float) -> str:
    """`14:03:11 (5 min)`."""
    seconds, form = now - at, "%H:%M:%S"
    if seconds >= 12 * 3600:
        form = "%m-%d %H:%M"
    ago = f"{seconds / 3600:.1f} h"
    if seconds < 120:
        ago = f"{seconds:.0f} s"
    elif seconds < 7200:
        ago = f"{seconds / 60:.0f} min"
    return f"{time.strftime(form, time.localtime(at))} ({ago})"


def shown(value: object, missing: str, unit: str = "") -> str:
    """A value with its unit, or the words for one that is not known."""
    return missing if value is None else f"{value}{unit}"


def table(status: Status, run: Path, now: float) -> str:
    """Return the status as a table for a person."""
    if not status.rows:
        if not run.is_dir():
            return (
                f"{run} is not there: pass --run with the folder of a run, or begin one there with "
                f"scripts/start.sh{_run_option(run)}"
            )
        return f"nothing is started in {run}"
    head = ("part", "state", "since", "process", "port", "health")
    rows = [head]
    for row in status.rows:
        rows.append(
            (
                row.part,
                row.state,
                clock(row.since, now),
                str(row.pid or "-"),
                str(row.port or "-"),
                row.detail or "-",
            )
        )
    lines = columns(rows)
    served = shown(status.served, "unknown")
    step, queue = shown(status.step, "none yet"), shown(status.queue, "unknown", " groups")
    if status.step_at is not None:
        step += f" at {clock(status.step_at, now)}"
    lines += fleet_table(status.fleet, now)
    lines += [
        "",
        f"weight version served {served}, trainer's last step {step}, queue {queue}",
        f"logs in {run}",
    ]
    if status.refusing:
        lines.append(f"the service refuses new groups: {status.refusing}")
    if status.shut_out:
        lines.append(
            f"the service refuses the key {SERVICE} of {run / KEYS_FILE} ({status.shut_out}): put back the file that it was "
            "started with, or stop and start the run"
        )
    if to_resume := [row.part for row in status.rows if row.state == "down"]:
        lines.append(
            f"to start again what is down: scripts/start.sh{_run_option(run)} --resume {' '.join(to_resume)}"
        )
    if status.page:
        lines.append(f"see the run at {status.page} (its key is {SERVICE} in {run / KEYS_FILE})")
    lines += [error_line(row, now) for row in status.rows if row.last_error]
    return "\n".join(lines)


def error_line(row: PartStatus, now: float) -> str:
    """Return the line about a part's last error: a past one if the part is healthy now."""
    which = "past" if row.detail == "healthy" else "last"
    at = "" if row.last_error_at is None else f" at {clock(row.last_error_at, now)}"
    return f"{which} error of {row.part}{at}: {row.last_error}"


def _run_option(run: Path) -> str:
    """Return the option that names the folder; empty for the folder that is the default."""
    return "" if run == ROOT / RUN else f" --run {shlex.quote(str(run))}"


def fleet_table(fleet: Fleet, now: float) -> list[str]:
    """Return the table of the servers; nothing if there are none."""
    if not fleet.rows:
        return []
    source = "the servers answer"
    if fleet.published is not None:
        source = f"the trainer published it at {clock(fleet.published, now)}"
    rows = [("server", "standing", "version", "epoch", "since", "reason")]
    for row in fleet.rows:
        version, epoch = shown(row.weight_version, "-"), shown(row.weight_epoch, "-")
        since = "-"
        if row.since is not None:
            since = clock(row.since, now)
        rows.append((row.url, row.standing, version, epoch, since, row.reason or "-"))
    return [
        "",
        f"the fleet, as {source}:",
        *columns(rows),
        *(f"{url} is wanted and has not joined yet" for url in fleet.wanted),
    ]


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines whose cells stand below each other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
