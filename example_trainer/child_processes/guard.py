"""Run one command, and end all of its processes with the process that started it.

    python guard.py CONTROL GRACE_SECONDS COMMAND [ARGUMENT...]

The guard stays between the starter of a process (the quick start, a trainer, a test) and that
process. It ends the command, with all that the command started, when the control pipe closes. The
starter closes the pipe to stop the process. The kernel closes it when the starter dies, however it
dies. So `kill -9` takes the very same way as a regular stop. CONTROL is the number of the file
descriptor.

A part of the stack outlives the command that starts it. CONTROL is then the path of a file, and
SIGTERM stops the command. When the command has ended, the file holds {"code", "at"}: the exit status
and the Unix time.

Linux only: the guard makes itself a child subreaper. So even a grandchild that left its session
(vLLM's engine core does) stays below it in the process tree and is found. Standard library only,
because it must start fast and stay small.

Exit status: the command's own; 128 + n if signal n ended it; 127 if it could not be started.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

if not __package__:  # run by path: import from the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from example_trainer.child_processes.files import cannot_write, write_whole

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NUM_THREADS = 15
"""Place of num_threads behind the parent's id in /proc/PID/stat."""
LEFTOVER_SECONDS = 3.0
"""Time between SIGTERM and SIGKILL for the processes that the command left behind."""
KILL_SECONDS = 10.0
"""Limit for a killed process to vanish. After it the guard gives the process up, with an error line."""
ENDING_BYTES = 128
EXIT_SUFFIX = ".exit"
"""Suffix of the file that has the end of a part of the stack."""


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process (prctl(2)).

    Raises:
        OSError: the kernel refused it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def parents() -> dict[int, int]:
    """The parent of every living process on this machine, by process id; zombies left out.

    A killed process is a zombie while its other threads still end. Until then it holds its ports
    and memory, so it counts as living.
    """
    parent_of: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we were looking
        # The second field is the command's name in brackets and may itself hold spaces and
        # brackets.
        state, parent, *others = stat.rpartition(")")[2].split()
        if state not in ("Z", "X") or int(others[NUM_THREADS]) > 1:
            parent_of[int(entry)] = int(parent)
    return parent_of


def descendants(root: int) -> list[int]:
    """Every living process below `root`, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    below: list[int] = []
    level = [root]
    while level:
        level = [child for pid in level for child in children.get(pid, [])]
        below += level
    return below


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process that may have ended in the meantime."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def exit_status(code: int) -> int:
    """Return an exit status as shells give it: 128 + n for signal n, which Python gives as -n."""
    return code if code >= 0 else 128 - code


class Guard:
    """One command and everything that it starts.

    Args:
        command: the program, looked up on PATH, and its arguments.
        control: read end of the control pipe; nothing is ever written to it.
        grace: seconds that the command has to end by itself after SIGTERM.
    """

    def __init__(self, command: list[str], control: int, grace: float) -> None:
        self.command, self.control, self.grace = command, control, grace
        self.status: int | None = None
        self.wake, self.wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.wake_end, warn_on_full_buffer=False)
        self.asked_to_stop = False
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self.on_stop_signal)
        signal.signal(
            signal.SIGCHLD, lambda *_: None
        )  # only so that the wake-up pipe is written to
        self.child = self.spawn()

    def on_stop_signal(self, *_: object) -> None:
        self.asked_to_stop = True

    def spawn(self) -> int:
        """Start the command in a process group of its own; returns its process id."""
        guard = os.getpid()
        # Held back until the child answers to signals as the command will. A SIGTERM that came
        # while it still had this process's handlers would be swallowed. The command would then run
        # on until the grace period is over.
        stop_signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals)
            return pid
        try:
            signal.set_wakeup_fd(-1)
            for number in (*stop_signals, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals)
            os.setpgid(0, 0)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os._exit(128 + signal.SIGKILL)  # the guard died before the line above took effect
            self.become()
        except OSError as error:
            print(f"guard: cannot start {self.command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(127)

    def become(self) -> None:
        """Turn the child into the command.

        Raises:
            OSError: it cannot be started.
        """
        os.execvp(self.command[0], self.command)

    def reap(self) -> None:
        """Collect every process that ended, the command's own status among them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.status = exit_status(os.waitstatus_to_exitcode(status))

    def pause(self) -> bool:
        """Wait until something happens; True if it is that the control pipe closed."""
        ready, _, _ = select.select([self.control, self.wake], [], [])
        if self.wake in ready:
            self.drain()
        return self.control in ready

    def run(self) -> int:
        """Wait for the command to end or for the pipe to close; returns the exit status for the
        guard itself.
        """
        while self.status is None and not self.asked_to_stop:
            if self.pause():
                break
        if self.status is None:
            send(self.child, signal.SIGTERM)
            send(self.child, signal.SIGCONT)  # a stopped process gets no signal before
            self.wait_for(lambda: self.status is not None, self.grace)
        self.sweep()
        if self.status is None:
            return 128 + signal.SIGKILL
        return self.status

    def wait_for(self, done: Callable[[], bool], seconds: float) -> bool:
        """Reap until `done()`; False if that took longer than so many seconds."""
        deadline = time.monotonic() + seconds
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            # Not the control pipe: it may be closed by now, and select would return at once.
            select.select([self.wake], [], [], min(left, 0.1))
            self.drain()
        return True

    def drain(self) -> None:
        """Empty the wake-up pipe and collect what ended."""
        with contextlib.suppress(BlockingIOError):  # empty if select timed out
            os.read(self.wake, 4096)
        self.reap()

    def sweep(self) -> None:
        """End whatever is left below this process: politely if the command itself ended in time,
        else by force.
        """
        me = os.getpid()
        if self.status is not None:
            for pid in descendants(me):
                send(pid, signal.SIGTERM)
            if self.wait_for(lambda: not descendants(me), LEFTOVER_SECONDS):
                return
        deadline = time.monotonic() + KILL_SECONDS
        while left := descendants(me):
            for (
                pid
            ) in left:  # again each time round: a process may have forked while it was being killed
                send(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                print(
                    f"guard: processes {left} did not end {KILL_SECONDS:.0f} s after SIGKILL",
                    file=sys.stderr,
                    flush=True,
                )
                return
            select.select([self.wake], [], [], 0.05)
            self.drain()


class Ending:
    """The file with the command's end.

    Its space is taken at the start, since the disk may be full at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._draft, self._file = path, path.with_suffix(".draft"), -1
        try:
            self._file = os.open(
                self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666
            )
            os.write(self._file, b" " * ENDING_BYTES)
        except OSError as error:
            print(
                f"guard: {cannot_write(path, error, ENDING_BYTES)}; make room there",
                file=sys.stderr,
                flush=True,
            )

    def write(self, code: int) -> None:
        """Write the exit status and the present time."""
        content = json.dumps({"code": code, "at": time.time()}).encode().ljust(ENDING_BYTES)
        try:
            # The folder may have been removed, and made again without the draft.
            if self._file < 0 or not self._draft.exists():
                write_whole(self._path, content)
            else:
                os.pwrite(self._file, content, 0)
                self._draft.replace(self._path)
        except OSError as error:
            reason = cannot_write(self._path, error, ENDING_BYTES)
            print(
                f"guard: {reason}; the command's exit status was {code}",
                file=sys.stderr,
                flush=True,
            )


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    control, grace, command = arguments[0], float(arguments[1]), arguments[2:]
    if control.isdigit():
        os.set_inheritable(int(control), False)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        return Guard(command, int(control), grace).run()
    ending = Ending(Path(control))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    never_closed, _held_open = os.pipe()
    code = Guard(command, never_closed, grace).run()
    ending.write(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
