"""Start the ranks of one job on this machine, and end with all of them: what a program does where
torchrun did not start it.

The program that the user typed becomes the launcher. Each rank is the same command in a process of
its own, with the variables RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE that torchrun would
set. MASTER_ADDR and MASTER_PORT stay as the user set them, for the weight bridge. The ranks meet at
a store of the launcher, which outlives them; `STORE_VARIABLE` names its address.

torchrun itself is not used here: it ends every failure with status 1 and a traceback, and gives
ranks that save a checkpoint 30 s.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from example_trainer.child_processes.guard import exit_status
from example_trainer.child_processes.processes import describe_exit
from example_trainer.errors import ConfigError
from example_trainer.parallel.launched import LAUNCHER_VARIABLE
from example_trainer.process import StopRequested, StopSignal

# The variables that describe the ranks of a job to a process. They have the program that started
# it, its rank, and the place where the ranks meet.

LOOPBACK = "127.0.0.1"
STORE_VARIABLE = "LOCKSTEP_RANK_STORE"
"""Names host:port of the store of `launch.py`, at which its ranks meet. torchrun's ranks meet at
MASTER_ADDR:MASTER_PORT.
"""


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher started this process as a rank, possibly as the only one. torchrun
    and `launch.py` set LOCAL_RANK.
    """
    return "LOCAL_RANK" in environment or environment.get("WORLD_SIZE", "1") != "1"


def place_of(environment: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Rank, world size and local rank that the launcher gave this process; None for a trainer of
    one process.

    Raises:
        ConfigError: some of the variables are missing or not numbers.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    values = [environment.get(name, "") for name in names]
    if not all(value.isdigit() for value in values):
        shown = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
        raise ConfigError(
            f"{shown}: a launcher such as torchrun sets all three; unset them to start the trainer without one"
        )
    rank, world_size, local_rank = map(int, values)
    return rank, world_size, local_rank


def meeting_place(environment: Mapping[str, str]) -> str:
    """host:port of the store at which the ranks meet."""
    return (
        environment.get(STORE_VARIABLE)
        or f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
    )


def meeting_host(environment: Mapping[str, str]) -> str:
    """Return the host of the store at which the ranks meet."""
    if STORE_VARIABLE in environment:
        return environment[STORE_VARIABLE].rpartition(":")[0]
    return environment.get("MASTER_ADDR", LOOPBACK)


def meeting_store(environment: Mapping[str, str], limit: timedelta) -> dist.Store:
    """The store at which the ranks meet: the launcher's, or torchrun's.

    Raises:
        RuntimeError: the store cannot be reached in time.
        ValueError: torchrun's variables are incomplete.
    """
    if STORE_VARIABLE not in environment:
        store, _, _ = next(rendezvous("env://", timeout=limit))
        return store
    host, _, port = environment[STORE_VARIABLE].rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=limit, wait_for_workers=False)


logger = logging.getLogger(__name__)

STOP_SECONDS = 600.0
"""Seconds that ranks have after SIGTERM or SIGINT. They save a checkpoint in this time, which may
be large.
"""
OTHERS_SECONDS = 120.0
"""Seconds that ranks have after another rank ended with an error. They may still save what was
learned.
"""
KILLED_SECONDS = 30.0
"""Seconds that ranks have after another rank was killed. On GPUs they may wait for that rank inside
a kernel, for ever.
"""
END_SECONDS = 30.0
"""Seconds that a rank has after SIGKILL. A process that waits inside a driver does not end."""
_POLL_SECONDS = 0.1


class RankProcesses:
    """The ranks of one job. Use as a context manager: leaving it kills what still runs.

    Args:
        command: program and arguments of every rank.
        count: number of ranks.
        environment: variables that every rank gets; the launcher's own if not given.
    """

    def __init__(
        self, command: Sequence[str], count: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self.count = count
        self.ended: list[tuple[int, int]] = []
        """(rank, exit status) in the order in which ranks ended; 128 + n for signal n."""
        self._store = loopback_store()
        base = dict(os.environ if environment is None else environment)
        base.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(count):
            self._running[rank] = start_rank(
                command, base | rank_variables(rank, count, self._store.port)
            )
        self._caught: dict[int, set[int]] = {rank: set() for rank in range(count)}

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        for rank, process in self._running.items():
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                logger.error(
                    "rank %d (process %d) did not end %g s after SIGKILL: it waits inside a driver; see nvidia-smi and dmesg",
                    rank, process.pid, END_SECONDS,
                )  # fmt: skip

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return sorted(self._running)

    def poll(self) -> None:
        """Take note of ranks that have ended, and of the signals for which the others have
        handlers.
        """
        for rank, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[rank]
                self.ended.append((rank, exit_status(code)))
            else:
                self._caught[rank] |= caught_signals(process.pid)

    def signal(self, number: int) -> None:
        """Send a signal to every rank that still runs."""
        for process in self._running.values():
            process.send_signal(number)

    def forward(self, number: int) -> None:
        """Send a signal that the launcher received to the ranks that have not received it
        themselves.

        A service manager or `pkill` may signal every process of the job. A rank drops its handler
        after the first signal, so that a second one ends it at once, without a checkpoint. Such a
        rank is recognised by the missing handler.
        """
        for rank, process in self._running.items():
            if number not in self._caught[rank] or number in caught_signals(process.pid):
                process.send_signal(number)


def loopback_store() -> dist.TCPStore:
    """Open a store for ranks on this machine. By itself, TCPStore would listen on every address."""
    # The port is chosen by the kernel and stays open, so that no other program can take it in
    # between.
    with socket.socket() as listening:
        listening.bind((LOOPBACK, 0))
        listening.listen()
        port = listening.getsockname()[1]
        return dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def rank_variables(rank: int, count: int, port: int) -> dict[str, str]:
    """The variables by which a process knows that it is a rank, and where the ranks meet."""
    number, size = str(rank), str(count)
    return {
        "RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
        STORE_VARIABLE: f"{LOOPBACK}:{port}", LAUNCHER_VARIABLE: str(os.getpid()),
    }  # fmt: skip


def start_rank(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start one rank, which writes where the launcher writes."""
    # A process group of its own: Ctrl-C reaches the launcher alone, which forwards it once.
    return subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.DEVNULL, process_group=0
    )


def caught_signals(pid: int) -> set[int]:
    """Signals for which a process has handlers; empty if it has ended or the kernel does not list
    them.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return set()
    mask = next(
        (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")), 0
    )
    return {number for number in (signal.SIGTERM, signal.SIGINT) if mask & 1 << number - 1}


def launch(command: Sequence[str], count: int, stop: StopSignal) -> int:
    """Run `count` ranks of a command until all have ended.

    Args:
        command: program and arguments of every rank.
        count: number of ranks.
        stop: signals to this process. The ranks get them too. A second one ends this process and
            all ranks at once.

    Returns:
        0 if every rank succeeded; 128 + n if the ranks stopped because of signal n; otherwise the
        status of the first rank that failed.
    """
    stop.hold()
    with RankProcesses(command, count) as ranks:
        requested, deadline = 0, float("inf")
        while ranks.running:
            try:
                if requested:
                    time.sleep(_POLL_SECONDS)
                else:
                    stop.wait(_POLL_SECONDS)
            except StopRequested as request:
                requested = request.number
                ranks.poll()
                ranks.forward(requested)
                deadline = time.monotonic() + STOP_SECONDS
            before = len(ranks.ended)
            ranks.poll()
            for rank, code in ranks.ended[before:]:
                deadline = min(deadline, time.monotonic() + _patience(rank, code, count))
            if ranks.running and time.monotonic() > deadline:
                logger.error("%s did not end in time: killing", _named(ranks.running))
                break
        status = _status(ranks.ended, requested)
        if ranks.running:
            return status or 128 + signal.SIGKILL
        return status


def _patience(rank: int, code: int, count: int) -> float:
    """Seconds that the other ranks have after one ended."""
    if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        return STOP_SECONDS  # all ranks stop together, and rank 0 saves
    if code <= 128:
        return OTHERS_SECONDS  # the rank has logged its reason
    logger.error(
        "rank %d of %d %s; the others cannot go on without it", rank, count, describe_exit(code)
    )
    return KILLED_SECONDS


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _status(ended: Sequence[tuple[int, int]], requested: int) -> int:
    failed = [code for _, code in ended if code]
    if not failed:
        return 0
    return next(
        (code for code in failed if not requested or code != 128 + requested), 128 + requested
    )
