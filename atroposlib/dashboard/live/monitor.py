"""Looks at the service and its servers every second while a page is open, and more rarely while
none is: tells the pages, and writes down what shall be seen later."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atroposlib.dashboard.events import Drops, Event, happenings, number, restarted, server_events
from atroposlib.dashboard.live.hub import Hub
from atroposlib.dashboard.live.servers import Server, ServerWatch, read_versions
from atroposlib.dashboard.live.signs import RunProcess, read_processes
from atroposlib.dashboard.live.snapshots import ObservedFolder
from atroposlib.dashboard.live.stack import TrainerHeard, mark_of, stack_of, worth_telling
from atroposlib.dashboard.run_folders.catalogue import LIVE
from atroposlib.dashboard.run_folders.folder import RunFiles, environment_rows
from atroposlib.service.fleet import FORGET_SECONDS
from atroposlib.service.records import Registration
from atroposlib.web.addresses import server_address

if TYPE_CHECKING:
    from atroposlib.service.service import RolloutService

logger = logging.getLogger(__name__)

WATCHED_SECONDS, ALONE_SECONDS = 1.0, 3.0
"""Between two looks, while a page is open and while none is."""
KEEP_SECONDS = 10.0
"""Between two writings of stack.json."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the service is, for people: address and folder.

    Attributes:
        name, port: of the service.
        run_folder: of the run; None if the service was not told.
    """

    name: str = "rollout service"
    port: int = 0
    run_folder: Path | None = None


class LiveSource:
    """The run of the service that this process is.

    Args:
        service: it.
        observed: where what happens is written down.
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
        self._thread = ThreadPoolExecutor(
            1, "page-notes"
        )  # one, so that what is written stays in order
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
        """The stack as an earlier process of this service wrote it down last, if the run goes on in
        this one; else empty.
        """
        trainer = self.service.queue.registration
        stack = self.observed.stack if trainer is not None else {}
        trainer_part = stack.get("trainer")
        if isinstance(trainer_part, dict) and trainer_part.get("registration") == mark_of(trainer):
            # Otherwise, the page would never miss a trainer that died while the service was down.
            self.service.heard_trainer(trainer_part.get("publishes") is True)
        rows = stack.get("servers")
        found = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        self.watch.remembered = {
            row["url"]: row for row in found if isinstance(row.get("url"), str)
        }
        self.watch.versions = read_versions(self.observed.path / "servers.jsonl") if found else {}
        self._servers = {
            url: Server.remembered(url, row).row(None) for url, row in self.watch.remembered.items()
        }
        return stack

    # ---- what routes ask ----

    def files(self) -> RunFiles:
        """The files of the run, as far as they are known."""
        folder = self._figures()
        registration = self.service.queue.registration
        model = (registration.model or "").rstrip("/").rpartition("/")[2] if registration else ""
        root = self.place.run_folder or folder
        name = self.place.run_folder.absolute().name if self.place.run_folder is not None else model
        figures = (folder / "metrics.jsonl", folder / "evaluations.jsonl")
        return RunFiles(
            LIVE,
            name or "this run",
            root,
            *figures,
            self.observed.path,
            environment=environment_rows(root),
        )

    def _figures(self) -> Path:
        """The trainer's folder: as it says itself, or as one finds it in the run's."""
        registration = self.service.queue.registration
        registered_dir = registration.log_dir if registration is not None else None
        if registered_dir and Path(registered_dir).is_absolute() and Path(registered_dir).is_dir():
            return Path(registered_dir)
        if self.place.run_folder is not None:
            beside = self.place.run_folder / "trainer"
            return beside if beside.is_dir() else self.place.run_folder
        return self.observed.path

    def publish(self, event: str, data: Any) -> None:
        """Tell the pages that show this run. On the event loop."""
        self.hub.tell(LIVE, event, data)

    # ---- the rounds ----

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """In the block the stack is looked at."""
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
            await loop.run_in_executor(self._thread, self._note, [], [], stopped, self._told())
            self._thread.shutdown()

    async def _rounds(self) -> None:
        looking: asyncio.Task[None] | None = None
        try:
            while True:
                try:
                    if looking is None or looking.done():
                        looking = asyncio.create_task(self.watch.look(self._urls()))
                    # A server that does not answer holds nothing else up; the next round has what
                    # it says.
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
        """Look once, at what is known of the servers by now."""
        before, loop = self.stack or None, asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._read_files)
        self.stack = self._look()
        version = self.stack["service"]["sampling_version"]
        events = [
            *happenings(before, self.stack),
            *self._drops.events(self.stack),
            *self._server_events(version),
        ]
        if before is None:
            events += restarted(self._before, self.stack)
        if before is None or worth_telling(before) != worth_telling(self.stack):
            self.publish("stack", self.stack)
        versions = self._new_versions()
        if versions:
            self.publish(
                "weights",
                {
                    "servers": [
                        server.weights(history=False) for server in self.watch.servers.values()
                    ]
                },
            )
        keep: dict[str, Any] = {}
        if events or time.monotonic() - self._kept >= KEEP_SECONDS:
            self._kept, keep = time.monotonic(), self.stack
        await loop.run_in_executor(self._thread, self._note, events, versions, keep, self._told())

    def _urls(self) -> list[str]:
        registration = self.service.queue.registration
        named = registration.inference_servers if registration is not None else None
        return [
            *(self.service.fleet_status.urls() or []),
            *(url for one in named or [] if (url := _address(one))),
        ]

    def _look(self) -> dict[str, Any]:
        service, queue, now = self.service, self.service.queue, time.monotonic()
        if queue.acked_version != self._acked[0]:
            self._acked = (queue.acked_version, now)
        since = None if self._acked[1] is None else round(now - self._acked[1], 1)
        table = service.fleet_status
        age = table.age(service.clock())
        published = (
            {row["url"]: row for row in table.servers}
            if age is not None and age < FORGET_SECONDS
            else {}
        )
        rows = [server.row(published.get(url)) for url, server in self.watch.servers.items()]
        heard = TrainerHeard(
            since, service.clock() - service.trainer_heard, service.trainer_publishes
        )
        ended = self._ended if queue.ended else None
        return stack_of(
            queue,
            rows,
            time.time(),
            service.clock(),
            heard,
            self._processes,
            ended,
            service.post_space.figures(),
        )

    def _read_files(self) -> None:
        """Read what the run's folder says of processes and of the end of the run.

        In the thread that writes.
        """
        self._processes = read_processes(self.files().folder)
        self._ended = number(self.observed.run.get("ended"))

    def _server_events(self, version: int) -> list[Event]:
        now, ended = time.time(), self.service.queue.ended
        seen = {row["url"]: row for row in self.stack["servers"]}
        known = [(self._servers[url], row) for url, row in seen.items() if url in self._servers]
        self._servers = seen
        return [
            event
            for before, after in known
            for event in server_events(before, after, now, version, ended)
        ]

    def _new_versions(self) -> list[Mapping[str, Any]]:
        new: list[Mapping[str, Any]] = []
        self._versions_written = {
            url: row for url, row in self._versions_written.items() if url in self.watch.servers
        }
        for url, server in self.watch.servers.items():
            last = server.history[-1] if server.history else None
            if last is not None and self._versions_written.get(url) is not last:
                self._versions_written[url] = last
                new.append(last)
        return new

    def _told(self) -> dict[str, Any]:
        """Who the run is, for run.json; empty before a trainer has registered."""
        queue = self.service.queue
        trainer: Registration | None = queue.registration
        if trainer is None:
            return {}
        names = (
            "model",
            "num_steps",
            "checkpoint_dir",
            "log_dir",
            "batch_size",
            "weight_epoch",
            "starting_step",
        )
        return {**{name: getattr(trainer, name) for name in names}, "is_over": queue.ended}

    # ---- in the thread that writes ----

    def _note(
        self,
        events: list[Event],
        versions: list[Mapping[str, Any]],
        stack: Mapping[str, Any],
        told: Mapping[str, Any],
    ) -> None:
        if told and told != self._run_written:
            self._run_written = dict(told)
            self._note_run(dict(told))
        self.observed.append("events", (event.to_json() for event in events))
        self.observed.append("servers", versions)
        if stack:
            self.observed.write("stack.json", stack)

    def _note_run(self, told: dict[str, Any]) -> None:
        before, now = self.observed.run, time.time()
        is_over = told.pop("is_over")
        same = (
            before.get("model") == told["model"]
            and before.get("checkpoint_dir") == told["checkpoint_dir"]
        )
        anew = told["starting_step"] == 0 and before.get("weight_epoch") != told["weight_epoch"]
        run = told | {"began": now, "ended": now if is_over else None}
        if before and same and not anew:
            run["began"] = before.get("began", now)
            if is_over and isinstance(before.get("ended"), int | float):
                run["ended"] = before["ended"]
            self.observed.write("run.json", run)
        else:
            self.observed.begin(run)
            if before and self.service.recorder is not None:
                self.service.recorder.another_run()


def _address(text: str) -> str:
    """A server's address as others write it; empty if it is none."""
    try:
        return server_address(text)
    except ValueError:
        return ""
