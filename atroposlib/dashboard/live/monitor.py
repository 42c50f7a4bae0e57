"""The live run: poll the service and its servers, send news to the pages, and keep a record.

It polls every second while a page is open, and more rarely otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from atroposlib.dashboard.events import Drops, Event, events_between, number, restarted
from atroposlib.dashboard.live.hub import Hub
from atroposlib.dashboard.live.servers import Server, ServerWatch, read_versions
from atroposlib.dashboard.live.stack import (
    RunProcess,
    TrainerContact,
    mark_of,
    read_processes,
    stack_of,
    without_clocks,
)
from atroposlib.dashboard.run_folders.runs import (
    LIVE,
    OBSERVED,
    RunFiles,
    environment_rows,
    read_object,
)
from atroposlib.service.fleet import FORGET_SECONDS
from atroposlib.utils.files import append_whole, cannot_write, ends_whole, write_whole
from atroposlib.web.addresses import server_address

logger = logging.getLogger(__name__)

MAX_BYTES = 16 << 20
"""Bytes of a file of lines. A longer file is rotated: the earlier one is kept beside it."""
MAX_WAITING_BYTES = 1 << 20
"""Bytes of lines that wait for space on the disk. Further lines are dropped."""


def observed_folder(run_folder: Path | None, store: Path | None) -> ObservedFolder:
    """Return the folder of a service's record.

    Args:
        run_folder: the run's folder, if the service knows it.
        store: the file of its store; None if it keeps everything in memory.
    """
    if run_folder is not None:
        return ObservedFolder(run_folder / OBSERVED)
    if store is not None:
        return ObservedFolder(store.with_name(f"{store.stem}.{OBSERVED}"))
    return ObservedFolder(None)


class ObservedFolder:
    """The folder, and how its files are written. Writing never raises: a file that cannot be
    written is logged once, and the run goes on. Not for several threads at a time.

    Args:
        path: of the folder, which is made when something is written; None for one that is removed
            when this process ends.
    """

    def __init__(self, path: Path | None) -> None:
        self.is_kept = path is not None
        """The folder outlives this process."""
        if path is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="lockstep-page-")
            path = Path(self._temporary.name)
        self.path = path
        self._made = self._complained = False
        self._waiting: dict[str, bytes] = {}
        """Lines that the disk refused, by name of their file; they come with later ones."""

    @property
    def run(self) -> dict[str, Any]:
        """The settings of the run that were written last; empty before."""
        return read_object(self.path / "run.json")

    @property
    def stack(self) -> dict[str, Any]:
        """The stack, as it was written last; empty before."""
        return read_object(self.path / "stack.json")

    def begin(self, run: Mapping[str, Any]) -> None:
        """Another run begins: what was written of an earlier one is put aside."""
        for name in ("events", "servers"):
            self._put_aside(self.path / f"{name}.jsonl")
        self.write("run.json", run)

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add lines to `name`.jsonl."""
        lines = self._waiting.pop(name, b"") + b"".join(
            orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows
        )
        if not lines:
            return
        path = self.path / f"{name}.jsonl"
        try:
            self._make()
            if path.exists() and path.stat().st_size > MAX_BYTES:
                path.replace(path.with_name(f"{name}.full.jsonl"))
            with path.open("ab", buffering=0) as file:
                # A process may have been killed in the middle of a line.
                torn = bool(file.tell()) and not ends_whole(path)
                append_whole(file.fileno(), b"\n" * torn + lines)
        except OSError as error:
            self._complain(path, error, len(lines))
            if len(lines) <= MAX_WAITING_BYTES:
                self._waiting[name] = lines
        else:
            self._complained = False

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a whole file, so that a reader sees this one or the one before."""
        path, whole = self.path / name, orjson.dumps(content)
        try:
            self._make()
            write_whole(path, whole)
        except OSError as error:
            self._complain(path, error, len(whole))

    def _make(self) -> None:
        """Make the folder. Its parents are made once: a run's folder that was removed stays removed."""
        self.path.mkdir(parents=not self._made, exist_ok=True)
        self._made = True

    def _put_aside(self, path: Path) -> None:
        number = 1
        while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        try:
            if path.exists():
                path.rename(aside)
        except OSError as error:
            self._complain(path, error)

    def _complain(self, path: Path, error: OSError, n_bytes: int | None = None) -> None:
        if not self._complained:
            self._complained = True
            reason = cannot_write(path, error, n_bytes)
            logger.warning(
                "the page %s; make room there. The run goes on, and will not be seen whole later",
                reason,
            )


if TYPE_CHECKING:
    from atroposlib.service.service import RolloutService


WATCHED_SECONDS, ALONE_SECONDS = 1.0, 3.0
"""Seconds between two rounds, while a page is open and while none is."""
RUN_FIELDS = (
    "model", "num_steps", "checkpoint_dir", "log_dir", "batch_size", "weight_epoch", "starting_step",
)  # fmt: skip
"""Fields of a trainer's registration that run.json keeps."""
KEEP_SECONDS = 10.0
"""Seconds between two writings of stack.json."""


@dataclass(frozen=True, slots=True)
class Place:
    """The service's address and folder, for people.

    Attributes:
        name, port: of the service.
        run_folder: of the run; None if no option names it.
    """

    name: str = "rollout service"
    port: int = 0
    run_folder: Path | None = None


class LiveSource:
    """The run of this process's service.

    Args:
        service: of this process.
        observed: folder of the record.
        hub: of the pages that are open.
        place: see Place.
        watch: polls the vLLM servers; None for one without a key.
    """

    def __init__(
        self,
        service: RolloutService,
        observed: ObservedFolder,
        hub: Hub,
        place: Place,
        watch: ServerWatch | None = None,
    ) -> None:
        self.service, self.observed, self.hub, self.place = service, observed, hub, place
        self.watch = watch or ServerWatch()
        self.stack: dict[str, Any] = {}
        # One thread, so that the files are written in order.
        self._thread = ThreadPoolExecutor(1, "page-notes")
        self._drops = Drops()
        self._servers: dict[str, dict[str, Any]] = {}
        self._versions_written: dict[str, Any] = {}
        self._kept = 0.0
        self._processes: list[RunProcess] = []
        self._ended: float | None = None
        self._acked: tuple[int | None, float | None] = (None, None)
        self._run_written: dict[str, Any] = {}
        self._before = self._of_earlier_process()

    def _of_earlier_process(self) -> dict[str, Any]:
        """Return the last stack that an earlier process of this service wrote, if the run goes on
        in this process; else empty.
        """
        trainer = self.service.queue.registration
        if trainer is None:
            return {}
        stack = self.observed.stack
        # Otherwise, the page would never miss a trainer that died while the service was down.
        match stack.get("trainer"):
            case {"registration": mark, "publishes": bool(publishes)} if mark == mark_of(trainer):
                self.service.note_trainer_call(publishes)
        rows = stack.get("servers") or []
        self.watch.remembered = {
            row["url"]: row
            for row in rows
            if isinstance(row, dict) and isinstance(row.get("url"), str)
        }
        self.watch.versions = read_versions(self.observed.path / "servers.jsonl")
        self._servers = {
            url: Server.remembered(url, row).row({}) for url, row in self.watch.remembered.items()
        }
        return stack

    # ---- what routes ask ----

    def files(self) -> RunFiles:
        """Return the files of the run, as far as they are known."""
        folder = self._figures()
        root = self.place.run_folder or folder
        model = getattr(self.service.queue.registration, "model", None) or ""
        name = model.rstrip("/").rpartition("/")[2]
        if self.place.run_folder is not None:
            name = root.absolute().name
        return RunFiles(
            LIVE,
            name or "this run",
            root,
            folder / "metrics.jsonl",
            folder / "evaluations.jsonl",
            self.observed.path,
            environment=environment_rows(root),
        )

    def _figures(self) -> Path:
        """Return the trainer's folder: from its registration, else from the run's folder."""
        registered = Path(getattr(self.service.queue.registration, "log_dir", None) or "")
        if registered.is_absolute() and registered.is_dir():
            return registered
        if self.place.run_folder is None:
            return self.observed.path
        trainer = self.place.run_folder / "trainer"
        return trainer if trainer.is_dir() else self.place.run_folder

    # ---- the rounds ----

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch the stack while the block runs."""
        rounds = asyncio.create_task(self._rounds())
        try:
            yield
        finally:
            rounds.cancel()
            await asyncio.wait([rounds])
            self.hub.close()
            await self.watch.close()
            loop = asyncio.get_running_loop()
            stopped = self.stack | {"stopped": time.time()} if self.stack else {}
            await loop.run_in_executor(self._thread, self._note, [], [], stopped, self._run_json())
            self._thread.shutdown()

    async def _rounds(self) -> None:
        looking: asyncio.Task[None] | None = None
        try:
            while True:
                try:
                    if looking is None or looking.done():
                        looking = asyncio.create_task(self.watch.look(self._urls()))
                    # A server that does not answer delays nothing else: a later round has its
                    # answer.
                    await asyncio.wait([looking], timeout=WATCHED_SECONDS / 2)
                    if looking.done():
                        looking.result()
                    await self.round()
                except Exception:
                    logger.exception("the page could not look at the stack; it tries again")
                await asyncio.sleep(WATCHED_SECONDS if len(self.hub) else ALONE_SECONDS)
        finally:
            if looking is not None:
                looking.cancel()
                await asyncio.wait([looking])

    async def round(self) -> None:
        """Publish and record one state of the stack, with the newest answers of the servers."""
        before, loop = self.stack or None, asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._read_files)
        self.stack = self._look()
        events = [
            *events_between(before, self.stack, self._servers),
            *self._drops.events(self.stack),
        ]
        self._servers = {row["url"]: row for row in self.stack["servers"]}
        if before is None:
            events += restarted(self._before, self.stack)
        if before is None or without_clocks(before) != without_clocks(self.stack):
            self.hub.publish(LIVE, "stack", self.stack)
        versions = self._new_versions()
        if versions:
            rows = [server.weights(history=False) for server in self.watch.servers.values()]
            self.hub.publish(LIVE, "weights", {"servers": rows})
        keep: dict[str, Any] = {}
        if events or time.monotonic() - self._kept >= KEEP_SECONDS:
            self._kept, keep = time.monotonic(), self.stack
        await loop.run_in_executor(
            self._thread, self._note, events, versions, keep, self._run_json()
        )

    def _urls(self) -> list[str]:
        named = getattr(self.service.queue.registration, "inference_servers", None) or []
        return [
            *(self.service.fleet_status.urls() or []),
            *(url for one in named if (url := _address(one))),
        ]

    def _look(self) -> dict[str, Any]:
        service, queue, now = self.service, self.service.queue, time.monotonic()
        if queue.acked_version != self._acked[0]:
            self._acked = (queue.acked_version, now)
        acked_at = self._acked[1]
        table, published = service.fleet_status, {}
        age = table.age(service.clock())
        if age is not None and age < FORGET_SECONDS:
            published = {row["url"]: row for row in table.servers}
        return stack_of(
            queue,
            [server.row(published.get(url, {})) for url, server in self.watch.servers.items()],
            time.time(),
            service.clock(),
            TrainerContact(
                None if acked_at is None else round(now - acked_at, 1),
                service.clock() - service.trainer_called,
                service.trainer_publishes,
            ),
            self._processes,
            self._ended if queue.ended else None,
            service.post_space.figures(),
        )

    def _read_files(self) -> None:
        """Read the records of processes and the end of the run, in the thread that writes."""
        self._processes = read_processes(self.files().folder)
        self._ended = number(self.observed.run.get("ended"))

    def _new_versions(self) -> list[Mapping[str, Any]]:
        """Return the newest version of each server, unless it was returned before."""
        before = self._versions_written
        self._versions_written = {
            url: server.history[-1] for url, server in self.watch.servers.items() if server.history
        }
        return [row for url, row in self._versions_written.items() if before.get(url) is not row]

    def _run_json(self) -> dict[str, Any]:
        """Return the run's settings, for run.json; empty before a trainer has registered."""
        queue = self.service.queue
        if queue.registration is None:
            return {}
        return {name: getattr(queue.registration, name) for name in RUN_FIELDS} | {
            "is_over": queue.ended
        }

    # ---- in the thread that writes ----

    def _note(
        self,
        events: list[Event],
        versions: list[Mapping[str, Any]],
        stack: Mapping[str, Any],
        run: dict[str, Any],
    ) -> None:
        if run and run != self._run_written:
            self._run_written = run
            self._note_run(dict(run))
        self.observed.append("events", (event.to_json() for event in events))
        self.observed.append("servers", versions)
        if stack:
            self.observed.write("stack.json", stack)

    def _note_run(self, run: dict[str, Any]) -> None:
        before, now = self.observed.run, time.time()
        is_over = run.pop("is_over")
        is_same = all(before.get(name) == run[name] for name in ("model", "checkpoint_dir"))
        is_new = run["starting_step"] == 0 and before.get("weight_epoch") != run["weight_epoch"]
        run |= {"began": now, "ended": now if is_over else None}
        if before and is_same and not is_new:
            run["began"] = before.get("began", now)
            if is_over:
                run["ended"] = number(before.get("ended")) or now
            self.observed.write("run.json", run)
            return
        self.observed.begin(run)
        if before and self.service.recorder is not None:
            self.service.recorder.another_run()


def _address(text: str) -> str:
    """Return a server's address in its usual form; empty for another text."""
    try:
        return server_address(text)
    except ValueError:
        return ""
