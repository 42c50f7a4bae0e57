"""Start parts of the stack in the background, and stop exactly those."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from atroposlib.utils.processes import Identity, identify, port_user
from example_trainer.child_processes.files import private_files, write_whole
from example_trainer.child_processes.guard import send
from example_trainer.child_processes.ports import is_free
from example_trainer.child_processes.processes import (
    CHECK_ONLY,
    RunningProcess,
    Supervisor,
    describe_exit,
    start_guard,
)
from example_trainer.launcher.command_line import ROOT, LauncherError
from example_trainer.launcher.fleet import join
from example_trainer.launcher.options import save
from example_trainer.launcher.records import (
    SERVICE,
    Record,
    Records,
    kind_of,
    make_keys,
    owner_is_me,
    server_number,
    to_stop,
    variables_of,
)
from example_trainer.launcher.roles import Command
from example_trainer.launcher.stack import Stack

SERVICE_SECONDS = 60.0
FLAGS_SECONDS = 300.0
"""Limit for the trainer to read its flags before the start."""
SETTLE_SECONDS = 1.5
"""Time that a part without a port must run before it counts as started."""
LEFTOVER_SECONDS = 20.0
"""Limit for a process that outlived its keeper to vanish after SIGKILL."""
BRIDGE_CONFIG, BRIDGE_CONFIGS = "vllm_bridge_config.json", "vllm_bridge_config*.json"
"""The file that a vLLM server publishes in its LOGDIR, and the names for several servers."""
LOCK = ".stack-lock"

Say = Callable[[str], None]


@contextmanager
def claimed(run: Path) -> Iterator[None]:
    """Hold a run's folder, so that a start and a stop do not meet half-way.

    Raises:
        LauncherError: another one holds it, or it cannot be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = (run / LOCK).open("w")
    except OSError as error:
        raise LauncherError(
            f"--run {run} cannot be written: {error.strerror}: give another folder"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LauncherError(
                f"--run {run}: another start.sh or stop.sh is at work there; wait for it"
            ) from None
        yield


class Starter:
    """Starts one stack.

    Args:
        stack: the commands.
        say: gets one line at a time.
    """

    def __init__(self, stack: Stack, say: Say) -> None:
        self.stack, self.say, self.options = stack, say, stack.options
        self.records = Records(stack.options.run)
        self.supervisor = Supervisor()
        self.keys: dict[str, str] = {}

    def run(self) -> None:
        """Start every part of the options, in order, and wait until the listening ones answer.

        Raises:
            LauncherError: it cannot be done; what this call started is stopped again.
        """
        with private_files(), claimed(self.options.run):
            self.refuse_what_runs()
            self.clear_leftovers()
            self.refuse_ports()
            self.refuse_flags()
            self.keys = make_keys(self.options.run, os.environ, running=bool(self.records.living()))
            write_whole(self.options.run / "commands.sh", self.stack.script().encode())
            save(self.options)
            try:
                for part in self.options.parts:
                    self.start(part)
                self.finish()
            except BaseException:
                self.supervisor.stop_all()
                raise
            if self.options.links:
                self.link_logs(Path.cwd())

    def refuse_what_runs(self) -> None:
        for part in self.options.parts:
            record = self.records.read(part)
            if record and record.keeper.is_alive():
                raise LauncherError(
                    f"{part} runs already in {self.options.run} (process {record.keeper.pid}, log {record.log}): "
                    f"scripts/stop.sh {part} ends it"
                )

    def clear_leftovers(self) -> None:
        """Remove what a run that was killed left behind."""
        for part in self.records.parts():
            record = self.records.read(part)
            if record and not record.keeper.is_alive():
                if self.records.exit_of(part) is None:
                    self.say(
                        f"{part}: the last one (process {record.keeper.pid}) was killed; its record is removed"
                    )
                Part(record, self.records, self.say).forget()
        # While a trainer lives, the file has the next server wait for that trainer's weights.
        if self.records.read("trainer") is not None:
            return
        folders = {self.options.run: "vllm"} | {
            folder: folder.name for folder in self.options.run.glob("vllm-*/")
        }
        for folder, part in sorted(folders.items()):
            if server_number(part) is None or self.records.read(part) is not None:
                continue
            for config in sorted(folder.glob(BRIDGE_CONFIGS)):
                if not is_locked(config):
                    self.say(f"removed {config} of a vLLM server that was killed")
                    config.unlink()

    def refuse_ports(self) -> None:
        taken = {number: flag for number, flag in self.stack.ports().items() if not is_free(number)}
        if taken:
            listed = ", ".join(
                f"{number} ({flag}) by {port_user(number)}" for number, flag in taken.items()
            )
            raise LauncherError(
                f"ports are taken: {listed}; stop what listens there, or give other ports"
            )

    def refuse_flags(self) -> None:
        """Have the trainer read its further flags now: it starts only after vLLM has loaded the
        model, which takes minutes.
        """
        if "trainer" not in self.options.parts or not self.options.trainer_args:
            return
        self.say(f"{'trainer':<12} reads its flags")
        command = self.stack.command("trainer")
        try:
            done = subprocess.run(
                command.arguments,
                cwd=ROOT,
                env={**os.environ, **command.variables, CHECK_ONLY: "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=FLAGS_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise LauncherError(
                f"the trainer has not read its flags (--trainer-args) after {FLAGS_SECONDS:.0f} s: "
                "look at the machine's load and its disk"
            ) from None
        if done.returncode:
            *_, last = done.stdout.strip().splitlines() or (describe_exit(done.returncode),)
            reason = re.sub(r"^ERROR [\d:]+ ", "", last)
            raise LauncherError(f"the trainer refuses its flags (--trainer-args): {reason}")

    def start(self, part: str) -> None:
        """Start one part; wait for it if others need it to answer."""
        if part == "trainer":
            self.wait_for_vllm()
        command, log = self.stack.command(part), self.stack.log(part)
        if log.exists():
            log.replace(log.with_suffix(".previous.log"))
        pid = spawn(
            command, log, self.records.exit_file(part), variables_of(part, os.environ, self.keys)
        )
        keeper = identify(pid)
        if keeper is None:
            raise LauncherError(f"{part} could not be started; see {log}")
        record = Record(
            part,
            keeper,
            time.time(),
            str(log),
            self.stack.port(part),
            command.grace,
            command.may_finish,
        )
        self.records.write(record)
        process = self.supervisor.add(Part(record, self.records, self.say))
        self.say(f"{part:<12} started (process {pid}), log {log}")
        if part == "service":
            self.wait_for(process, f"{self.stack.service_url}/", SERVICE_SECONDS)
        elif kind_of(part) != "vllm":
            settled = time.monotonic() + SETTLE_SECONDS
            while time.monotonic() < settled:
                self.supervisor.check()
                time.sleep(0.1)

    def finish(self) -> None:
        """Wait for what was not waited for yet."""
        if "trainer" not in self.options.parts:
            self.wait_for_vllm()
        self.supervisor.check()
        for part in self.options.joining:
            url = self.stack.vllm_url(server_number(part) or 0)
            join(self.stack.service_url, self.keys[SERVICE], url)
            self.say(
                f"{part:<12} shall join the training: scripts/status.sh shows it as soon as the trainer has sent it weights"
            )

    def wait_for_vllm(self) -> None:
        for process in self.supervisor.processes:
            number = server_number(process.name)
            if number is not None:
                self.wait_for(process, f"{self.stack.vllm_url(number)}/health", self.options.wait)
                # Healthy is not enough: it must have generated a token.
                self.wait_for(process, f"{self.stack.vllm_url(number)}/health_generate", 60.0)

    def wait_for(self, process: RunningProcess, url: str, seconds: float) -> None:
        waited = self.supervisor.wait_for_http(process, url, seconds)
        self.say(f"{process.name:<12} answers {url} after {waited:.0f} s")

    def link_logs(self, here: Path) -> None:
        """Let `tail -f trainer.log` work where start.sh was typed."""
        names = [self.stack.log(part).name for part in self.options.parts]
        names += ["vllm.log"] if self.options.bridge == "restart" else [BRIDGE_CONFIG]
        kept, failure = [], ""
        for name in names:
            target, link = self.options.run / name, here / name
            if name == "vllm.log" and self.options.bridge == "restart":
                target = self.options.run / "trainer" / name
            try:
                if link.is_symlink():
                    link.unlink()
                if link.exists():
                    kept.append(name)
                else:
                    link.symlink_to(target)
            except OSError as error:
                failure = error.strerror or str(error)
        if failure:
            self.say(f"no links to the logs in {here} ({failure}); they are in {self.options.run}")
        if kept and here != self.options.run:
            self.say(
                f"{', '.join(kept)} in {here} are files of their own and stay; the run's logs are in {self.options.run}"
            )


def spawn(command: Command, log: Path, exit_file: Path, environment: Mapping[str, str]) -> int:
    """Start a command under a keeper that outlives this process; returns the keeper's process id.

    Args:
        environment: variables beneath the command's own.

    Raises:
        LauncherError: the log cannot be written.
    """
    exit_file.parent.mkdir(parents=True, exist_ok=True)
    exit_file.unlink(missing_ok=True)
    try:
        with log.open("wb") as output:
            process = start_guard(
                exit_file,
                command.grace,
                command.arguments,
                {**environment, **command.variables},
                ROOT,
                subprocess.DEVNULL,
                output.fileno(),
                subprocess.STDOUT,
            )
    except OSError as error:
        raise LauncherError(
            f"cannot start {command.name} with its log in {log}: {error}"
        ) from error
    _children.append(process)
    return process.pid


_children: list[subprocess.Popen[bytes]] = []
"""Kept so that no warning is given for processes that are meant to outlive this one."""


class Part(RunningProcess):
    """A part of the stack, which outlives the command that started it: its record finds it again.

    Args:
        record: of the part.
        records: of the run.
        say: gets one line at a time.
    """

    def __init__(self, record: Record, records: Records, say: Say) -> None:
        started = time.monotonic() - (time.time() - record.since)
        super().__init__(record.part, Path(record.log), record.grace, record.may_finish, started)
        self.record, self.records, self.say = record, records, say

    @property
    def guard_pid(self) -> int:
        return self.record.keeper.pid

    def poll(self) -> int | None:
        if self.record.keeper.is_alive():
            return None
        ended = self.records.exit_of(self.name)
        return ended.code if ended else 128 + signal.SIGKILL

    def release(self) -> None:
        if self.record.keeper.is_alive():
            send(self.guard_pid, signal.SIGTERM)

    def wait_for_guard(self, seconds: float) -> None:
        wait_for_end(self.record.keeper, seconds)

    def stop(self) -> int:
        """End the part with all that it started, and forget it; returns the exit status, below 0 if
        it still runs.

        A vLLM server that stops takes its published configuration back. Where its trainer lives,
        that is put there again, as a killed server would have left it. By it the next server of
        this port knows that it must wait for the trainer's weights. Otherwise it would serve the
        checkpoint's.
        """
        begun, keeper = time.monotonic(), self.record.keeper
        published = published_by(self.record, self.records)
        if keeper.is_alive():
            if not owner_is_me(keeper):
                self.say(
                    f"{self.name}: process {keeper.pid} belongs to another user and is left alone"
                )
                return -signal.SIGTERM
            code = super().stop()
            if code < 0:
                self.say(f"{self.name}: process {keeper.pid} did not end, not even by SIGKILL")
                return code
            ways = {128 + signal.SIGKILL: "had to be killed"}
            ways[128 + signal.SIGTERM] = "ended on SIGTERM"
            how = ways.get(code) or describe_exit(code)
            self.say(f"{self.name:<12} {how} after {time.monotonic() - begun:.1f} s")
        else:
            code, ended = self.poll() or 0, self.records.exit_of(self.name)
            how = describe_exit(code) if ended else "it was killed"
            self.say(f"{self.name:<12} had ended before: {how}")
        self.forget()
        for config, text in published.items():
            if not config.exists():
                write_whole(config, text.encode(), mode=0o600)
        return code

    def forget(self) -> None:
        """End what outlived a keeper that was killed: these very processes, known by more than
        their id. Remove the record.
        """
        for process in self.record.leftovers():
            if owner_is_me(process):
                send(process.pid, signal.SIGKILL)
                wait_for_end(process, LEFTOVER_SECONDS)  # its memory is free only then
                self.say(f"{self.name}: killed process {process.pid}, which had outlived it")
        self.records.remove(self.name)


def published_by(record: Record, records: Records) -> dict[Path, str]:
    """The configuration that a vLLM server has published, with its path, if a trainer of this run
    lives; else nothing.
    """
    number, trainer = server_number(record.part), records.read("trainer")
    if number is None or trainer is None or not trainer.keeper.is_alive():
        return {}
    run = records.folder.parent
    found = {}
    for config in (run if number == 0 else run / record.part).glob(BRIDGE_CONFIGS):
        try:
            text = config.read_text()
            if json.loads(text).get("port") == record.port:
                found[config] = text
        except (OSError, ValueError, AttributeError):
            continue  # being replaced at this moment, or torn: as if there were none
    return found


def is_locked(file: Path) -> bool:
    """Report if a living process holds a lock on a file, as a vLLM server does on its own."""
    with file.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait_for_end(identity: Identity, seconds: float) -> None:
    """Return when a process has ended, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while identity.is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)


def stop_parts(run: Path, parts: Sequence[str], say: Say) -> bool:
    """Stop parts of a run, a part that feeds others before them. Returns whether all are gone."""
    records = Records(run)
    if not records.folder.is_dir() and not records.parts():
        say(f"nothing was started in {run}")
        return True
    with claimed(run):
        found = [record for part in to_stop(parts) if (record := records.read(part))]
        if not found:
            say(f"nothing to stop in {run}")
        for record in found:
            if not records.is_recorded(record.part):
                records.write(record)  # the keeper leaves the exit status beside it
        return all([Part(record, records, say).stop() >= 0 for record in found])
