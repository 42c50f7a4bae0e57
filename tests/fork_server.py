"""The process that has imported what commands import, and forks them (tests/forked_commands.py).

python -m tests.fork_server KIND LIFELINE LISTENER   forks commands of a kind, on request, until the
lifeline is closed
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from example_trainer.child_processes.guard import PR_SET_CHILD_SUBREAPER, Guard, prctl
from tests.forkable import COMMANDS, LATER
from tests.forked_commands import LONGEST_MESSAGE, MOST_DESCRIPTORS, Command, end


class Become(BaseException):
    """Unwinds the stack of a forked process up to where it runs its command, as an interpreter does
    that has just started.
    """

    def __init__(self, command: Command) -> None:
        self.command = command


class ForkedGuard(Guard):
    """A guard whose command is this program, forked."""

    def __init__(
        self, command: Command, control: int, grace: float, keep_out: Sequence[int]
    ) -> None:
        self.program, self.keep_out = command, keep_out
        super().__init__([command.target], control, grace)

    def become(self) -> None:
        for descriptor in (*self.keep_out, self.control, self.wake, self.wake_end):
            os.close(descriptor)  # as execve does
        raise Become(self.program)


def wait_for(child: int, connection: socket.socket) -> int:
    """Wait for a child to end, and kill it if its client ends before.

    Returns its exit status.
    """
    ended, watch = os.pidfd_open(child), select.poll()
    watch.register(ended, select.POLLIN)
    watch.register(
        connection, 0
    )  # its end is reported in any case; data from it is for the process that forks
    if ended not in dict(watch.poll()):
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def keep(
    told: dict[str, Any], connection: socket.socket, log: int, status: int, *others: int
) -> None:
    """Keep one command until it has ended, under a guard if there is a control pipe, and report its
    exit status.

    Args:
        others: standard input and output, if it has its own; the control pipe, if there is one.

    Raises:
        Become: this is the process of the command.
    """
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    if told["talks"]:
        for descriptor in (0, 1):
            os.dup2(others[descriptor], descriptor)
            os.close(others[descriptor])
        others = others[2:]
    control = others[0] if others else None
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
        with contextlib.suppress(BrokenPipeError):  # the client has ended: the child is killed
            connection.send(str(child).encode())
        code = wait_for(child, connection)
    else:
        connection.close()
        os.close(status)
        raise Become(command)
    os.write(status, str(code).encode())


def serve(lifeline: socket.socket, listener: socket.socket) -> None:
    """Fork a process for each message of a client, which keeps a command, until the lifeline is
    closed.

    Raises:
        Become: this is a forked process, and its command has to be run.
    """
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # not waited for here: they report their status through a pipe
    connections: list[socket.socket] = []
    while True:
        ready = select.select([lifeline, listener, *connections], [], [])[0]
        if lifeline in ready:
            return
        for one in ready:
            if one is listener:
                connections.append(listener.accept()[0])
                continue
            data, descriptors = b"", []
            with contextlib.suppress(ConnectionResetError):  # the client died before it read
                data, descriptors, *_ = socket.recv_fds(one, LONGEST_MESSAGE, MOST_DESCRIPTORS)
            if not data:
                connections.remove(one)
                one.close()
                continue
            if os.fork():
                for descriptor in descriptors:
                    os.close(descriptor)
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (lifeline, listener, *connections):
                if other is not one:
                    other.close()
            try:
                keep(json.loads(data), one, *descriptors)
            except Become:
                raise
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                raise
            finally:
                if not isinstance(sys.exception(), Become):
                    os._exit(0)


def fork_engines() -> None:
    """Have vLLM fork its engines' processes too: without a GPU it executes them, and each imports
    everything again.
    """
    context = multiprocessing.get_context("fork")
    for name in ("engine.utils", "engine.coordinator", "executor.multiproc_executor"):
        module = importlib.import_module(f"vllm.v1.{name}")
        assert hasattr(module, "get_mp_context"), name
        module.get_mp_context = lambda: context  # type: ignore[attr-defined]
    title = importlib.import_module(
        "setproctitle"
    )  # finds where titles are kept by an environment that has not changed yet
    title.setproctitle(title.getproctitle())
    # Else a signal to the engine would wake the server, as one to itself.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def register_kernels() -> None:
    """Have vLLM's kernels replaced by those for CPUs now, where each engine would look through all
    modules for them.
    """
    platform = type(importlib.import_module("vllm.platforms").current_platform)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of what it looks at
        platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = classmethod(lambda _: None)


def main() -> None:
    kind, *descriptors = sys.argv[1:]
    gc.disable()  # what is imported stays
    if kind == "vllm":
        os.environ["TORCH_COMPILE_DISABLE"] = (
            "1"  # which vllm_api_server.py sets, too late for PyTorch in a forked process
        )
    for module in (*COMMANDS[kind].values(), *LATER[kind]):
        importlib.import_module(module)
    if kind == "vllm":
        fork_engines()
        register_kernels()
    assert threading.active_count() == 1, "a fork takes no threads along"
    gc.freeze()
    gc.enable()
    lifeline, listener = (socket.socket(fileno=int(descriptor)) for descriptor in descriptors)
    serve(lifeline, listener)


if __name__ == "__main__":
    command = None
    try:
        main()
    except Become as told:
        command = told.command
    if command is not None:
        end(command.run)
