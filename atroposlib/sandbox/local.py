"""The sandbox of this machine: a keeper process in namespaces, which forks a process for each
program. The keeper is ended when it does nothing any more.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, cast

from atroposlib.sandbox.contract import (
    ISOLATIONS,
    End,
    Limits,
    Outcome,
    Program,
    Raised,
    Returned,
    SandboxBroken,
    SandboxUnavailable,
)

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
GRACE_SECONDS = 15.0
"""Beyond a program's own deadline, which its watcher keeps: a busy machine may hold that up. If the
watcher reports nothing until then, the keeper is replaced: one of them has stopped."""
CHUNK = 1 << 16
TRIAL = Path(__file__).with_name("inside") / "isolation_check.py"
HOW = {
    "users": "in namespaces, each program as a user of its own",
    "user_namespace": "in namespaces of this user",
    "restricted": "without namespaces, by Landlock and seccomp: programs have no temporary folder",
}
REMEDY = (
    "allow namespaces (run as root; or sysctl kernel.unprivileged_userns_clone=1 and "
    "kernel.apparmor_restrict_unprivileged_userns=0; a container: --privileged, or --cap-add SYS_ADMIN with "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined)"
)


class LocalSandbox:
    """Runs programs on this machine, several at once.

    Args:
        limits: what each program may use.
        allow_missing: names of `ISOLATIONS` that may be missing; any other that this host cannot
            give is refused.
        at_once: most programs at a time; None for one for each processor.
        readable: paths that programs may read beyond Python's own.

    Raises:
        ValueError: `allow_missing` names no isolation.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        allow_missing: Sequence[str] = (),
        at_once: int | None = None,
        readable: Sequence[str | Path] = (),
    ) -> None:
        if unknown := [name for name in allow_missing if name not in ISOLATIONS]:
            raise ValueError(
                f"{unknown[0]!r} is not an isolation; there are {', '.join(ISOLATIONS)}"
            )
        self.limits = limits or Limits()
        self.allow_missing = tuple(allow_missing)
        self.readable = [str(Path(path).resolve()) for path in readable]
        self.missing: dict[str, str] = {}
        """Isolation -> why it is missing, known after `start`."""
        self.mode = ""
        self._slots = asyncio.Semaphore(at_once or len(os.sched_getaffinity(0)))
        self._starting = asyncio.Lock()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def start(self) -> None:
        """Make the sandbox, and try by a program in it what it withholds.

        Raises:
            SandboxUnavailable: an isolation is missing that was not allowed to.
        """
        async with self._starting:
            if self._keeper is not None and self._keeper.poll() is None:
                return
            first = self._keeper is None
            await self.close()
            report = await self._start_keeper()
            self.mode, self.missing = report["mode"] or "", dict(report["missing"])
            if not self.mode:
                self.missing = {name: "neither namespaces nor Landlock" for name in ISOLATIONS}
            else:
                self.missing = await self._tried() | self.missing
            if refused := {
                name: why
                for name, why in self.missing.items()
                if name not in self.allow_missing or not self.mode
            }:
                await self.close()
                what = "; ".join(
                    f"{ISOLATIONS[name]}: {name} ({why})" for name, why in refused.items()
                )
                tried = "; ".join(f"{mode}: {why}" for mode, why in report["refusals"].items())
                raise SandboxUnavailable(
                    f"this host cannot promise of a program that {what}. {'Refused were ' + tried + '. ' if tried else ''}"
                    f"Remedy: {REMEDY}, or go without {','.join(refused)}",
                    refused,
                )
            if first:
                without = "".join(
                    f"; without {name} ({why}), as allowed" for name, why in self.missing.items()
                )
                logger.info("the sandbox runs programs %s%s", HOW[self.mode], without)

    async def _start_keeper(self) -> dict[str, Any]:
        if sys.platform != "linux":
            raise SandboxUnavailable(f"the sandbox needs Linux, this is {sys.platform}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with tempfile.TemporaryFile() as errors, theirs:
            self._control = ours
            self._keeper = keeper_process(theirs.fileno(), errors)
            theirs.close()
            try:
                ours.send(json.dumps({"readable": self.readable}).encode())
                async with asyncio.timeout(START_SECONDS):
                    report = await asyncio.get_running_loop().sock_recv(ours, CHUNK)
            except (TimeoutError, OSError):
                report = b""
            if not report:
                await self.close()
                errors.seek(0)
                last = errors.read()[-2000:].decode(errors="replace").strip().splitlines()
                raise SandboxUnavailable(
                    f"the sandbox's keeper did not start: {last[-1] if last else 'no reason given'}"
                )
        return cast(dict[str, Any], json.loads(report))

    async def _tried(self) -> dict[str, str]:
        """Try what a program in the sandbox should not be able to do: isolation -> what it could do."""
        with (
            tempfile.NamedTemporaryFile() as secret,
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as named,
        ):
            secret.write(b"secret")
            secret.flush()
            os.fchmod(secret.fileno(), 0o644)
            name = f"\0lockstep-sandbox-{os.getpid()}"
            with contextlib.suppress(OSError):
                named.bind(name)
                named.listen(1)
            call = [secret.name, listener.getsockname()[1], name, os.getpid(), self.limits.disk]
            trial = Program(TRIAL.read_text(encoding="utf-8"), "what_is_open", [call])
            try:
                outcome = await self._run_once(encode(trial), 1)
            except SandboxBroken as error:
                raise SandboxUnavailable(f"the sandbox runs no programs here: {error}") from error
        if not outcome.results or not isinstance(result := outcome.results[0], Returned):
            raise SandboxUnavailable(f"the sandbox could not be tried: {outcome}")
        return {str(name): str(why) for name, why in result.value.items() if name in ISOLATIONS}

    async def run(self, program: Program) -> Outcome:
        """Run one program; more than `at_once` wait for one another.

        Raises:
            SandboxBroken: nothing is known of the program, twice.
            SandboxUnavailable: the sandbox's keeper ended and cannot be started again.
        """
        request = encode(program)
        async with self._slots:
            for attempt in (1, 2):
                await self.start()
                try:
                    return await self._run_once(request, len(program.calls))
                except SandboxBroken as error:
                    if attempt == 2:
                        raise
                    logger.warning("a program could not be run, it is tried again: %s", error)
        raise AssertionError("unreachable: the second attempt returns or raises")

    async def _run_once(self, request: bytes, calls: int) -> Outcome:
        limits, keeper = self.limits, self._keeper
        loop = asyncio.get_running_loop()
        program_file = file_of(request)
        (output, output_end), (errors, errors_end), (results, results_end) = (
            os.pipe2(os.O_CLOEXEC) for _ in range(3)
        )
        status, status_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        status.setblocking(False)
        stopped: list[str] = []

        def stop() -> None:
            stopped.append("output")
            with contextlib.suppress(OSError):
                status.shutdown(socket.SHUT_WR)

        written = Pipe(output, limits.kept_output, limits.output, stop)
        complaints = Pipe(errors, limits.kept_output, limits.output, stop)
        returned = Pipe(results, limits.results, limits.results, stop)
        pipes, given = (
            (written, complaints, returned),
            (program_file, output_end, errors_end, results_end),
        )
        try:
            try:
                await self._order([*given, status_end.fileno()])
            finally:
                for descriptor in given:
                    os.close(descriptor)
                status_end.close()
            for pipe in pipes:
                loop.add_reader(pipe.descriptor, pipe.read)
            try:
                async with asyncio.timeout(limits.seconds + GRACE_SECONDS):
                    message = await loop.sock_recv(status, CHUNK)
            except TimeoutError:
                # Another program may have replaced the keeper before.
                if keeper is not None:
                    await asyncio.to_thread(kill_all, keeper)
                raise SandboxBroken(
                    f"its end was not reported within {GRACE_SECONDS:g} s after its deadline of "
                    f"{limits.seconds:g} s: the sandbox's keeper, or the program's watcher, has "
                    "stopped. Both were killed, and a new keeper is started"
                ) from None
            except OSError as error:
                raise SandboxBroken(f"its watcher cannot be read: {error}") from error
            if not message:
                raise SandboxBroken("its watcher ended without a report")
            report = json.loads(message)
            if "broken" in report:
                raise SandboxBroken(report["broken"])
            # All its processes have ended: what they wrote lies in the pipes.
            for pipe in pipes:
                while pipe.read():
                    pass
        finally:
            status.close()
            for pipe in pipes:
                loop.remove_reader(pipe.descriptor)
                os.close(pipe.descriptor)
        return outcome_of(report, stopped, pipes, calls)

    async def _order(self, descriptors: list[int]) -> None:
        """Hand a program to the keeper."""
        order = {
            name: value
            for name, value in vars(self.limits).items()
            if not name.endswith(("output", "results"))
        }
        message = json.dumps(order).encode()
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                while self._control is not None:
                    try:
                        socket.send_fds(self._control, [message], descriptors)
                        return
                    except BlockingIOError:
                        await asyncio.sleep(0.005)
            raise SandboxBroken("it was closed")
        except (OSError, TimeoutError) as error:
            raise SandboxBroken(
                f"its keeper does not answer ({type(error).__name__}: {error})"
            ) from error

    async def close(self) -> None:
        """End the keeper, and with it all programs that run."""
        keeper, control, self._keeper, self._control = self._keeper, self._control, None, None
        if control is not None:
            control.close()
        if keeper is not None:
            await asyncio.to_thread(await_end, keeper)


def file_of(data: bytes) -> int:
    """A descriptor of a file in memory with that content."""
    descriptor = os.memfd_create("program")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor


class Pipe:
    """A program's output into a pipe: the beginning is kept, all is counted, and beyond the limit
    the program is stopped.

    Args:
        descriptor: the end to read.
        keep: bytes that are kept.
        most: bytes beyond which `too_much` is called, once.
    """

    def __init__(self, descriptor: int, keep: int, most: int, too_much: Callable[[], None]) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor, self.keep, self.most, self.too_much = descriptor, keep, most, too_much
        self.kept = bytearray()
        self.count = 0

    def read(self) -> bool:
        """Read what is there, at most CHUNK bytes. Returns whether there may be more."""
        try:
            data = os.read(self.descriptor, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self.descriptor)
            return False
        self.kept += data[: max(0, self.keep - len(self.kept))]
        before, self.count = self.count, self.count + len(data)
        if before <= self.most < self.count:
            # The pipe fills, and holds the program up until its watcher ends it.
            asyncio.get_running_loop().remove_reader(self.descriptor)
            self.too_much()
        return True


def encode(program: Program) -> bytes:
    """As the program's process reads it.

    Raises:
        TypeError: an argument that JSON cannot hold.
    """
    request = {"code": program.code, "function": program.function, "stdin": program.stdin}
    return json.dumps(
        request | {"calls": [list(arguments) for arguments in program.calls]}
    ).encode()


def outcome_of(
    report: dict[str, Any], stopped: list[str], pipes: tuple[Pipe, Pipe, Pipe], calls: int
) -> Outcome:
    """Put together the watcher's report and the program's output, errors and results."""
    written, complaints, returned = pipes
    results, problem = read_results(bytes(returned.kept), calls)
    return Outcome(
        end=cast(End, "output" if stopped else report["end"]),
        code=report["code"],
        results=results,
        problem=problem,
        output=written.kept.decode(errors="replace"),
        output_bytes=written.count,
        errors=complaints.kept.decode(errors="replace"),
        left=report["left"],
        seconds=report["seconds"],
        cpu_seconds=report["cpu"],
        peak_memory=report["peak"],
    )


def read_results(data: bytes, calls: int) -> tuple[list[Returned | Raised], str | None]:
    """Read the results of a program's calls; it may have written anything at all.

    Returns:
        The results of the first calls, as many as follow one another; and why there are none, if
        the program gives a reason.
    """
    results: list[Returned | Raised] = []
    problem: str | None = None
    for line in data.split(b"\n"):
        if len(results) == calls and problem is not None:
            break
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(entry, dict):
            continue
        if isinstance(entry.get("problem"), str):
            problem = entry["problem"]
        elif entry.get("call") == len(results) < calls:
            if isinstance(entry.get("raised"), str):
                results.append(Raised(entry["raised"]))
            elif "value" in entry:
                results.append(Returned(entry["value"]))
    return results, problem


KEEPER = Path(__file__).with_name("inside") / "__main__.py"
END_SECONDS = 10.0
"""Time for a keeper to end by itself after its owner has closed its socket."""


def keeper_process(control: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a keeper that listens on that descriptor."""
    # Not the virtual environment's Python, which is a link from where programs may not look.
    python = os.path.realpath(sys.executable)
    return subprocess.Popen(
        [python, "-s", "-P", "-S", "-B", str(KEEPER), str(control)],
        # The only variables that it has: two threads need no arenas of 64 MiB each, and sets have
        # the same order in every run.
        env={"MALLOC_ARENA_MAX": "2", "PYTHONHASHSEED": "0"},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=(control,),
        start_new_session=True,
    )


def await_end(keeper: subprocess.Popen[bytes]) -> None:
    """Wait for a keeper whose socket was closed, and kill it with its programs if it does not end
    in time.
    """
    try:
        keeper.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        kill_all(keeper)


def kill_all(keeper: subprocess.Popen[bytes]) -> None:
    """Kill a keeper and every process below it, stopped ones included.

    Without namespaces a program outlives its killed watcher. So all processes are listed before the
    first one is killed.
    """
    if keeper.poll() is not None:
        return
    for pid in [keeper.pid, *processes_below(keeper.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # the kernel ended it with one of those before it
    keeper.wait()


def processes_below(pid: int) -> list[int]:
    """Return the processes that descend from a process, parents before their children."""
    pids = [pid]
    for one in pids:
        try:
            pids += [
                int(child)
                for child in Path(f"/proc/{one}/task/{one}/children")
                .read_text(encoding="ascii")
                .split()
            ]
        except OSError:
            continue  # it ended in the meantime
    return pids[1:]
