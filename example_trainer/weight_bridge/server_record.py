"""Records of the vLLM servers that trainers of this user have started on this machine, one file for
each port.

A trainer that was killed leaves a server behind that its guard is still ending. The next trainer
finds the record, and so knows that the server is not a foreign one.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from example_trainer.child_processes.files import open_own_folder
from example_trainer.child_processes.guard import descendants, send
from example_trainer.errors import BridgeError
from vllm_patching.protocol.messages import Writer, process_here, this_process

logger = logging.getLogger(__name__)

_PROC = Path("/proc")
_SESSION = 3
"""Index of the session id among the fields of /proc/PID/stat that follow the command's name."""
DYING_SECONDS = 5.0
"""A trainer that was just killed is still alive for a moment. One that is alive for longer keeps
its port."""
KILL_SECONDS = 10.0
"""Seconds for killed processes to vanish."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class ServerRecord:
    """One server.

    Attributes:
        trainer: the process that started it.
        guard: its guard, which leads the session of all its processes.
        log: path of its log.
    """

    trainer: Writer
    guard: Writer
    log: str

    def processes(self) -> list[int]:
        """Process ids of the server's session, and their descendants, that are still alive.

        The kernel does not reuse the guard's id while a process of its session is alive. If another
        process has the id now, nothing is left of the session.
        """
        now = process_here(self.guard.pid)
        if now.started not in (0, self.guard.started):
            return []
        running = [int(entry) for entry in os.listdir(_PROC) if entry.isdigit()]
        session = [pid for pid in running if _session(pid) == self.guard.pid]
        return sorted({*session, *(child for pid in session for child in descendants(pid))})


def record_file(port: int, folder: Path | None = None) -> Path:
    """The record of the server at a port."""
    folder = folder or Path(tempfile.gettempdir()) / f"lockstep-servers-{os.getuid()}"
    return folder / f"{port}.json"


def write_record(port: int, guard_pid: int, log: Path, folder: Path | None = None) -> None:
    """Record a server that this process has started.

    Raises:
        OSError: the record cannot be written.
    """
    file = record_file(port, folder)
    directory = open_own_folder(file.parent)
    record = {
        "trainer": this_process().to_json(),
        "guard": process_here(guard_pid).to_json(),
        "log": str(log),
    }
    draft = f"{port}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=directory)
        with os.fdopen(
            os.open(draft, flags, 0o600, dir_fd=directory), "w", encoding="utf-8"
        ) as opened:
            json.dump(record, opened)
        os.replace(draft, file.name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with suppress(OSError):
            os.unlink(draft, dir_fd=directory)
        raise
    finally:
        os.close(directory)


def read_record(port: int, folder: Path | None = None) -> ServerRecord | None:
    """The record of the server at a port; None if this user's trainers have started none there on
    this machine.
    """
    file = record_file(port, folder)
    try:
        if file.lstat().st_uid != os.getuid():  # of a link itself: another user may have made it
            return None
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        record = ServerRecord(
            Writer.from_json(found["trainer"]), Writer.from_json(found["guard"]), str(found["log"])
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning(
            "[Bridge] %s cannot be read and is ignored (%s: %s)", file, type(error).__name__, error
        )
        return None
    return record if record.trainer.host == os.uname().nodename else None


def remove_record(port: int, folder: Path | None = None) -> None:
    """Forget the server at a port, if this process has started it or the trainer that did has
    ended.
    """
    record = read_record(port, folder)
    if record is not None and (record.trainer == this_process() or record.trainer.has_ended()):
        record_file(port, folder).unlink(missing_ok=True)


def end_left_over_server(
    port: int, grace: float, pause: Callable[[float], None], folder: Path | None = None
) -> None:
    """Wait for the end of a server whose trainer was killed, and kill what is left of it after the
    grace period.

    Args:
        port: where the server listens.
        grace: seconds that the server's guard may take.
        pause: sleeps, and may raise to end the waiting.

    Raises:
        BridgeError: the trainer that started the server is alive, or the server's processes cannot
            be killed.
    """
    record = read_record(port, folder)
    if record is None or record.trainer == this_process():
        return
    if not _until(record.trainer.has_ended, DYING_SECONDS, pause):
        raise BridgeError(
            f"--vllm-port {port} belongs to another trainer that is alive (process {record.trainer.pid}, its vLLM's log is "
            f"{record.log}): stop that trainer, or give this one another --vllm-port"
        )
    left = record.processes()
    if left:
        logger.info(
            "[Bridge] Waiting for the vLLM server of an earlier trainer to end (processes %s)", left
        )
    if not _until(lambda: not record.processes(), grace, pause):
        left = record.processes()
        logger.warning(
            "[Bridge] Killing the vLLM server of an earlier trainer, alive after %g s: %s",
            grace,
            left,
        )
        for pid in left:
            send(pid, signal.SIGKILL)
        if not _until(lambda: not record.processes(), KILL_SECONDS, pause):
            raise BridgeError(
                f"processes {record.processes()} of an earlier trainer's vLLM server are alive {KILL_SECONDS:g} s after "
                "SIGKILL: see `ps -o pid,stat,wchan,args`, or give another --vllm-port"
            )
    remove_record(port, folder)


def _until(done: Callable[[], bool], seconds: float, pause: Callable[[float], None]) -> bool:
    """Wait for something; False if it is not so after this many seconds."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        pause(_POLL_SECONDS)
    return True


def _session(pid: int) -> int | None:
    """The session of a process; None if it has ended or is a zombie."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if not fields or fields[0] in "ZX" else int(fields[_SESSION])
