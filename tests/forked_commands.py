"""Commands of this project as processes forked from one that has imported what they import, which is most of their work.

`Processes.start` (tests/conftest.py) forks those in COMMANDS; a command that is not there, or in an environment that matters to
what is imported, is executed. The forked process is the same program with the same arguments, environment, folder, signals and
exit status; only its command line in `ps` is another.

    python -m tests.forked_commands KIND SOCKET   forks commands of a kind, as it is told, until the other end is closed
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from example_trainer.child_processes.guard import PR_SET_CHILD_SUBREAPER, Guard, prctl
from example_trainer.child_processes.processes import ManagedProcess

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "light": {
        "atroposlib.cli.run_api": "atroposlib.cli.run_api",
        "environments/arithmetic_server.py": "environments.arithmetic_server",
        "environments/gsm8k_server.py": "environments.gsm8k_server",
        "environments/code_server.py": "environments.code_server",
        "environments/guess_number_server.py": "environments.guess_number_server",
        "environments/judge_server.py": "environments.judge_server",
        "environments/math_server.py": "environments.math_server",
        "environments/reasoning_gym_server.py": "environments.reasoning_gym_server",
        "example_trainer/grpo.py": "example_trainer.grpo",
        "example_trainer.reference_worker": "example_trainer.reference_worker",
        "tests.forked_ranks": "tests.forked_ranks",
    },
    "vllm": {"example_trainer/vllm_api_server.py": "example_trainer.vllm_api_server"},
}
"""By the process that forks them: modules (`python -m`) and scripts, and what is imported for each."""
VLLM = (
    "vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.launchers.cli_args", "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker", "vllm.v1.executor.uniproc_executor", "vllm.model_executor.models.qwen3", "uvloop",
)  # fmt: skip
READ_WHEN_IMPORTED = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that must be as they were when the modules were imported. PYTHONPATH may name nothing but this repository."""
LONGEST_MESSAGE = 1 << 17
"""Bytes; arguments and an environment are a few kilobytes."""


@dataclass(frozen=True)
class Command:
    """A Python command.

    Attributes:
        target: a module's name, or the path of a script.
        is_module: which of both.
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
        if self.unbuffered:
            for stream in (sys.stdout, sys.stderr):
                assert isinstance(stream, io.TextIOWrapper)
                stream.reconfigure(write_through=True)
        sys.modules.pop(COMMANDS[str(self.kind)][self.name])  # what it imports stays imported
        sys.argv = [self.target, *self.arguments]
        sys.path[0] = os.getcwd() if self.is_module else str(Path(self.target).parent)
        if str(ROOT) not in sys.path:
            sys.path.insert(1, str(ROOT))
        if self.is_module:
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.target, run_name="__main__")


class Become(BaseException):
    """Unwinds the stack of a forked process up to where it runs its command, as an interpreter does that has just started."""

    def __init__(self, command: Command) -> None:
        self.command = command


class ForkedGuard(Guard):
    """A guard whose command is this program, forked."""

    def __init__(self, command: Command, control: int, grace: float, keep_out: Sequence[int]) -> None:
        self.program, self.keep_out = command, keep_out
        super().__init__([command.target], control, grace)

    def become(self) -> None:
        for descriptor in (*self.keep_out, self.control, self.wake, self.wake_end):
            os.close(descriptor)  # as execve does
        raise Become(self.program)


def keep(told: dict[str, Any], connection: socket.socket, log: int, status: int, control: int | None = None) -> None:
    """Keep one command until it has ended, under a guard if there is a control pipe, and tell its exit status.

    Raises:
        Become: this is the process of the command.
    """
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["directory"])
    command = Command(**told["command"])
    if control is not None:
        connection.send(str(os.getpid()).encode())
        connection.close()
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        code = ForkedGuard(command, control, told["grace"], (status,)).run()
    elif child := os.fork():
        connection.send(str(child).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    else:
        connection.close()
        os.close(status)
        raise Become(command)
    os.write(status, str(code).encode())


def serve(connection: socket.socket) -> None:
    """Fork a process for each message, which keeps a command, until there are no more.

    Raises:
        Become: this is a forked process, and its command has to be run.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here: they tell their status through a pipe
    while True:
        data, descriptors, *_ = socket.recv_fds(connection, LONGEST_MESSAGE, 3)
        if not data:
            return
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            keep(json.loads(data), connection, *descriptors)
        except Become:
            raise
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            raise
        finally:
            if not isinstance(sys.exception(), Become):
                os._exit(0)


class Forked:
    """What subprocess.Popen is for an executed process: its process id, and its exit status once it has ended."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid, self._status = pid, status
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
                select.select([ending], [], [])
                os.close(ending)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The process that has imported the modules, and forks."""

    def __init__(self, kind: str) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection = here
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked_commands", kind, str(there.fileno())],
                cwd=ROOT, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def fork(
        self, command: Command, variables: Mapping[str, str], directory: Path | None, log: int, *guard: int, grace: float = 0.0
    ) -> Forked:
        """Fork a command; under a guard if its control pipe is given, and then the guard is what is returned."""
        told = {
            "command": vars(command), "environment": dict(variables), "directory": str(directory or Path.cwd()), "grace": grace,
        }  # fmt: skip
        status, told_there = os.pipe()
        try:
            socket.send_fds(self._connection, [json.dumps(told).encode()], [log, told_there, *guard])
        finally:
            os.close(told_there)
        pid = self._connection.recv(16)
        assert pid, "the process that forks is gone; what it wrote stands above"
        return Forked(int(pid), status)


@functools.cache
def fork_server(kind: str) -> ForkServer:
    """This process's own of a kind, started when it is first asked for; it ends with this process."""
    return ForkServer(kind)


def what_forks(words: Sequence[str], variables: Mapping[str, str]) -> tuple[ForkServer, Command] | None:
    """Who forks a command line in an environment; None if it has to be executed."""
    command = Command.of(words)
    places = variables.get("PYTHONPATH", "").split(os.pathsep)
    if command is None or command.kind is None or not {*places} <= {"", str(ROOT)}:
        return None
    if any(variables.get(name) != os.environ.get(name) for name in READ_WHEN_IMPORTED):
        return None
    return fork_server(command.kind), command


class ForkedProcess(ManagedProcess):
    """A managed process that is forked if that can be."""

    def start_guard(self, control: int, log: int, variables: Mapping[str, str], directory: Path | None) -> Any:
        if (found := what_forks(self.command, variables)) is None:
            return super().start_guard(control, log, variables, directory)
        server, command = found
        return server.fork(command, variables, directory, log, control, grace=self.grace)


def start_unguarded(words: Sequence[str], log: int, variables: Mapping[str, str], directory: Path) -> Any:
    """As subprocess.Popen, and forked if that can be: for who signals a command itself, and waits for it.

    Args:
        words: program and arguments.
        log: file descriptor of its output.
        variables: its whole environment.
        directory: its working directory.
    """
    if (found := what_forks(words, variables)) is None:
        return execute(words, log, variables, directory)
    server, command = found
    return server.fork(command, variables, directory, log)


def execute(words: Sequence[str], log: int, variables: Mapping[str, str], directory: Path) -> Any:
    """As start_unguarded, and never forked."""
    return subprocess.Popen(words, cwd=directory, stdout=log, stderr=log, env=dict(variables))


def fork_engines() -> None:
    """Have vLLM fork its engines' processes too: without a GPU it executes them, and each imports everything again."""
    context = multiprocessing.get_context("fork")
    for name in ("engine.utils", "engine.coordinator", "executor.multiproc_executor"):
        module = importlib.import_module(f"vllm.v1.{name}")
        assert hasattr(module, "get_mp_context"), name
        module.get_mp_context = lambda: context  # type: ignore[attr-defined]
    title = importlib.import_module("setproctitle")  # finds where titles are kept by an environment that nobody has changed yet
    title.setproctitle(title.getproctitle())
    # Else a signal to the engine would wake the server, as one to itself.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def main() -> None:
    kind, descriptor = sys.argv[1:]
    if kind == "vllm":
        os.environ["TORCH_COMPILE_DISABLE"] = "1"  # which vllm_api_server.py sets, too late for PyTorch in a forked process
    for module in COMMANDS[kind].values():
        importlib.import_module(module)
    if kind == "vllm":
        for module in VLLM:
            importlib.import_module(module)
        fork_engines()
    assert threading.active_count() == 1, "a fork takes no threads along"
    gc.freeze()
    serve(socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    command = None
    try:
        main()
    except Become as told:
        command = told.command
    if command is not None:
        command.run()
