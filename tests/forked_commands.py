"""Commands of this project as processes forked from one that has imported what they import, which
is most of their work.

`Processes.start` (tests/conftest.py) forks the commands of tests/forkable.py; a command that is not
there, or in an environment that matters to the imports, is executed. The forked process is the same
program with the same arguments, environment, folder, signals and exit status. Its command line in
`ps` and its place in the tree of processes are others. With FORK_CHILDREN in its environment, what
it starts as managed processes is forked too.

All workers of one run of the tests share the processes that fork (tests/fork_server.py). These
listen in a folder that FOLDER names, and are forked themselves (tests/forked_python.py).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from example_trainer.child_processes.processes import ManagedProcess
from tests.forkable import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
READ_WHEN_IMPORTED = ("CUDA_VISIBLE_DEVICES",) if Path("/dev/nvidiactl").exists() else ()
"""Variables that must be as they were when the modules were imported. PYTHONPATH may name nothing
but this repository."""
FOLDER = "LOCKSTEP_TESTS_FORKS"
"""Variable that names the folder of the sockets."""
CHECKOUT = "checkout"
"""File there that names the one whose modules are imported."""
FORK_CHILDREN = {"LOCKSTEP_TESTS_FORK_CHILDREN": "1"}
"""In the environment of a command: it forks what it starts, where it would execute it."""
END_SECONDS = 60.0
"""A process whose status is known ends at once."""
LONGEST_MESSAGE = 1 << 17
"""Bytes; arguments and an environment are a few kilobytes."""
STANDARD_ERROR = 2
MOST_DESCRIPTORS = 5
"""File descriptors of a command's log, its exit status, its standard input and output, and its
guard's control pipe.
"""


@dataclass(frozen=True)
class Command:
    """A Python command.

    Attributes:
        target: a module's name, or the path of a script; `-c` for a program that is the first of
            the arguments.
        is_module: whether it is the first of these.
        arguments: what follows it.
        unbuffered: whether it was called with -u.
    """

    target: str
    is_module: bool
    arguments: Sequence[str]
    unbuffered: bool

    @classmethod
    def of(cls, words: Sequence[str]) -> Command | None:
        """From a command line; None for one that cannot be forked."""
        if not words or words[0] != sys.executable:
            return None
        rest = list(words[1:])
        if unbuffered := rest[:1] == ["-u"]:
            del rest[0]
        if is_module := rest[:1] == ["-m"]:
            del rest[0]
        return cls(rest[0], is_module, rest[1:], unbuffered) if rest else None

    @property
    def name(self) -> str:
        """As in COMMANDS."""
        return self.target if self.is_module else self.target.removeprefix(f"{ROOT}/")

    @property
    def kind(self) -> str | None:
        """Which process forks it; None: it is executed."""
        return next((kind for kind, commands in COMMANDS.items() if self.name in commands), None)

    def run(self) -> None:
        """Be that command, as the interpreter would be."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.unbuffered or os.environ.get("PYTHONUNBUFFERED"):
            for stream in (sys.stdout, sys.stderr):
                assert isinstance(stream, io.TextIOWrapper)
                stream.reconfigure(write_through=True)
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        if threads != "1":
            importlib.import_module("torch").set_num_threads(
                int(threads)
            )  # which reads the variable when it is imported
        if FORK_CHILDREN.items() <= os.environ.items():
            ManagedProcess.start_guard = start_guard  # type: ignore[method-assign]
        if self.target == "-c":
            program, *arguments = self.arguments
            sys.argv, sys.path[0] = ["-c", *arguments], ""
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
            return
        sys.modules.pop(COMMANDS[str(self.kind)][self.name])  # what it imports stays imported
        sys.argv = [self.target, *self.arguments]
        sys.path[0] = os.getcwd() if self.is_module else str(Path(self.target).parent)
        if str(ROOT) not in sys.path:
            sys.path.insert(1, str(ROOT))
        if self.is_module:
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.target, run_name="__main__")


def end(work: Callable[[], object]) -> NoReturn:
    """Do the work of a forked process and end as the interpreter does, up to the moment when it
    takes its modules apart.

    That would write to each page of what was imported, and so copy them all: more work than most
    commands are.
    """
    status, interrupted = 0, False
    try:
        work()
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if asked.code is not None and not isinstance(asked.code, int):
            print(asked.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - shown as the interpreter shows it
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads other than daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


class Forked:
    """Stands for subprocess.Popen of an executed process. It has its process id, the other ends of
    its pipes if there are any, and its exit status once it has ended.
    """

    def __init__(
        self, pid: int, status: int, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None
    ) -> None:
        self.pid, self._status, self.stdin, self.stdout = pid, status, stdin, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0)
            told = os.read(self._status, 8)
            os.close(self._status)
            self.returncode = int(told) if told else -signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):  # it is gone already
                ending = os.pidfd_open(self.pid)
                select.select([ending], [], [], END_SECONDS)
                os.close(ending)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_fork_server(
    kind: str, listener: socket.socket
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process that imports the modules, and forks for clients of the listener; return its
    lifeline too.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with there:
        descriptors = (there.fileno(), listener.fileno())
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", kind, *map(str, descriptors)],
            cwd=ROOT, pass_fds=descriptors, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            # commands of more threads than cores must not burn those
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        )  # fmt: skip
    return process, here


@contextlib.contextmanager
def shared_fork_servers() -> Iterator[None]:
    """Within the block this process, and all that it starts, have their commands forked by the same
    two processes.
    """
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-forks-") as folder,
        contextlib.ExitStack() as stack,
    ):
        for kind in COMMANDS:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(f"{folder}/{kind}")
            listener.listen()
            for part in start_fork_server(kind, listener):
                stack.enter_context(part)
        Path(folder, CHECKOUT).write_text(str(ROOT))
        os.environ[FOLDER] = folder
        yield
        del os.environ[FOLDER]


class ForkServer:
    """The way to the process that has imported the modules: that of all workers, else one that ends
    with this process.
    """

    def __init__(self, kind: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._one_at_a_time = threading.Lock()
        if folder := os.environ.get(FOLDER):
            self._connection.connect(f"{folder}/{kind}")
            return
        with (
            tempfile.TemporaryDirectory() as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        ):
            listener.bind(f"{folder}/{kind}")
            listener.listen()
            self._process, self._lifeline = start_fork_server(kind, listener)
            self._connection.connect(f"{folder}/{kind}")

    def fork(
        self,
        command: Command,
        variables: Mapping[str, str],
        directory: Path | None,
        log: int,
        *guard: int,
        grace: float = 0.0,
        talks: Sequence[int] = (),
    ) -> Forked:
        """Fork a command; under a guard if its control pipe is given, and then the guard is what is
        returned.

        Args:
            talks: its standard input and output; by default it gets no input, and its
                output goes to its log.
        """
        told = {
            "command": vars(command), "environment": dict(variables), "directory": str(directory or Path.cwd()), "grace": grace,
            "talks": bool(talks),
        }  # fmt: skip
        with self._one_at_a_time:  # else two threads may get each other's process
            status = self._ask(told, log, *talks, *guard)
            pid = self._connection.recv(16)
        assert pid, "the process that forks is gone; what it wrote stands above"
        return Forked(int(pid), status)

    def _ask(self, told: Mapping[str, Any], log: int, *others: int) -> int:
        """Ask for a process; return the descriptor from which its exit status will be read."""
        status, told_there = os.pipe()
        try:
            descriptors = [log, told_there, *others]
            socket.send_fds(self._connection, [json.dumps(told).encode()], descriptors)
        finally:
            os.close(told_there)
        return status

    def fork_with_pipes(
        self,
        command: Command,
        variables: Mapping[str, str],
        directory: Path | None,
        log: int,
        *guard: int,
        grace: float = 0.0,
    ) -> Forked:
        """The same with pipes to its standard input and from its output."""
        (stdin, write), (read, stdout) = os.pipe(), os.pipe()
        try:
            talks = (stdin, stdout)
            forked = self.fork(command, variables, directory, log, *guard, grace=grace, talks=talks)
        finally:
            os.close(stdin)
            os.close(stdout)
        forked.stdin, forked.stdout = os.fdopen(write, "wb"), os.fdopen(read, "rb")
        return forked


@functools.cache
def fork_server(kind: str) -> ForkServer:
    """Return the fork server of a kind, started when it is first needed."""
    return ForkServer(kind)


def what_forks(
    words: Sequence[str], variables: Mapping[str, str], program: str | None = None
) -> tuple[ForkServer, Command] | None:
    """Who forks a command line in an environment; None if it has to be executed.

    Args:
        program: the kind that forks it if it is `python -c` with a program.
    """
    command = Command.of(words)
    kind = program if command is not None and command.target == "-c" else command and command.kind
    places = variables.get("PYTHONPATH", "").split(os.pathsep)
    if command is None or kind is None or not {*places} <= {"", str(ROOT)}:
        return None
    if (folder := os.environ.get(FOLDER)) and Path(folder, CHECKOUT).read_text() != str(ROOT):
        # as in a copy of the checkout that a job was handed in with: the modules there may be
        # others
        return None
    if any(variables.get(name) != os.environ.get(name) for name in READ_WHEN_IMPORTED):
        return None
    return fork_server(kind), command


execute_guard = ManagedProcess.start_guard


def start_guard(
    self: ManagedProcess,
    control: int,
    log: int,
    variables: Mapping[str, str],
    directory: Path | None,
) -> Any:
    """As ManagedProcess.start_guard, and the guard is forked with its command if that can be."""
    if (found := what_forks(self.command, variables)) is None:
        return execute_guard(self, control, log, variables, directory)
    server, command = found
    fork = server.fork_with_pipes if self.pipes else server.fork
    return fork(command, variables, directory, log, control, grace=self.grace)


class ForkedProcess(ManagedProcess):
    """A managed process that is forked if that can be."""

    start_guard = start_guard


def start_unguarded(
    words: Sequence[str],
    log: int,
    variables: Mapping[str, str],
    directory: Path,
    program: str | None = None,
) -> Any:
    """As subprocess.Popen, and forked if that can be: for who signals a command itself, and waits
    for it.

    Args:
        words: program and arguments.
        log: file descriptor of its output.
        variables: its whole environment.
        directory: its working directory.
        program: the kind of what the program of `python -c` imports.
    """
    if (found := what_forks(words, variables, program)) is None:
        return execute(words, log, variables, directory)
    server, command = found
    return server.fork(command, variables, directory, log)


def start_with_pipes(words: Sequence[str], directory: Path) -> Any:
    """As subprocess.Popen with pipes to its standard input and from its output, in this process's
    environment and with its standard error. It is forked if that can be.
    """
    if (found := what_forks(words, os.environ)) is None:
        return subprocess.Popen(words, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    server, command = found
    return server.fork_with_pipes(command, os.environ, directory, STANDARD_ERROR)


def run_command(
    words: Sequence[str | Path],
    variables: Mapping[str, str] = os.environ,
    directory: Path = ROOT,
    program: str | None = None,
    seconds: float = 180.0,
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, and forked if that can be; `stdout` is all that it wrote, to standard
    error too.

    Args:
        words, variables, directory, program: see start_unguarded.
        seconds: how long it may take.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed.
    """
    command = [str(word) for word in words]
    with tempfile.TemporaryFile() as log:
        process = start_unguarded(command, log.fileno(), variables, directory, program)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        log.seek(0)
        return subprocess.CompletedProcess(command, status, log.read().decode(errors="replace"))


def execute(words: Sequence[str], log: int, variables: Mapping[str, str], directory: Path) -> Any:
    """As start_unguarded, and never forked."""
    return subprocess.Popen(words, cwd=directory, stdout=log, stderr=log, env=dict(variables))
