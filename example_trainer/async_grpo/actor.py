"""A role's process on its node, which an actor starts and watches.

Nothing here imports Ray, so tests need none.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from example_trainer.child_processes.files import write_whole
from example_trainer.child_processes.guard import send
from example_trainer.child_processes.ports import PortReservations
from example_trainer.child_processes.processes import (
    ManagedProcess,
    ProcessError,
    describe_exit,
    file_size,
    first_error,
    http_probe,
    tail,
)
from example_trainer.launcher.roles import environment_file

# The description of a process that a node starts.
#
# Standard library alone: actors are made often, and must be light.

logger = logging.getLogger(__name__)
PYTHON = "{python}"
"""Stands in a command for the interpreter of the node on which it is started."""


@dataclass(frozen=True)
class Address:
    """Where a role was put.

    Attributes:
        host: by which the other roles reach it; localhost where all nodes are one machine.
        ports: numbers that it may listen on.
        gpus: indices of its GPUs on that node.
    """

    host: str
    ports: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def server(self) -> str:
        """`host:port`."""
        return f"{self.host}:{self.ports[0]}"

    @property
    def url(self) -> str:
        """`http://host:port`."""
        return f"http://{self.server}"

    @property
    def listen(self) -> str:
        """The address to listen on."""
        return "127.0.0.1" if self.host == "localhost" else "0.0.0.0"


@dataclass(frozen=True)
class Launch:
    """A process that a node starts.

    Attributes:
        arguments: program and arguments; PYTHON for the interpreter there.
        variables: on top of the node's; None removes one.
        files: path within the run's folder -> text, written before.
        stale: patterns within the run's folder of what is removed before.
    """

    arguments: tuple[str, ...]
    variables: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stale: tuple[str, ...] = ()


ROOT = Path(__file__).resolve().parents[2]
PORT_SECONDS = 30.0
"""Limit of the wait for the port of an earlier process, which is still being ended if its actor was
killed too."""
LOG_BYTES = 1 << 18
"""Part of a log that is carried to the driver's machine at once."""


class NodeProblem(Exception):
    """A node cannot do what a role needs: one sentence without the node's name, with the remedy."""


REMEDIES = {
    errno.ENOSPC: "free space there, or give another logging.folder",
    errno.EFBIG: "free space there, or give another logging.folder",
    errno.EROFS: "mount it writable there, or give another logging.folder",
    errno.EIO: "look at that disk, or give another logging.folder",
    errno.EDQUOT: "free space there, or give another logging.folder",
    errno.EMFILE: "raise `ulimit -n` for Ray on that node",
    errno.ENFILE: "raise fs.file-max on that node",
    errno.ENOMEM: "free memory there, or ask fewer roles of that node",
    errno.EAGAIN: "raise `ulimit -u` for Ray on that node, or ask fewer roles of it",
}
"""Error number -> what to do; for others see `problem`."""


WRITABLE = "make it writable for who runs Ray there, or give another logging.folder"


def problem(what: str, error: OSError | ProcessError, otherwise: str = WRITABLE) -> NodeProblem:
    """The problem that an error is.

    Args:
        what: what could not be done, to what.
        error: the reason.
        otherwise: the remedy for what is not in REMEDIES.
    """
    if isinstance(error, ProcessError):
        return NodeProblem(f"{what}: {' '.join(str(error).split())}")
    path = ""
    if error.filename and str(error.filename) not in what:
        path = f" ({error.filename})"
    remedy = REMEDIES.get(error.errno or 0, otherwise)
    return NodeProblem(f"{what}: {error.strerror or error}{path}; {remedy}")


@dataclass(frozen=True)
class NodeNeeds:
    """Requirements of a role on its node.

    Attributes:
        folder: the run's.
        marker: text of the file `.run` there on the driver's machine: where it is the same, the
            folder is common.
        model: folder or Hugging Face name; empty if the role loads none.
        environment: as in the settings; empty for another role.
        ray: the driver's version; empty where there is none.
        ports: how many to keep.
        wanted: ports of an earlier life, taken again if they are free.
        end_earlier: kill what an earlier life of the role has left on the node.
    """

    folder: str
    marker: str
    model: str = ""
    environment: str = ""
    ray: str = ""
    ports: int = 0
    wanted: tuple[int, ...] = ()
    end_earlier: bool = False


@dataclass(frozen=True)
class NodeReport:
    """A node as a role finds it.

    Attributes:
        hostname: its name.
        ports: that are kept for the role.
        gpus: that Ray gave it.
        common: its run folder is the driver's.
        problems: why the role cannot run here; each a sentence without the node's name.
        earlier: processes of an earlier life of the role that still run here; no ports are kept
            then.
    """

    hostname: str
    ports: tuple[int, ...]
    gpus: tuple[str, ...]
    common: bool
    problems: tuple[str, ...]
    earlier: tuple[int, ...] = ()


@dataclass(frozen=True)
class Look:
    """State of a role's process.

    Attributes:
        ready: it answers, or listens nowhere and runs.
        missing: what it does not do yet.
        code: its exit status, 128 + n for signal n; None while it runs.
        lived: seconds since its start.
        said: its end and the reason, in one line.
        log: what its log has grown by, where that is not on the driver's disk.
        pid: of the command.
    """

    ready: bool
    missing: str
    code: int | None
    lived: float
    said: str
    log: bytes
    pid: int


def project_ray() -> str:
    """The installed version of Ray; empty if there is none."""
    try:
        import ray
    except ImportError:
        return ""
    return str(ray.__version__)


def model_problem(model: str) -> str | None:
    """Why a model's folder cannot be loaded on this node; None if it can, or if it is a name of the
    Hub.
    """
    path = ROOT / model  # the model's own path if that is absolute
    if (path / "config.json").is_file():
        return None
    if path.is_dir():
        return f"model folder {path} has no config.json: copy the whole folder there"
    if (
        model.startswith((".", "/", "~"))
        or model.count("/") != 1
        or (ROOT / model.split("/")[0]).is_dir()
    ):
        return f"model folder {path} is not there: copy it to this node, or give a path that all nodes have"
    return None


def writers(log: Path) -> tuple[int, ...]:
    """Processes of this machine whose output is a log. They are the guard of a role, until the last
    process that it looks after has ended, and leftovers of a killed guard. A reader of the log does
    not count.
    """
    name, pids = str(log.resolve()), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if os.readlink(f"/proc/{entry}/fd/1") == name:
                    pids.append(int(entry))
    return tuple(sorted(pids))


class RoleProcess:
    """One process and its log. The actor's methods; Ray calls one at a time.

    Args:
        name: the role's.
        folder: the run's.
        echo: write the process's output to this process's output too, which Ray's dashboard shows.
    """

    def __init__(self, name: str, folder: str, echo: bool = False) -> None:
        self._name, self._folder, self._echo = name, Path(folder), echo
        self._ports: PortReservations | None = None
        self._process: ManagedProcess | None = None
        self._answered = False
        self._common = True
        self._begun_at = 0

    def check(self, needs: NodeNeeds, gpus: Sequence[str] = ()) -> NodeReport:
        """Look at the node, and keep ports for the role."""
        problems = []
        if needs.ray and project_ray() != needs.ray:
            has = project_ray() or "none"
            problems.append(
                f"it has Ray {has}, and the driver has {needs.ray}: install that release there"
            )
        if needs.model and (trouble := model_problem(needs.model)):
            problems.append(trouble)
        if needs.environment:
            file = ROOT / environment_file(needs.environment)
            if not file.is_file():
                problems.append(f"environment file {file} is not there: copy it to this node")
        try:
            (self._folder / "logs").mkdir(parents=True, exist_ok=True)
            marker = self._folder / ".run"
            self._common = marker.is_file() and marker.read_text() == needs.marker
        except OSError as error:
            problems.append(
                str(problem(f"the run's folder {self._folder} cannot be written", error))
            )
        earlier: tuple[int, ...] = ()
        ports: tuple[int, ...] = ()
        if not problems:
            earlier = writers(self.log)
        if needs.end_earlier:
            for pid in earlier:
                send(pid, signal.SIGKILL)
        try:
            if not problems and not earlier:
                ports = self._reserve(needs.ports, needs.wanted)
        except (OSError, ProcessError) as error:
            problems.append(
                str(
                    problem(
                        "it gets no port", error, f"make {tempfile.gettempdir()} there writable"
                    )
                )
            )
        return NodeReport(
            socket.gethostname(), ports, tuple(gpus), self._common, tuple(problems), earlier
        )

    def _reserve(self, count: int, wanted: tuple[int, ...]) -> tuple[int, ...]:
        if not count:
            return ()
        ports = self._ports = self._ports or PortReservations()
        deadline = time.monotonic() + PORT_SECONDS
        kept = []
        for port in wanted[:count]:
            while not (taken := ports.take(port)) and time.monotonic() < deadline:
                time.sleep(0.2)
            if not taken:
                port = ports.pick()
            kept.append(port)
        return tuple(kept + [ports.pick() for _ in range(count - len(kept))])

    def start(self, launch: Launch, grace: float, may_finish: bool) -> int:
        """Start the process, which must not be running; returns its guard's process id.

        Raises:
            NodeProblem: its files or its log cannot be written, or no process can be started.
        """
        try:
            return self._start(launch, grace, may_finish)
        except OSError as error:
            raise problem(
                f"it cannot be started, with its files and its log in {self._folder}", error
            ) from error

    def _start(self, launch: Launch, grace: float, may_finish: bool) -> int:
        for pattern in launch.stale:
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)
        for name, text in launch.files.items():
            write_whole(self._folder / name, text.encode())
        for name in ("LOGDIR", "LOCKSTEP_TIMELINE"):
            if folder := launch.variables.get(name):
                Path(folder).mkdir(parents=True, exist_ok=True)
        words = [sys.executable if word == PYTHON else word for word in launch.arguments]
        paths = [
            str(ROOT),
            *[
                path
                for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
                if path and path != str(ROOT)
            ],
        ]
        variables = {"PYTHONPATH": os.pathsep.join(paths), **launch.variables}
        log = self.log
        if file_size(log):
            with log.open("ab") as file:
                file.write(
                    f"\n===== started again at {time.strftime('%Y-%m-%d %H:%M:%S')} =====\n".encode()
                )
        self._answered = False
        self._begun_at = file_size(log)
        self._process = ManagedProcess(
            self._name, words, log, variables, ROOT, grace, may_finish, append=True
        )
        if self._echo:
            threading.Thread(
                target=self._show, args=(self._process,), name="log", daemon=True
            ).start()
        return self._process.guard.pid

    @property
    def log(self) -> Path:
        """The process's log on this node."""
        return self._folder / "logs" / f"{self._name}.log"

    def look(self, url: str = "", offset: int = 0) -> Look:
        """Return the state of the process.

        Args:
            url: what it answers with a status below 400 once it works; empty if it listens nowhere.
                Asked until it has.
            offset: bytes of its log that the driver has.

        Raises:
            NodeProblem: its log is not there any more. One failure could have another cause, so it
                is read twice.
        """
        try:
            return self._look(url, offset)
        except OSError as error:
            logger.warning("%s: %s; its log %s is read again", self._name, error, self.log)
        try:
            return self._look(url, offset)
        except OSError as error:
            raise problem(f"its log {self.log} cannot be read", error) from error

    def _look(self, url: str, offset: int) -> Look:
        process = self._process
        if process is None:
            return Look(False, "not started", None, 0.0, "", b"", 0)
        code = process.poll()
        missing = ""
        if code is None and url and not self._answered:
            missing = http_probe(url, 10.0)() or ""
        self._answered = self._answered or (code is None and not missing)
        lived = time.monotonic() - process.started
        log = b""
        if not self._common:
            with self.log.open("rb") as file:
                file.seek(offset)
                log = file.read(LOG_BYTES)
        end = self._end(code, lived)
        return Look(self._answered, missing, code, lived, end, log, process.guard.pid)

    def _end(self, code: int | None, lived: float) -> str:
        """Describe the end of the process in one line; empty while it runs."""
        if code is None:
            return ""
        size = min(1 << 20, max(0, self.log.stat().st_size - self._begun_at))  # of this life alone
        cause = "".join(tail(self.log, 1, size=size))
        if code:
            cause = first_error(self.log, size=size) or cause or "it wrote nothing"
        head = f"{describe_exit(code)} after {lived:.0f} s on {socket.gethostname()}"
        if code > 128 or not cause:
            return head
        return f"{head}: {cause}"

    def stop(self) -> int | None:
        """End the process with all that it started; returns its exit status, None if there was
        none.
        """
        if self._process is None:
            return None
        return self._process.stop()

    def _show(self, process: ManagedProcess) -> None:
        """Write the log to this process's output as it grows, until the process has ended."""
        try:
            file = self.log.open("rb")
        except OSError as error:
            logger.warning(
                "%s: its log %s cannot be shown (%s): start the role again to see its output",
                self._name, self.log, error.strerror,
            )  # fmt: skip
            return
        with file:
            file.seek(0, os.SEEK_END)
            while True:
                ended = process.poll() is not None
                text = file.read()
                if text:
                    sys.stdout.write(text.decode(errors="replace"))
                    sys.stdout.flush()
                elif ended:
                    return
                else:
                    time.sleep(0.5)
