"""Start processes, notice when one dies, and stop exactly those that were started."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from example_trainer.child_processes.guard import descendants, send

logger = logging.getLogger(__name__)

GUARD = Path(__file__).with_name("guard.py")
GUARD_MARGIN_SECONDS = 20.0
"""What the guard may need on top of the grace period to sweep up what the command left behind."""


class ProcessError(RuntimeError):
    """Something that was needed did not work.

    The first line names the thing, its value and the remedy; what follows is log.
    """


class ProcessDied(ProcessError):
    """A process ended while it was still needed, or ended with an error."""


def tail(path: Path, lines: int = 8, columns: int = 300, size: int = 64 * 1024) -> list[str]:
    """The last lines of a log that are not blank, each cut to so many characters, without control
    characters.

    No more than the last `size` bytes are read.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    kept = [
        "".join(c for c in line if c.isprintable() or c == "\t")
        for line in text.splitlines()
        if line.strip()
    ]
    return [line[:columns] for line in kept[-lines:]]


ERROR_LINE = re.compile(
    r"(?:^|[\]\s])((?:\w+\.)*\w*(?:Error|Exception)): \S|(?:^|\s)ERROR (?!\d\d-\d\d)"
)
"""The end of a traceback, or a line of this project's own that says what is wrong; not vLLM's mark
on every line of one."""


def first_error(
    path: Path, since_last: str = "", columns: int = 300, size: int = 1 << 20
) -> str | None:
    """The first line of a log that names an error.

    Processes that start each other report a failure several times over, the last time without its
    cause.

    Args:
        path: the log.
        since_last: not given again if this text holds it already.
        columns: longest line.
        size: bytes at its end that are read at most, a megabyte.
    """
    for line in tail(path, lines=sys.maxsize, columns=columns, size=size):
        found = ERROR_LINE.search(line)
        if (
            found and "ulimit -n" not in line
        ):  # vLLM's advice at every start, which quotes an error that did not happen
            line = line[max(0, found.start()) :].strip().lstrip("] ")
            return None if line in since_last else line
    return None


def describe_exit(code: int) -> str:
    """`exited with code 3` or `was killed by SIGKILL`, for an exit status as the guard reports it."""
    if code > 128:
        with suppress(ValueError):
            name = signal.Signals(code - 128).name
            return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"exited with code {code}"


class ManagedProcess:
    """One running command, its log, and the pipe that keeps it alive.

    Args:
        name: what to call it in messages, such as `vLLM server`.
        command: program and arguments.
        log_path: file that gets its standard output and error; made, and emptied unless `append`.
        environment: variables on top of this process's own; None as a value removes one.
        directory: its working directory.
        grace: seconds between SIGTERM and SIGKILL.
        may_finish: it may end by itself, with status 0, while others still run.
        append: keep what the log holds.

    Raises:
        OSError: the log cannot be written.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str | None] | None = None,
        directory: Path | None = None,
        grace: float = 10.0,
        may_finish: bool = False,
        append: bool = False,
    ) -> None:
        self.name, self.command, self.log_path, self.grace = name, list(command), log_path, grace
        self.may_finish = may_finish
        self.started = time.monotonic()
        variables = {
            **os.environ,
            **{k: v for k, v in (environment or {}).items() if v is not None},
        }
        for key, value in (environment or {}).items():
            if value is None:
                variables.pop(key, None)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, self.control = os.pipe()  # neither is inherited but for what pass_fds names
        try:
            with log_path.open("ab" if append else "wb") as log:
                self.guard = self.start_guard(read_end, log.fileno(), variables, directory)
        except OSError:
            self.release()
            raise
        finally:
            os.close(read_end)
        logger.debug("started %s (guard %d): %s", name, self.guard.pid, " ".join(self.command))

    def start_guard(
        self, control: int, log: int, variables: Mapping[str, str], directory: Path | None
    ) -> subprocess.Popen[bytes]:
        """Start the guard, which starts the command.

        Args:
            control: read end of the control pipe.
            log: file descriptor of its output.
            variables: its whole environment.
            directory: its working directory; None: this process's.
        """
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), str(control), str(self.grace), *self.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd=directory,
            pass_fds=(control,),
            # Ctrl-C in the terminal is for whoever started it, who stops the rest
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """The exit status (128 + n for signal n) once the command and all it started are gone, else
        None.
        """
        code = self.guard.poll()
        return None if code is None else (code if code >= 0 else 128 - code)

    def command_pid(self) -> int:
        """Process id of the command itself, for who wants to signal it.

        Raises:
            ProcessDied: it has ended.
        """
        children = descendants(self.guard.pid)
        if not children:
            raise self.died()
        return children[0]

    def tail(self, lines: int = 8) -> list[str]:
        """The last lines of its log."""
        return tail(self.log_path, lines)

    def is_missed(self) -> bool:
        """Whether it is gone and should not be."""
        code = self.poll()
        return code is not None and not (self.may_finish and code == 0)

    def died(self) -> ProcessDied:
        """The error that tells of its end: name, exit status, log path, last lines."""
        code = self.poll()
        how = "is still running" if code is None else describe_exit(code)
        head = (
            f"{self.name} {how} after {time.monotonic() - self.started:.0f} s; log: {self.log_path}"
        )
        last = self.tail()
        cause = first_error(self.log_path, since_last="\n".join(last))
        lines = [
            *([f"    first error: {cause}"] if cause else []),
            *(f"    {line}" for line in last),
        ]
        return ProcessDied("\n".join([head, *lines]))

    def release(self) -> None:
        """Close the control pipe: the guard begins to stop the command. Safe to call twice."""
        if self.control >= 0:
            os.close(self.control)
            self.control = -1

    def stop(self) -> int:
        """End the command with all that it started and wait until they are gone; returns the exit
        status.
        """
        self.release()
        try:
            self.guard.wait(self.grace + GUARD_MARGIN_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error(
                "%s: guard %d did not finish in time, killing it; log: %s",
                self.name,
                self.guard.pid,
                self.log_path,
            )
            for pid in [self.guard.pid, *descendants(self.guard.pid)]:
                send(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.guard.wait(GUARD_MARGIN_SECONDS)
        code = self.poll()
        if code is None:  # stuck in the kernel; whoever stops several goes on with the others
            logger.error(
                "%s: guard %d does not end though it was killed: see ps -o stat,wchan,args",
                self.name,
                self.guard.pid,
            )
            return -signal.SIGKILL
        return code

    def wait(self, seconds: float, idle: Callable[[], None] = lambda: None) -> None:
        """Wait for the command to end well.

        Args:
            seconds: the deadline.
            idle: called about ten times a second meanwhile, for instance to check on other
                processes.

        Raises:
            ProcessDied: it ended with an error.
            ProcessError: the deadline passed; the command is stopped first.
        """
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            idle()
            if time.monotonic() > deadline:
                self.stop()
                lines = "\n".join(f"    {line}" for line in self.tail())
                raise ProcessError(
                    f"{self.name} was not done after {seconds:.0f} s; log: {self.log_path}\n{lines}"
                )
            time.sleep(0.1)
        self.release()
        if code != 0:
            raise self.died()


class Supervisor:
    """The processes of one run. Leaving its `with` block stops them all, the last started first."""

    def __init__(self) -> None:
        self.processes: list[ManagedProcess] = []

    def start(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str | None] | None = None,
        directory: Path | None = None,
        grace: float = 10.0,
        may_finish: bool = False,
    ) -> ManagedProcess:
        """Start one more; see ManagedProcess."""
        return self.add(
            ManagedProcess(name, command, log_path, environment, directory, grace, may_finish)
        )

    def add(self, process: ManagedProcess) -> ManagedProcess:
        """Look after one that has been started."""
        self.processes.append(process)
        return process

    def check(self) -> None:
        """Raise ProcessDied if one of them is gone that should be running."""
        for process in self.processes:
            if process.is_missed():
                raise process.died()

    def stop(self, process: ManagedProcess) -> int:
        """Stop one, which `check` then no longer misses; returns its exit status."""
        code = process.stop()
        self.processes.remove(process)
        return code

    def finish(
        self, process: ManagedProcess, seconds: float, idle: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for one to end well while the others go on running; see ManagedProcess.wait.

        Raises:
            ProcessDied: this or another one ended with an error.
        """
        others = [other for other in self.processes if other is not process]

        def look_round() -> None:
            for other in others:
                if other.is_missed():
                    raise other.died()
            idle()

        process.wait(seconds, look_round)
        self.processes.remove(process)

    def stop_all(self) -> None:
        """Stop what is still running, the last started first."""
        while self.processes:
            self.processes.pop().stop()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop_all()
