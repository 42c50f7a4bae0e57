"""Child processes of a benchmark: a vLLM server, and workers that take commands line by line.

Every wait has an end.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from example_trainer.child_processes import processes
from example_trainer.child_processes.guard import descendants, send
from example_trainer.child_processes.ports import PortReservations

ROOT = Path(__file__).resolve().parents[2]
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""NVLink multicast stays off for every child, unless the environment sets it."""


def device_variables(on_cpu: bool, gpus: str) -> dict[str, str]:
    """Return the environment variables of a process on some GPUs, or on the CPU."""
    if on_cpu:
        return {"OMP_NUM_THREADS": "1"}
    return {"CUDA_VISIBLE_DEVICES": gpus}


class BenchError(RuntimeError):
    """A measurement could not be made.

    The message names what failed and ends with the process's last lines.
    """


@cache
def _ports() -> PortReservations:
    return PortReservations()


def free_port() -> int:
    """Reserve a free TCP port for this program until it ends; the server on it starts later."""
    return _ports().pick()


def among_visible(gpus: str) -> str:
    """Translate GPU numbers, separated by commas, to those among the GPUs that this program may
    use.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not visible:
        return gpus
    mine = visible.split(",")
    return ",".join(mine[int(gpu)] for gpu in gpus.split(","))


def crossed_gpus(ranks: int) -> list[str]:
    """GPUs of a trainer whose rank r sends to vLLM's rank r on GPU r: never that one, but the next
    of the same GPUs.
    """
    return [str((rank + 1) % ranks) for rank in range(ranks)]


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM (of `timeout`, for example) end this program in the block as an exception does,
    so that its children are stopped.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log."""
    return "\n".join(processes.tail(path, lines, columns=400))


class Child(processes.ManagedProcess):
    """A process of a benchmark, in the repository's root.

    Args:
        name: for messages.
        command: program and arguments.
        log: what it writes to stderr, and to stdout unless `pipes`.
        environment: on top of this process's own.
        pipes: stdin and stdout are ours to talk through.
        grace: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        pipes: bool = False,
        grace: float = 20.0,
    ) -> None:
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        variables = {name: os.environ.get(name, value) for name, value in NO_MULTICAST.items()}
        variables |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **environment}
        if environment.get("CUDA_VISIBLE_DEVICES"):
            variables["CUDA_VISIBLE_DEVICES"] = among_visible(environment["CUDA_VISIBLE_DEVICES"])
        super().__init__(name, command, log, variables, ROOT, grace, pipes=pipes)

    def descendants(self) -> list[psutil.Process]:
        """Everything that the command has started and that still lives."""
        found = []
        for pid in descendants(self.guard_pid)[1:]:
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def kill(self) -> None:
        """End the command and all that it started at once, as a failure of the machine would, and
        wait until they are gone.
        """
        for pid in descendants(self.guard_pid):
            send(pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> int:
        code = super().stop()
        for pipe in (self.guard.stdin, self.guard.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        return code

    def ended(self) -> BenchError:
        """The error for a process that is needed and has ended."""
        return BenchError(
            f"{self.name} ended with status {self.poll()}:\n{tail(self.log_path, 25)}"
        )


HELD_SECONDS = 900.0
"""Limit of the time for which a held task waits for its turn."""


class Task(Child):
    """A module that reads what is asked of it from one JSON file and writes its answer to another,
    as `answer_once` does.
    """

    def __init__(
        self,
        name: str,
        module: str,
        asked: Mapping[str, Any],
        output: Path,
        seconds: float,
        ranks: int = 1,
        environment: Mapping[str, str] | None = None,
        held: bool = False,
    ) -> None:
        """
        Args:
            name: for messages and the log's name.
            module: run with the two files, by torchrun if there are several ranks. The
                first one answers.
            output: where the log goes.
            seconds: time limit of the whole process.
            held: it imports what it needs, which takes long, and does nothing more until `begin`.
        """
        self._folder, self._seconds, self._began = (
            tempfile.TemporaryDirectory(),
            seconds,
            time.monotonic(),
        )
        files = [Path(self._folder.name) / "asked.json", Path(self._folder.name) / "answer.json"]
        self._asked, self._words = files[0], json.dumps(asked)
        if not held:
            self.begin(seconds)
        log = output / (re.sub(r"[^\w.-]", "_", name) + ".log")
        super().__init__(
            name,
            [*module_command(module, ranks), *map(str, files)],
            log,
            environment or {},
        )
        self._answer = files[1]

    def begin(self, seconds: float) -> None:
        """Hand a held task its work; it has so many seconds from now on."""
        self._seconds, self._began = seconds, time.monotonic()
        part = self._asked.with_suffix(".part")
        part.write_text(self._words, encoding="utf-8")
        part.replace(self._asked)

    @property
    def answers(self) -> bool:
        """Report if `answer` returns, or raises, without waiting."""
        return self.poll() is not None or time.monotonic() - self._began > self._seconds

    def answer(self) -> dict[str, Any]:
        """Return its answer, once it has ended.

        Raises BenchError if it did not end in time, or ended without an answer.
        """
        self.wait_for_guard(max(0.0, self._began + self._seconds - time.monotonic()))
        status = self.poll()
        if status is None:
            raise BenchError(
                f"{self.name} did not end within {self._seconds:g} s:\n{tail(self.log_path)}"
            )
        if status != 0 or not self._answer.exists():
            # If several ranks failed, the first failure is the cause.
            reason = processes.first_error(self.log_path) or ""
            raise BenchError(
                f"{self.name} ended with status {status}: {reason}\n{tail(self.log_path)}"
            )
        answer: dict[str, Any] = json.loads(self._answer.read_text(encoding="utf-8"))
        return answer

    def stop(self) -> int:
        code = super().stop()
        self._folder.cleanup()
        return code


def answer_once(work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The main program of a module that a `Task` runs; with several ranks, the first one's answer
    is kept.
    """
    asked, answer = map(Path, sys.argv[1:3])
    deadline = time.monotonic() + HELD_SECONDS
    while not asked.exists():
        if time.monotonic() > deadline or not asked.parent.exists():
            raise TimeoutError(f"no request came within {HELD_SECONDS:g} s: {asked} is not there")
        time.sleep(0.02)
    found = work(json.loads(asked.read_text(encoding="utf-8")))
    if int(os.environ.get("RANK", "0")) == 0:
        answer.write_text(json.dumps(found), encoding="utf-8")


def module_command(module: str, ranks: int = 1) -> list[str]:
    """Return the command of a module in this Python, by torchrun if there are several ranks."""
    command = [sys.executable, "-u", "-m"]
    if ranks > 1:
        command += [
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "--master-port",
            str(free_port()),
            "-m",
        ]
    return [*command, module]


class Worker(Child):
    """A child that reads one JSON object a line and answers each with one: {"ok": …}, {"error": …}
    or {"event": …}.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        ranks: int = 1,
    ) -> None:
        """See Child; `module` is run with `arguments`, by torchrun if there are several ranks."""
        super().__init__(
            name, [*module_command(module, ranks), *arguments], log, environment, pipes=True
        )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, name=f"answers of {name}", daemon=True).start()

    def ask(self, command: str, timeout: float, **arguments: Any) -> Any:
        """Send a command and return its answer.

        Raises:
            BenchError: it answered with an error, ended, or did not answer in time.
        """
        self.send(command, **arguments)
        return self.answer(timeout, command)

    def send(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting; `answer` fetches the reply."""
        try:
            self.write(json.dumps({"do": command, **arguments}))
        except BrokenPipeError:
            raise BenchError(
                f"{self.name} has ended before {command}; its log ends with:\n{tail(self.log_path)}"
            ) from None

    def write(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.guard.stdin is not None
        self.guard.stdin.write(f"{line}\n".encode())
        self.guard.stdin.flush()

    def answer(self, timeout: float, to: str = "") -> Any:
        """The next answer. Raises BenchError as `ask` does."""
        message = self.message(timeout, to)
        if "error" in message:
            raise BenchError(f"{self.name}: {to}: {message['error']}")
        return message.get("ok", message)

    def message(self, timeout: float, to: str = "") -> dict[str, Any]:
        """The next message, errors included. Raises BenchError if none comes."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise BenchError(
                f"{self.name} did not answer {to} within {timeout:g} s:\n{tail(self.log_path)}"
            ) from None
        if line is None:
            self._lines.put(None)
            self.wait_for_guard(10)
            raise BenchError(
                f"{self.name} ended with status {self.poll()} during {to}:\n{tail(self.log_path)}"
            )
        message: dict[str, Any] = json.loads(line)
        return message

    def _read(self) -> None:
        assert self.guard.stdout is not None
        for line in self.guard.stdout:
            self._lines.put(line)
        self._lines.put(None)


class Answers:
    """A worker's half of that.

    Takes stdout for itself: whatever else this process prints goes to the log (stderr).
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def write(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def serve(answers: Answers, commands: dict[str, Callable[..., Any]]) -> None:
    """Carry out commands until stdin ends.

    An exception is an answer, and its trace goes to the log.
    """
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            answers.write({"ok": commands[name](**request)})
        except Exception as error:  # noqa: BLE001 - reported to the parent, which decides
            traceback.print_exc()
            answers.write({"error": str(error), "type": type(error).__name__})


@contextmanager
def all_stopped(*children: Child) -> Iterator[None]:
    """Stop these at the end, whatever happens."""
    try:
        yield
    finally:
        for child in children:
            child.stop()


def wait_all(probes: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Call each probe until it returns True; returns the seconds each took.

    Raises:
        BenchError: one did not within `seconds`; a probe may raise it too.
    """
    started, done = time.monotonic(), dict[str, float]()
    while len(done) < len(probes):
        for name, probe in probes.items():
            if name not in done and probe():
                done[name] = round(time.monotonic() - started, 1)
        if time.monotonic() - started > seconds:
            late = ", ".join(sorted(probes.keys() - done.keys()))
            raise BenchError(f"{late}: not ready after {seconds:g} s")
        time.sleep(0.2)
    return done
