"""Start a process under its guard, notice when it dies, and stop it with all that it started."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from example_trainer.child_processes.guard import descendants, exit_status, send

logger = logging.getLogger(__name__)

CHECK_ONLY = "LOCKSTEP_CHECK_ONLY"
"""Variable; with 1 a program reads its options, and ends."""
GUARD = Path(__file__).with_name("guard.py")
GUARD_MARGIN_SECONDS = 20.0
"""Time of the guard, beside the grace period, to end the processes that the command left behind."""


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


FULL_BELOW = 1 << 16
"""Free bytes of a disk below which it counts as full."""


def file_size(path: Path) -> int:
    """Return the bytes of a file; 0 if it is absent."""
    if not path.exists():
        return 0
    return path.stat().st_size


ERROR_LINE = re.compile(
    r"(?:^|[\]\s])((?:\w+\.)*\w*(?:Error|Exception)): \S|(?:^|\s)ERROR (?!\d\d-\d\d)"
)
"""The end of a traceback, or an error line of this project; not vLLM's mark
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
        match = ERROR_LINE.search(line)
        if (
            match and "ulimit -n" not in line
        ):  # vLLM's advice at every start, which quotes an error that did not happen
            line = line[max(0, match.start()) :].strip().lstrip("] ")
            if line not in since_last:
                return line
            break
    return None


def describe_exit(code: int) -> str:
    """`exited with code 3` or `was killed by SIGKILL`, for an exit status as the guard reports it."""
    if code > 128:
        with suppress(ValueError):
            name = signal.Signals(code - 128).name
            return f"was killed by {name}" + " (out of memory?)" * (name == "SIGKILL")
    return f"exited with code {code}"


class RunningProcess(ABC):
    """A command under its guard: whether it runs, its log, and how it is stopped.

    Args:
        name: what to call it in messages, such as `vLLM server`.
        log_path: file that gets its standard output and error.
        grace: seconds between SIGTERM and SIGKILL.
        may_finish: it may end by itself, with status 0, while others still run.
        started: time of the start, in seconds of `time.monotonic`.
    """

    def __init__(
        self, name: str, log_path: Path, grace: float, may_finish: bool, started: float
    ) -> None:
        self.name, self.log_path, self.grace = name, log_path, grace
        self.may_finish, self.started = may_finish, started

    @property
    @abstractmethod
    def guard_pid(self) -> int:
        """Process id of the guard."""

    @abstractmethod
    def poll(self) -> int | None:
        """The exit status (128 + n for signal n) once the command and all it started are gone, else
        None.
        """

    @abstractmethod
    def release(self) -> None:
        """Let the guard begin to stop the command. Safe to call twice."""

    @abstractmethod
    def wait_for_guard(self, seconds: float) -> None:
        """Return when the guard has ended, or after so many seconds."""

    def tail(self, lines: int = 8) -> list[str]:
        """The last lines of its log."""
        return tail(self.log_path, lines)

    def last_words(self, lines: int = 8) -> str:
        """The last lines of its log, as they follow the first line of an error."""
        return "".join(f"\n    {line}" for line in self.tail(lines))

    def is_missed(self) -> bool:
        """Return whether it is gone and should not be."""
        code = self.poll()
        return code is not None and not (self.may_finish and code == 0)

    def died(self) -> ProcessDied:
        """Return the error for its end: name, exit status, log path, last lines."""
        code, how = self.poll(), "is still running"
        if code is not None:
            how = describe_exit(code)
        head = (
            f"{self.name} {how} after {time.monotonic() - self.started:.0f} s; log: {self.log_path}"
        )
        words = self.last_words()
        if cause := first_error(self.log_path, since_last=words):
            head += f"\n    first error: {cause}"
        folder = self.log_path.parent
        if folder.exists() and (free := shutil.disk_usage(folder).free) < FULL_BELOW:
            # The disk may have refused the line of the log that has the reason.
            head += f"\n    the disk of {folder} has {free} bytes left: make room there"
        return ProcessDied(head + words)

    def stop(self) -> int:
        """End the command with all that it started and wait until they are gone; returns the exit
        status.
        """
        self.release()
        self.wait_for_guard(self.grace + GUARD_MARGIN_SECONDS)
        if self.poll() is None:
            logger.error(
                "%s: guard %d did not finish in time, killing it; log: %s",
                self.name,
                self.guard_pid,
                self.log_path,
            )
            for pid in [self.guard_pid, *descendants(self.guard_pid)]:
                send(pid, signal.SIGKILL)
            self.wait_for_guard(GUARD_MARGIN_SECONDS)
        code = self.poll()
        if code is None:  # stuck in the kernel; the caller goes on with other processes
            logger.error(
                "%s: guard %d does not end though it was killed: see ps -o stat,wchan,args",
                self.name,
                self.guard_pid,
            )
            return -signal.SIGKILL
        return code


def start_guard(
    control: int | Path,
    grace: float,
    command: Sequence[str],
    variables: Mapping[str, str],
    directory: Path | None,
    stdin: int,
    stdout: int,
    stderr: int,
) -> subprocess.Popen[bytes]:
    """Start a guard, which starts the command.

    Args:
        control: see guard.py.
        grace: seconds between SIGTERM and SIGKILL.
        command: program and arguments.
        variables: its whole environment.
        directory: its working directory; None: this process's.
        stdin, stdout, stderr: as of subprocess.Popen.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(GUARD), str(control), str(grace), *command],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=variables,
        cwd=directory,
        pass_fds=(control,) if isinstance(control, int) else (),
        # Ctrl-C in the terminal, and its closing, are for its starter, which stops the rest
        start_new_session=True,
    )


class ManagedProcess(RunningProcess):
    """A command that ends with this process, however this process ends: a pipe keeps it alive.

    Args:
        name: what to call it in messages, such as `vLLM server`.
        command: program and arguments.
        log_path: file that gets its standard output and error; made, and emptied unless `append`.
        environment: variables on top of this process's own; None as a value removes one.
        directory: its working directory.
        grace: seconds between SIGTERM and SIGKILL.
        may_finish: it may end by itself, with status 0, while others still run.
        append: keep what the log holds.
        pipes: `guard.stdin` and `guard.stdout` are for this process to talk through; the log gets
            the standard error alone.

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
        pipes: bool = False,
    ) -> None:
        super().__init__(name, log_path, grace, may_finish, time.monotonic())
        self.command, self.pipes = list(command), pipes
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
            variables, directory: see the function.
        """
        ours, theirs = subprocess.DEVNULL, log
        if self.pipes:
            ours = theirs = subprocess.PIPE
        return start_guard(
            control, self.grace, self.command, variables, directory, ours, theirs, log
        )

    @property
    def guard_pid(self) -> int:
        return self.guard.pid

    def poll(self) -> int | None:
        code = self.guard.poll()
        if code is None:
            return None
        return exit_status(code)

    def command_pid(self) -> int:
        """Process id of the command itself, for who wants to signal it.

        Raises:
            ProcessDied: it has ended.
        """
        deadline = time.monotonic() + GUARD_MARGIN_SECONDS
        while not (children := descendants(self.guard.pid)):  # the guard has just been started
            if self.poll() is not None or time.monotonic() > deadline:
                raise self.died()
            time.sleep(0.01)
        return children[0]

    def release(self) -> None:
        if self.control >= 0:
            os.close(self.control)
            self.control = -1

    def wait_for_guard(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.guard.wait(seconds)

    def wait(self, seconds: float, idle: Callable[[], None] = lambda: None) -> None:
        """Wait for the command to end well.

        Args:
            seconds: the deadline.
            idle: called about ten times a second, for instance to check on other
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
                raise ProcessError(
                    f"{self.name} was not done after {seconds:.0f} s; log: {self.log_path}"
                    f"{self.last_words()}"
                )
            time.sleep(0.1)
        self.release()
        if code != 0:
            raise self.died()


# Wait for something to become true: polled, with a deadline, and no longer than the processes live
# that it needs.

Probe = Callable[[], "str | None"]
"""Answers None when ready, else what is still missing, in a few words."""


def wait_until(
    what: str,
    probe: Probe,
    seconds: float,
    check: Callable[[], None] = lambda: None,
    interval: float = 0.2,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Poll until the probe answers None; returns the seconds that it took.

    Args:
        what: names the thing in the error.
        probe: asked again and again.
        seconds: the deadline.
        check: called before each probe; raises when waiting on makes no sense, for instance because
            a process died.
        interval: seconds between two probes.
        clock, sleep: the time to go by.

    Raises:
        ProcessError: not ready at the deadline; the message holds the probe's last answer.
    """
    start = clock()
    while True:
        check()
        missing = probe()
        waited = clock() - start
        if missing is None:
            return waited
        if waited >= seconds:
            raise ProcessError(f"{what} was not ready after {seconds:.0f} s: {missing}")
        sleep(min(interval, seconds - waited))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Take a redirect for an error: urllib would send the key to wherever it leads."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


# No proxy: these are servers on this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

_LARGEST_ANSWER = 64 << 20


def read_answer(request: str | urllib.request.Request, seconds: float) -> bytes:
    """Send a request to a server on this machine, and return the body of its answer.

    Args:
        request: a URL to GET, or a whole request.
        seconds: the deadline.

    Raises:
        OSError: no connection, no answer in time, or a status of 400 and above
            (urllib.error.HTTPError). Also an answer that breaks off, is too large or is not HTTP.
    """
    try:
        with _opener.open(request, timeout=seconds) as response:
            body: bytes = response.read(_LARGEST_ANSWER)
            if response.length:  # bytes that did not come
                raise http.client.IncompleteRead(body, response.length)
    except http.client.HTTPException as error:
        raise ConnectionError(f"not a whole HTTP answer ({type(error).__name__})") from error
    return body


def get_json(url: str, seconds: float = 5.0, key: str = "") -> Any:
    """GET a URL on this machine and parse the JSON answer; None for an empty body.

    Args:
        url: what to ask for.
        seconds: the deadline.
        key: bearer token; empty for none.

    Raises:
        OSError: as of `read_answer`.
        ValueError: the answer is not JSON.
    """
    body = read_answer(urllib.request.Request(url, headers=_bearer(key)), seconds)
    return json.loads(body) if body.strip() else None


def post_json(url: str, body: Any, seconds: float = 5.0, key: str = "") -> None:
    """POST JSON to a server of this run, and ignore the answer.

    Arguments and errors as of `get_json`.
    """
    headers = {"Content-Type": "application/json", **_bearer(key)}
    read_answer(urllib.request.Request(url, json.dumps(body).encode(), headers), seconds)


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def http_probe(url: str, seconds: float = 5.0) -> Probe:
    """A probe that is ready once GET `url` answers with a status below 400."""

    def probe() -> str | None:
        try:
            read_answer(url, seconds)
        except urllib.error.HTTPError as error:
            return f"GET {url} answers {error.code}"
        except OSError as error:
            return f"GET {url}: {getattr(error, 'reason', error)}"
        return None

    return probe


# The processes of one run: wait for them, notice when one of them dies, and stop them all.

P = TypeVar("P", bound=RunningProcess)


class Supervisor:
    """The processes of one run. Leaving its `with` block stops them all, the last started first."""

    def __init__(self) -> None:
        self.processes: list[RunningProcess] = []

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

    def add(self, process: P) -> P:
        """Look after one that has been started."""
        self.processes.append(process)
        return process

    def check(self) -> None:
        """Raise ProcessDied if one of them is gone that should be running."""
        for process in self.processes:
            if process.is_missed():
                raise process.died()

    def wait_for_http(
        self, process: RunningProcess, url: str, seconds: float, interval: float = 0.2
    ) -> float:
        """Wait until a server answers GET `url` with a status below 400; returns the seconds it
        took.

        Raises:
            ProcessDied: it, or another process, died.
            ProcessError: the deadline passed; the message ends with the last lines of its log.
        """
        missing = http_probe(url, min(seconds, 60.0))
        try:
            return wait_until(process.name, missing, seconds, self.check, interval)
        except ProcessDied:
            raise
        except ProcessError as error:
            raise ProcessError(f"{error}; log: {process.log_path}{process.last_words()}") from None

    def stop(self, process: RunningProcess) -> int:
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
