"""Restart the vLLM servers of a run one by one, while training goes on with the others."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from example_trainer.child_processes.files import private_files
from example_trainer.child_processes.processes import ProcessError
from example_trainer.launcher.command_line import LauncherError
from example_trainer.launcher.control import Part, Say, Starter, claimed
from example_trainer.launcher.fleet import (
    GOOD,
    SERVING,
    Fleet,
    FleetRow,
    ask_server,
    published_fleet,
)
from example_trainer.launcher.options import last_start
from example_trainer.launcher.records import SERVICE, chosen, kind_of, make_keys, server_number
from example_trainer.launcher.stack import Stack

LINE_SECONDS = 10.0
POLL_SECONDS = 0.5


class Roller:
    """Restarts servers of one run, each only when the one before it is back and all others serve
    the trainer's weights.

    Args:
        stack: the commands of the run's last start.
        say: gets one line at a time.
        seconds: how long each wait may take.
    """

    def __init__(self, stack: Stack, say: Say, seconds: float) -> None:
        self.stack, self.say, self.seconds = stack, say, seconds
        self.starter = Starter(stack, say)
        self.records = self.starter.records
        self.servers = [part for part in stack.options.parts if kind_of(part) == "vllm"]
        self.newest = (0, 0)

    def run(self, named: Sequence[str]) -> None:
        """Restart the servers that are named, or all.

        Raises:
            LauncherError: a server did not come back, or another one is not well; the rest is not
                touched.
        """
        parts = self.chosen(named)
        with private_files(), claimed(self.stack.options.run):
            self.starter.keys = make_keys(
                self.stack.options.run, os.environ, running=bool(self.starter.records.living())
            )
            rows = self.ask(self.servers)
            self.newest = max(self.newest, *(row.weights for row in rows.values()))
            if self.newest[0] > 0:  # a trainer's weights, which a server that starts has not
                self.require_trainer(parts[0])
            # Servers that serve nothing come first, because their restart costs nothing.
            parts.sort(key=lambda part: rows[part].standing == SERVING)
            for done, part in enumerate(parts):
                try:
                    self.restart(part)
                except BaseException as error:
                    rest = ", ".join(parts[done + 1 :]) or "none"
                    before = ", ".join(parts[:done]) or "none"
                    where = f"stopped at {part}; restarted before: {before}; not touched: {rest}"
                    if isinstance(error, ProcessError):
                        raise LauncherError(f"{where}\n    {error}") from None
                    self.say(f"{where}; scripts/status.sh shows what runs")
                    raise
                self.say(f"{part:<12} is back ({done + 1} of {len(parts)})")

    def chosen(self, named: Sequence[str]) -> list[str]:
        others = [
            part
            for part in named
            if kind_of(part) not in ("vllm", "") or (part == "vllm" and part not in self.servers)
        ]
        if others or not self.servers:
            what = others[0] if others else "this run"
            raise LauncherError(
                f"{what} is not a vLLM server that start.sh has started: for other parts, "
                "scripts/stop.sh and "
                "scripts/start.sh --resume"
            )
        return list(chosen(named or self.servers, self.servers))

    def url(self, part: str) -> str:
        """Where a server listens."""
        return self.stack.vllm_url(server_number(part) or 0)

    def ask(self, parts: Sequence[str]) -> dict[str, FleetRow]:
        """Ask servers for their state."""
        return {part: ask_server(self.url(part)) for part in parts}

    def restart(self, part: str) -> None:
        """Stop one server, start it, and wait until it serves what the others serve."""
        record = self.records.read(part)
        if ask_server(self.url(part)).standing == SERVING:
            for other in self.servers:
                if other != part:
                    self.wait(other, f"before {part} is stopped, {other} must serve")
        if record is not None and Part(record, self.records, self.say).stop() < 0:
            raise LauncherError(f"{part} did not end, so it is not started again")
        # This start must not watch the processes of servers that have come back before.
        self.starter.supervisor.processes.clear()
        self.starter.start(part)
        self.wait(part, f"{part} is started; it must serve")

    def wait(self, part: str, why: str) -> None:
        """Wait until a server serves the present weights, and the trainer's table, made after that,
        calls it good.

        Raises:
            LauncherError: it does not by the deadline, or what is needed for it has ended.
        """
        begun = time.monotonic()
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + self.seconds))
        served_at, line_at = None, begun + LINE_SECONDS
        while True:
            self.starter.supervisor.check()
            missing, served_at = self.missing(part, served_at)
            if not missing:
                return
            now = time.monotonic()
            if now - begun > self.seconds:
                raise LauncherError(
                    f"{why} within {self.seconds:.0f} s (--wait), and does not: {missing}"
                )
            if now >= line_at:
                self.say(f"{part:<12} waiting: {why}: {missing}; until {until}")
                line_at = now + LINE_SECONDS
            time.sleep(POLL_SECONDS)

    def missing(self, part: str, served_at: float | None) -> tuple[str, float | None]:
        """Return what a server lacks to count as back, in a few words, empty if nothing. Also
        return since when it has served the present weights, in seconds of `time.monotonic`.

        The others are asked first, so that an update that comes in between never makes this one
        look late.
        """
        others = self.ask([other for other in self.servers if other != part])
        self.newest = max(
            [self.newest, *(row.weights for row in others.values() if row.standing == SERVING)]
        )
        row = ask_server(self.url(part))
        if row.standing != SERVING:
            return f"{row.standing} ({row.reason})", None
        if row.weights < self.newest:
            self.require_trainer(part)
            epoch, version = self.newest
            said = f"it serves version {row.weight_version} of epoch {row.weight_epoch}"
            return f"{said}, and version {version} of epoch {epoch} is the present one", None
        served_at = served_at or time.monotonic()
        fleet = published_fleet(self.stack.service_url, self.starter.keys[SERVICE])
        return self.missing_at_trainer(fleet, self.url(part), served_at), served_at

    def missing_at_trainer(self, fleet: Fleet | None, url: str, served_at: float) -> str:
        """Return what the trainer's table still lacks.

        Without a table, as in modes without a fleet, the server's word counts.
        """
        if fleet is None:
            return ""
        row = fleet.row(url)
        if row is None:
            return f"the trainer's table does not name {url}"
        if row.standing != GOOD:
            reason = f" ({row.reason})" if row.reason else ""
            return f"the trainer calls it {row.standing}{reason}"
        if (fleet.published_at or 0) < served_at:
            return "the trainer has not published its table since"
        return ""

    def require_trainer(self, part: str) -> None:
        """Refuse to wait for weights that no trainer will send.

        Raises:
            LauncherError: the trainer that this run had has ended.
        """
        trainer = self.records.read("trainer")
        if trainer is not None and not trainer.keeper.is_alive():
            raise LauncherError(
                f"the trainer has ended, so {part} would never get the present weights: "
                "scripts/start.sh --resume trainer"
            )


def restart_servers(run: Path, named: Sequence[str], seconds: float | None, say: Say) -> None:
    """Restart the vLLM servers of a run one by one.

    Args:
        run: its folder.
        named: parts; none for all servers.
        seconds: how long each may take to be back; None: as long as start.sh may wait.
        say: gets one line at a time.

    Raises:
        LauncherError: see Roller.run.
    """
    options = last_start(run)
    Roller(Stack(options), say, options.wait if seconds is None else seconds).run(named)
