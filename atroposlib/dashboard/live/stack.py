"""The processes of a run as the rollout service sees them: their state, their signs and their faults.

The processes are the service itself, the trainer, the environments and the vLLM servers. A sign
marks a process as ended or silent; the page shows it instead of the last state. `ended` needs a
reason: a recorded end, the end of the run, or a process that is gone. Otherwise a process that is
merely slow or cannot be reached is called silent. A fault is one sentence with its remedy.

scripts/start.sh records the processes in the run's folder; `read_processes` reads these records.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel

from atroposlib.dashboard.run_folders.runs import read_model
from atroposlib.service import metrics
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.schemas import Registration
from atroposlib.utils.processes import Identity, boot_id
from atroposlib.web.keys import LOOPBACK

STALE_SECONDS = 30.0
"""A running service writes stack.json every ten seconds. An older file is of a service that has
stopped, or stands still."""
SILENCES = 2.0
"""A trainer that does not publish its servers may send nothing for this many times the service's
--silent-after.

It is a fault after that. So is the same silence of an environment for which the trainer waits."""
RECORDS = "processes"
"""Folder of the records in the run's folder."""
MAX_RECORDS = 256


MAX_INSPECTED_GROUPS = 5000
"""Largest queue that is searched for its oldest version: a longer search would hold up other
requests."""
MAX_ENVIRONMENTS = 200
MAX_LEASES = 50
_SETTINGS = (
    "model", "num_steps", "weight_epoch", "max_staleness", "batch_size", "starting_step", "log_dir",
)  # fmt: skip
"""Fields of a trainer's registration that a stack shows."""
SLOW_SECONDS = 600.0
"""The page reports a trainer that holds a batch and has acknowledged none for this many seconds."""
NEARLY_FULL = 0.95
"""Share of the queue's bounds."""


# ---- processes and signs ----


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


class _Record(BaseModel):
    """The record of a process; its keeper writes the end."""

    keeper: Identity
    port: int = 0


class _End(BaseModel):
    code: int | None = None
    at: float | None = None


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
    records = [(path, read_model(path, _Record)) for path in paths]
    return [_process(path, record, boot) for path, record in records if record is not None]


def _process(path: Path, record: _Record, boot: str) -> RunProcess:
    process = RunProcess(path.stem, record.port)
    if record.keeper.boot == boot:
        process = replace(process, exists=record.keeper.is_alive())
    if process.exists:  # an exit file beside it is of an earlier process of this part
        return process
    end = read_model(path.with_suffix(".exit"), _End) or _End()
    return replace(process, code=end.code, ended=end.at)


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
class Sighting:
    """The time at which a stack was seen, and facts about the run.

    Attributes:
        now: Unix seconds.
        written: Unix time at which the service wrote the stack down; None if the service itself
            answers.
        ended: Unix time of the end of the run; None if it has not ended, as far as is known.
        processes: records of the run's folder.
        stopped: the service wrote the stack when it was stopped, so that nothing in it is fresh.
        run_over: the run has ended.
    """

    now: float
    written: float | None = None
    ended: float | None = None
    processes: Sequence[RunProcess] = ()
    stopped: bool = False
    run_over: bool = False

    @property
    def age(self) -> float:
        """Seconds since the stack was seen; 0 if the service answers.

        A clock that is behind makes nothing older.
        """
        return 0.0 if self.written is None else max(0.0, self.now - self.written)

    @property
    def is_stale(self) -> bool:
        """True if the service has stopped writing."""
        return self.age > STALE_SECONDS or self.stopped

    def of_kind(self, kind: str) -> list[RunProcess]:
        """Return the processes whose parts are of a kind, such as `vllm`."""
        return [one for one in self.processes if one.part.partition("-")[0] == kind]

    def judge(
        self, quiet: bool, seen: float | None, processes: Sequence[RunProcess]
    ) -> Sign | None:
        """Judge a process by its records and by how long it has been quiet.

        A recorded end counts at once. A process that does not exist here counts as ended only if it
        is quiet as well: it may run in another container.
        """
        if processes and all(one.code is not None for one in processes):
            last = max(processes, key=lambda one: one.ended or 0.0)
            return Sign("ended", last.describe_end(), last.ended)
        if not quiet:
            return None
        if processes and all(one.exists is False for one in processes):
            return Sign("ended", processes[0].describe_end(), seen)
        if self.run_over:
            return Sign("ended", "no sign since the end of the run", seen)
        return Sign("silent", seen=seen)


def signs_of(stack: Mapping[str, Any], sighting: Sighting) -> dict[str, dict[str, Any]]:
    """Return the signs by the names that the page has for processes. Processes without a sign of
    trouble are left out.

    The names are `service`, `trainer`, `environment-ID` and `server-URL`.

    Args:
        stack: as the service answers it or has written it.
        sighting: of the stack.
    """
    if not stack.get("service"):
        return {}
    sighting = replace(
        sighting,
        stopped=sighting.written is not None and stack.get("stopped") is not None,
        run_over=stack["service"]["run_ended"] or sighting.ended is not None,
    )
    signs = {
        "service": _sign_of_service(stack, sighting),
        "trainer": _sign_of_trainer(stack, sighting),
    }
    for one in stack["environments"]:
        signs[f"environment-{one['env_id']}"] = _sign_of_environment(stack, one, sighting)
    for one in stack["servers"]:
        signs[f"server-{one['url']}"] = _sign_of_server(one, sighting)
    return {name: sign._asdict() for name, sign in signs.items() if sign is not None}


def _sign_of_service(stack: Mapping[str, Any], sighting: Sighting) -> Sign | None:
    if sighting.written is None:
        return None
    if sighting.stopped:
        return Sign("ended", "stopped", float(stack["stopped"]))
    return sighting.judge(sighting.is_stale, sighting.written, sighting.of_kind("service"))


def _sign_of_trainer(stack: Mapping[str, Any], sighting: Sighting) -> Sign | None:
    if sighting.run_over:
        return Sign("ended", "the run has ended", sighting.ended)
    if not stack["trainer"]["registered"]:
        return None
    silent = stack["trainer"]["seconds_silent"] + sighting.age
    quiet = sighting.is_stale or _is_trainer_silent(stack, silent)
    return sighting.judge(quiet, sighting.now - silent, sighting.of_kind("trainer"))


def _is_trainer_silent(stack: Mapping[str, Any], silent: float) -> bool:
    """Return whether so many seconds without a request are too many.

    A trainer that holds a batch may send nothing for as long as it takes. A trainer that publishes
    its servers never falls silent.
    """
    limit = stack["service"]["silent_after"]
    if stack["trainer"]["publishes"]:
        return bool(silent > limit)
    holds = any(lease["sent"] for lease in stack["leases"])
    return silent > SILENCES * limit and not holds


def _sign_of_environment(
    stack: Mapping[str, Any], one: Mapping[str, Any], sighting: Sighting
) -> Sign | None:
    if not one["connected"]:
        return Sign("ended", "disconnected") if sighting.run_over else None
    silent = one["seconds_silent"] + sighting.age
    quiet = sighting.is_stale or silent > stack["service"]["silent_after"]
    return sighting.judge(quiet, sighting.now - silent, sighting.of_kind("environment"))


def _sign_of_server(one: Mapping[str, Any], sighting: Sighting) -> Sign | None:
    address = urlsplit(one["url"])
    # The record of a trainer that owns its server has the server's port.
    processes = [
        process
        for process in (*sighting.of_kind("vllm"), *sighting.of_kind("trainer"))
        if address.hostname in LOOPBACK and process.port and process.port == address.port
    ]
    quiet = sighting.is_stale or (sighting.run_over and one["health"] == "silent")
    return sighting.judge(quiet, one["answered"] or sighting.written, processes)


# ---- the stack ----


class TrainerContact(NamedTuple):
    """Times of the trainer's last requests."""

    seconds_since_step: float | None = None
    """Since its last acknowledgement; None if none was seen."""
    seconds_silent: float = 0.0
    """Since its last request of any kind, or since the service began."""
    publishes: bool = False
    """It publishes its servers every few seconds, whatever else it does."""


def mark_of(trainer: Registration | None) -> str | None:
    """Return a mark that differs for every registration; None without a trainer.

    The page does not show the uuid itself, because a client may act as the trainer with it.
    """
    return None if trainer is None else hashlib.sha256(str(trainer.uuid).encode()).hexdigest()[:8]


def stack_of(
    queue: RolloutQueue,
    servers: Sequence[Mapping[str, Any]],
    now: float,
    monotonic: float,
    trainer: TrainerContact = TrainerContact(),  # noqa: B008 - a tuple
    processes: Sequence[RunProcess] = (),
    ended: float | None = None,
    store: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the stack as GET /ui/api/stack answers it.

    Args:
        queue: the service's.
        servers: rows of `Server.row`.
        now: Unix seconds.
        monotonic: seconds of the queue's clock.
        trainer: its last requests.
        processes: records of the run's folder.
        ended: Unix time of the end of the run, if it is known.
        store: space of the store, as `PostSpace.figures` returns it.
    """
    dropped: Counter[str] = Counter()
    for (reason, _), count in queue.drops.items():
        dropped[reason] += count
    stack: dict[str, Any] = {
        "time": now,
        "live": True,
        "service": {
            "step": queue.current_step,
            "sampling_version": queue.sampling_version(),
            "trainer_version": queue.trainer_version(),
            "waiting_because": queue.waiting,
            "run_ended": queue.ended,
            "silent_after": queue.limits.silent_after,
            "store": store and dict(store),
        },
        "trainer": _trainer_json(queue, trainer),
        "queue": metrics.backlog(queue, MAX_INSPECTED_GROUPS),
        "leases": metrics.leases(queue, MAX_LEASES),
        "dropped": [
            {"reason": reason, "groups": count} for reason, count in sorted(dropped.items())
        ],
        "environments": metrics.environments(queue, monotonic, MAX_ENVIRONMENTS),
        "servers": [dict(server) for server in servers],
    }
    stack["signs"] = signs_of(stack, Sighting(now, ended=ended, processes=processes))
    stack["faults"] = find_faults(stack)
    return stack


def _trainer_json(queue: RolloutQueue, activity: TrainerContact) -> dict[str, Any]:
    """Return the trainer's part of a stack. Without a trainer, its settings are null."""
    trainer = queue.registration
    settings = {name: getattr(trainer, name, None) for name in _SETTINGS}
    return {
        "registered": trainer is not None,
        "step": queue.sampling_version(),
        "of_steps": settings.pop("num_steps"),
        "version": queue.trainer_version(),
        "seconds_since_step": activity.seconds_since_step,
        "seconds_silent": round(activity.seconds_silent, 1),
        "publishes": activity.publishes,
        "batches_skipped": queue.batches_skipped,
        "registration": mark_of(trainer),
        **settings,
    }


def without_clocks(stack: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a stack that counts when two are compared: all but the seconds that pass
    in each anyway.
    """
    shown = {name: value for name, value in stack.items() if name != "time"}
    if (store := stack["service"].get("store")) is not None:
        shown["service"] = stack["service"] | {"store": store | {"free_bytes": None}}
    shown["trainer"] = stack["trainer"] | {"seconds_since_step": None, "seconds_silent": None}
    shown["signs"] = {name: sign | {"seen": None} for name, sign in stack["signs"].items()}
    shown["environments"] = [one | {"seconds_silent": None} for one in stack["environments"]]
    shown["servers"] = [one | {"asked": None, "answered": None} for one in stack["servers"]]
    return shown


# ---- faults ----


def find_faults(stack: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the faults of a stack, first the ones that stop a run."""
    faults = [
        *_faults_of_store(stack),
        *_faults_of_trainer(stack),
        *_faults_of_queue(stack),
        *_faults_of_environments(stack),
    ]
    if not stack["service"]["run_ended"]:  # its servers may stop then
        for server in stack["servers"]:
            faults += _faults_of_server(server)
    # "error" sorts before "warning".
    return sorted(faults, key=lambda fault: str(fault["severity"]))


def _fault(
    part: str,
    severity: Literal["warning", "error"],
    text: str,
    remedy: str,
    since: float | None = None,
) -> dict[str, Any]:
    """Return one thing that is wrong.

    Args:
        part: `service`, `trainer`, `queue`, `environment NAME` or `server URL`.
        severity: of the fault.
        text: the fault, with the figure that shows it.
        remedy: what to do.
        since: Unix time; None if it is not known.
    """
    return {"part": part, "severity": severity, "text": text, "remedy": remedy, "since": since}


def _see_log_of(part: str) -> str:
    """Return the remedy for a process that does not answer."""
    return f"See its log (`scripts/logs.sh {part}`). Its process is gone? `scripts/start.sh --resume {part}`."


def _minutes(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds // 60:.0f} minutes"
    return "a minute" if seconds >= 60 else f"{seconds:.0f} s"


def _faults_of_trainer(stack: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    trainer = stack["trainer"]
    if stack["service"]["run_ended"]:
        return
    if not trainer["registered"]:
        if stack["environments"] or stack["queue"]["groups"]:
            remedy = "Start it; its log names what it waits for."
            yield _fault("trainer", "warning", "No trainer has registered.", remedy)
        return
    silent, slow = trainer["seconds_silent"], trainer["seconds_since_step"]
    severity: Literal["warning", "error"] = "error" if trainer["publishes"] else "warning"
    if _is_trainer_silent(stack, silent):
        text = f"The trainer has sent nothing for {_minutes(silent)}."
        yield _fault("trainer", severity, text, _see_log_of("trainer"))
    elif (slow or 0.0) > SLOW_SECONDS and any(lease["sent"] for lease in stack["leases"]):
        text = f"The trainer holds a batch and has acknowledged none for {_minutes(slow)}."
        yield _fault("trainer", "error", text, _see_log_of("trainer"))
    if trainer["batches_skipped"]:
        text = f"{trainer['batches_skipped']} batches could not be trained on."
        remedy = "The trainer's log names the reason of each (docs/runs.md)."
        yield _fault("trainer", "warning", text, remedy)


def _faults_of_store(stack: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    store = stack["service"]["store"] or {}
    if store.get("refusing_posts"):
        remedy = "Environments go on by themselves as soon as the service takes new groups again."
        yield _fault("service", "error", store["refusing_posts"], remedy)
    elif store and not store["reserve_is_whole"]:
        text = f"The reserve of {store['reserve_bytes'] / 1e6:,.0f} MB beside {store['path']} is not there."
        remedy = "Free space on that disk, or raise the quota: it is then built again."
        yield _fault("service", "warning", text, remedy)


def _faults_of_queue(stack: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    queue = stack["queue"]
    for unit in ("groups", "bytes"):
        held, limit = queue[f"held_{unit}"], queue[f"max_{unit}"]
        if held >= NEARLY_FULL * limit:
            text = f"The queue holds {held:,} of {limit:,} {unit}: posts are refused beyond."
            remedy = f"The trainer is slower than the environments: give it time, or start the service with --max-queue-{unit}."
            yield _fault("queue", "warning", text, remedy)
    if queue["waiting_for_reference"] and not queue["groups"]:
        text = f"{queue['waiting_for_reference']} groups wait for reference logprobs, and none is ready."
        remedy = "Start a reference worker, or see why it takes none (GET /reference)."
        yield _fault("queue", "warning", text, remedy)


def _faults_of_environments(stack: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the faults of environments, which count only while the trainer waits for groups."""
    service = stack["service"]
    if (
        not stack["trainer"]["registered"]
        or service["run_ended"]
        or stack["queue"]["groups"]
        or not service["waiting_because"]
    ):
        return
    connected = [one for one in stack["environments"] if one["connected"]]
    if not connected:
        text = "The trainer waits for groups, and no environment is connected."
        yield _fault("service", "warning", text, "Start one.")
    for one in connected:
        name, silent = one["wandb_name"], one["seconds_silent"]
        if silent > SILENCES * service["silent_after"]:
            text = f"{name} has sent nothing for {_minutes(silent)}, and the trainer waits."
            yield _fault(f"environment {name}", "error", text, _see_log_of("environment"))


def _faults_of_server(server: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    url, detail, since = server["url"], server["detail"], server["standing_since"]
    reason = server["reason"] or detail
    match server["health"], server["standing"]:
        case "silent", _:
            text, since = f"{url} does not answer: {detail}.", server["since"]
            remedy = f"{_see_log_of('servers')} The trainer then brings it its weights."
        case "bad", _:
            text, since = f"{url} serves nothing: {detail}.", server["since"]
            remedy = "The trainer mends it with its next update; if it does not, start it again."
        case _, "quarantined":
            text = f"{url} is kept out: {reason or 'its weights were not proven'}."
            remedy = "It comes back with the next whole update; if it does not, start it again."
        case _, "away":
            text = f"The trainer does not reach {url}: {reason or 'no answer'}."
            remedy = "See its log, and whether the trainer's machine can reach that address."
        case _:
            return
    yield _fault(f"server {url}", "error", text, remedy, since)
