"""The keeper: it makes the sandbox once, and forks a process for each program, so that Python
starts only once.

The watcher is the first process of a program, and process 1 of a process-id namespace. When it
ends, the kernel ends all other processes of the namespace. Without namespaces, the watcher inherits
the orphans and ends them.

The watcher adds up the memory of the program's processes from `/proc`. The filter refuses memory
that belongs to no process, see `isolation`. docs/sandbox.md lists the rest, with its bounds.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

from . import isolation
from .program import Order, become_program

COUNTED = (b"VmRSS", b"VmSwap", b"VmPTE")
"""Lines of a `status` file. Page tables count: one byte in each GiB of addresses costs 8 KiB of
them, and next to no resident memory. Swapped pages count, since a program can have its own pages
swapped out."""
RECORD_BYTES = 256
"""The kernel's record of one mapping. A process can have as many mappings as it has pages of
addresses; no file that is cheap to read counts them."""
LONGEST_LOCKS = 1 << 20
"""Bytes of the list of file locks that are read: about 18,000 locks, the host's included."""
TRIES = 20
"""Attempts to read the memory of a process whose threads come and go."""


class Memory:
    """The memory of all processes below this one.

    Args:
        proc: a descriptor of a folder `/proc`, which this object keeps open.
        own: the folder shows the processes of this process's own namespace and no others.
        own_network: all sockets of the network namespace are the program's.
    """

    def __init__(self, proc: int, own: bool, own_network: bool) -> None:
        self._proc, self._own = proc, own
        self._socket_bytes = most_of_a_socket() if own_network else 0

    def used(self) -> int:
        """Return the bytes in use now. Pages that several processes share count once for each of
        them.

        The records of mappings are left out for the largest process. A program of one process near
        its limit gets a `MemoryError`, and is not ended.
        """
        processes = [self._of_process(name) for name in self.names()]
        records = [most for _, most in processes]
        return (
            sum(size for size, _ in processes)
            + sum(records)
            - max(records, default=0)
            + self._sockets()
        )

    def tasks(self) -> int:
        """Return the number of processes and threads."""
        return sum(len(self._tasks(name)) for name in self.names())

    def locks(self) -> int:
        """Return the number of file locks.

        The kernel keeps a record of each, and no limit of a process counts them.
        """
        names = {name.encode() for name in self.names()}
        # For example: 1: POSIX  ADVISORY  WRITE 708 08:02:4711 0 EOF. A lock that waits has `->`
        # after its number.
        fields = [
            line.replace(b"-> ", b"").split()
            for line in self._read("locks", LONGEST_LOCKS).splitlines()
        ]
        return sum(len(line) > 4 and line[4] in names for line in fields)

    def names(self) -> list[str]:
        """Return the ids of the processes."""
        return self._namespace() if self._own else self._descendants()

    def _sockets(self) -> int:
        """Return the bytes that the sockets may hold. Each counts as full: the kernel does not
        report the content of a socket whose sending end is closed.
        """
        if not self._socket_bytes:
            return 0
        first = self._read("self/net/sockstat").split(b"\n", 1)[0]  # sockets: used 2
        return int(first.split()[2]) * self._socket_bytes if first else 0

    def _namespace(self) -> list[str]:
        """Process 1 is this one."""
        return [name for name in os.listdir(self._proc) if name.isdigit() and name != "1"]

    def _descendants(self) -> list[str]:
        """Processes whose parents ended are children of this one, which adopts them."""
        names = [os.readlink("self", dir_fd=self._proc)]
        for name in names:
            for task in self._tasks(name):
                names += self._read(f"{name}/task/{task}/children").decode().split()
        return names[1:]

    def _of_process(self, name: str) -> tuple[int, int]:
        counted = bytes_of(self._read(f"{name}/status"))
        if counted is not None:
            return counted
        # The first thread of a process can end before the others. It has no memory then, and the
        # others still do.
        for _ in range(TRIES):
            tasks = self._tasks(name)
            if len(tasks) < 2:
                break
            for task in tasks:
                counted = bytes_of(self._read(f"{name}/task/{task}/status"))
                if counted is not None:
                    return counted
        return 0, 0

    def _tasks(self, name: str) -> list[str]:
        with contextlib.suppress(OSError):  # the process ended in between
            folder = os.open(
                f"{name}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc
            )
            try:
                return os.listdir(folder)
            finally:
                os.close(folder)
        return []

    def _read(self, path: str, most: int = 1 << 16) -> bytes:
        """Return the beginning of a file, empty if there is none."""
        data = b""
        with contextlib.suppress(OSError):  # the process ended in between
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
            try:
                # The kernel gives a page at a time.
                while len(data) < most and (more := os.read(descriptor, most)):
                    data += more
            finally:
                os.close(descriptor)
        return data


def most_of_a_socket() -> int:
    """Return the bytes that one socket can hold: a last message may be as large as the buffer that
    it overfills.
    """
    one, other = socket.socketpair()
    with one, other:
        return 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def bytes_of(status: bytes) -> tuple[int, int] | None:
    """Read a `status` file.

    Returns:
        The bytes that it counts, and the most that the records of its mappings can have. None for a
        thread that ended, which has no memory any more.
    """
    sizes = {
        line.partition(b":")[0]: line.split()[1]
        for line in status.splitlines()
        if line.startswith(b"Vm")
    }
    if not sizes:
        return None
    counted = sum(int(sizes.get(name, 0)) for name in COUNTED) * 1024
    return counted, int(sizes.get(b"VmSize", 0)) * 1024 // resource.getpagesize() * RECORD_BYTES


MODES = ("users", "user_namespace", "restricted")
"""Ways to hold programs, the best first: namespaces made by root, each program with a user id of
its own. Next come namespaces in a user namespace, which ordinary users may make. The last way is
without namespaces, by Landlock and seccomp.
"""
LOOK_SECONDS = 0.01
"""Seconds between two sums of the memory of a program's processes."""
LOCKS_SECONDS = 1.0
"""Seconds between two counts of file locks. Reading the list stops all processes of the host that lock a
file, for a moment."""
MOST_LOCKS = 1000
STARTED_ELSEWHERE = 256
"""Processes and threads that the user may start elsewhere while a program without namespaces runs.
The kernel refuses the program one only above its limit and these, so the watcher counts."""
TOP_MESSAGE = 1 << 16
PRELOADED = (
    *(
        "bisect",
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "datetime",
        "decimal",
        "enum",
        "fractions",
        "functools",
    ),
    *(
        "heapq",
        "itertools",
        "json",
        "math",
        "operator",
        "random",
        "re",
        "statistics",
        "string",
        "typing",
    ),
)
"""Modules that programs often import: they are there already."""


def enter(mode: str, readable: list[str], held: list[int]) -> None:
    """Leave what the host shows, for good.

    Args:
        mode: one of MODES.
        readable: paths that programs may read.
        held: descriptors that a process which only waits must not hold open.

    Raises:
        OSError: the host does not allow a step; the message names it.
    """
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w", encoding="ascii") as file,
    ):
        file.write("1000")  # when the machine runs out of memory, it is these processes that end
    if mode == "restricted":
        os.chdir("/")
        return
    if mode == "users":
        isolation.unshare(isolation.NAMESPACES)
    else:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(*[isolation.NOBODY] * 3)
            os.setresuid(*[isolation.NOBODY] * 3)
        user, group = os.geteuid(), os.getegid()
        isolation.unshare(isolation.CLONE_NEWUSER | isolation.NAMESPACES)
        isolation.map_one_user(user, group)
    first = os.fork()
    if first:
        for descriptor in held:
            os.close(descriptor)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    isolation.build_root(readable)


def missing(mode: str) -> dict[str, str]:
    """Return the isolations that this host lacks, with the reason.

    A program tries the others afterwards.
    """
    wrong = {}
    machine = os.uname().machine
    without_filter = ""
    if machine not in isolation.AUDIT_ARCH:
        without_filter = f"no seccomp table for {machine}"
        wrong["syscalls"] = without_filter
    if mode == "restricted":
        try:
            isolation.landlock_rules(isolation.landlock_version(), [])
        except OSError as error:
            wrong["files"] = wrong["disk"] = str(error.strerror)
        if without_filter:
            wrong |= dict.fromkeys(("processes", "network"), without_filter)
    return wrong


def keep(control: socket.socket, mode: str, readable: list[str], users: tuple[int, int]) -> None:
    """Answer orders until the other end is closed. An order is the limits as JSON, with five
    descriptors. They are the code to run, its output, its errors, its results, and a socket to its
    watcher. Each program is the next of the users, first id and number of ids, if this process is
    root. The first program's user is drawn at random.
    """
    for name in PRELOADED:
        importlib.import_module(name)

    gc.collect()
    gc.freeze()
    gc.disable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    namespaces = isolation.NAMESPACES | (isolation.CLONE_NEWUSER if mode == "user_namespace" else 0)
    count = int.from_bytes(os.urandom(8)) % users[1]
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, TOP_MESSAGE, 8)
        if not data:
            os._exit(0)
        order = json.loads(data) | {"user": users[0] + count % users[1]}
        count += 1
        # A failing fork closes the watcher's socket: the sandbox then reports a failed run.
        with contextlib.suppress(OSError):
            if (os.fork() if mode == "restricted" else isolation.fork_into(namespaces)) == 0:
                control.close()
                begin(order, mode, readable, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def begin(order: Order, mode: str, readable: list[str], descriptors: list[int]) -> None:
    """Be a program's watcher, in its namespaces. Never returns."""
    status = socket.socket(fileno=descriptors.pop())
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if mode == "user_namespace":
            isolation.map_one_user(0, 0, inside=isolation.NOBODY)
        report = watch(order, mode, readable, tuple(descriptors), status)
    except BaseException as error:  # noqa: BLE001 (the sandbox raises it)
        report = {"broken": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):
        status.send(json.dumps(report).encode())
    os._exit(0)


def memory_of(order: Order, mode: str) -> Memory:
    """Make this process the first of the program's, and return what adds up their memory."""
    if mode == "restricted":
        isolation.prctl(isolation.PR_SET_CHILD_SUBREAPER, 1)
        return Memory(
            os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
            own=False,
            own_network=False,
        )
    options = f"size={order['disk']},nr_inodes={order['files']},mode=1777"
    isolation.mount(
        "tmp",
        "/tmp",
        "tmpfs",
        isolation.MS_NOSUID | isolation.MS_NODEV | isolation.MS_NOEXEC,
        options,
    )
    os.chdir("/tmp")
    return Memory(*hide_processes(), own_network=True)


def watch(
    order: Order,
    mode: str,
    readable: list[str],
    descriptors: tuple[int, ...],
    status: socket.socket,
) -> Any:
    """Be the program's first process: see that it keeps to its time and memory, and end all that it
    started.

    Returns:
        The cause of its end, as `atroposlib.sandbox.local` reads it.
    """
    memory = memory_of(order, mode)
    isolation.prctl(isolation.PR_SET_DUMPABLE, 0)
    began = time.monotonic()
    others = counted_along(mode)
    child = os.fork()
    if child == 0:
        status.close()
        become_program(order, mode, readable, descriptors, others)
    for descriptor in descriptors:
        os.close(descriptor)
    most_tasks = order["processes"] if others > 1 else None
    end, peak = wait(order, child, memory, status, began, most_tasks)
    seconds = time.monotonic() - began
    code, left = end_all(child, memory, mode)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = usage.ru_utime + usage.ru_stime
    if end == "exited" and code < 0:
        end = "signal"
        if -code == signal.SIGXCPU or (
            -code == signal.SIGKILL and cpu > 0.5 * order["cpu_seconds"]
        ):
            end = "cpu"
    return {
        "end": end,
        "code": code,
        "left": left,
        "seconds": seconds,
        "cpu": cpu,
        "peak": max(peak, usage.ru_maxrss * 1024),
    }


def hide_processes() -> tuple[int, bool]:
    """Cover /proc for the program.

    Returns:
        A descriptor of a /proc to add up memory by, and whether it shows this namespace's processes
        alone. Where the host allows no /proc of its own here, it is the host's.
    """
    own = True
    try:
        isolation.mount(
            "proc", "/proc", "proc", isolation.MS_NOSUID | isolation.MS_NODEV | isolation.MS_NOEXEC
        )
    except OSError:
        own = False
    descriptor = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    isolation.mount(
        "none",
        "/proc",
        "tmpfs",
        isolation.MS_RDONLY | isolation.MS_NOSUID | isolation.MS_NODEV,
        "size=4k,nr_inodes=2,mode=555",
    )
    return descriptor, own


def counted_along(mode: str) -> int:
    """Return how many tasks the kernel may count along with the program's.

    The kernel counts by user. If the watcher has the same user, it counts too. Without namespaces
    all tasks of this user on the host count, also later ones.
    """
    if os.geteuid() == 0:
        return 0
    return 1 if mode == "user_namespace" else tasks_of_this_user() + STARTED_ELSEWHERE


def tasks_of_this_user() -> int:
    """Return the number of threads of this user on the whole host."""
    count, user = 0, os.geteuid()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def wait(
    order: Order,
    child: int,
    memory: Memory,
    status: socket.socket,
    began: float,
    most_tasks: int | None,
) -> tuple[str, int]:
    """Wait until a program ends or must end. Return the reason and its peak memory in bytes.

    Args:
        most_tasks: processes and threads above which the program is ended; None where the kernel
            refuses them.
    """
    poll = select.poll()
    poll.register(os.pidfd_open(child), select.POLLIN)
    poll.register(status, select.POLLIN)
    peak, count_locks_at = 0, began + LOCKS_SECONDS
    while True:
        left = order["seconds"] - (time.monotonic() - began)
        if left <= 0:
            return "deadline", peak
        events = poll.poll(min(left, LOOK_SECONDS) * 1000 + 1)
        for descriptor, _ in events:
            # The sandbox closes the socket to end a program, and sends nothing else.
            return "cancelled" if descriptor == status.fileno() else "exited", peak
        peak = max(peak, memory.used())
        # Processes come first: if this look is late, too many of them use too much memory as well.
        if most_tasks is not None and memory.tasks() > most_tasks:
            return "processes", peak
        if peak > order["memory"]:
            return "memory", peak
        if time.monotonic() >= count_locks_at:
            if memory.locks() > MOST_LOCKS:
                return "memory", peak
            count_locks_at = time.monotonic() + LOCKS_SECONDS


def stop_all(memory: Memory) -> list[int]:
    """Stop all processes of the program. A stopped process starts no other, and keeps its place in
    the limit of processes.

    Returns:
        The processes.
    """
    stopped: list[int] = []
    while new := {int(name) for name in memory.names()}.difference(stopped):
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped += new
    return stopped


def end_all(child: int, memory: Memory, mode: str) -> tuple[int, int]:
    """Kill what is left of the program.

    Returns its exit status, negative for a signal, and how many processes were left.
    """
    code = 0
    ended: set[int] = set()

    def reap(flags: int) -> None:
        nonlocal code
        while True:
            pid, status = os.waitpid(-1, flags)
            if pid == 0:
                return
            ended.add(pid)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)

    by_itself: set[int] = {child}
    with contextlib.suppress(ChildProcessError):
        reap(os.WNOHANG)
        by_itself |= ended
        while True:
            with contextlib.suppress(ProcessLookupError):
                if mode == "restricted":
                    # Children of a killed process become children of this one, which waits for
                    # them.
                    for pid in stop_all(memory):
                        os.kill(pid, signal.SIGKILL)
                else:
                    os.kill(-1, signal.SIGKILL)
            reap(os.WNOHANG if mode == "restricted" else 0)
            time.sleep(0.001)
    return code, len(ended - by_itself)


def main() -> None:
    """Make the best sandbox that this host allows, and keep it."""
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(control.recv(TOP_MESSAGE))
    readable = isolation.outermost([*isolation.python_files(), *settings["readable"]])
    refusals: dict[str, str] = {}
    for mode in MODES:
        if mode == "users" and os.geteuid() != 0:
            continue
        error_end, error_write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(error_end)
            try:
                enter(mode, readable, [error_write_end, control.fileno()])
                users = (0, 1)
                if os.geteuid() == 0 and mode != "user_namespace":
                    users = isolation.mapped_users()
                report = {"mode": mode, "missing": missing(mode), "refusals": refusals}
                os.close(error_write_end)
                control.send(json.dumps(report).encode())
                keep(control, mode, readable, users)
            except BaseException as error:  # noqa: BLE001 (the parent tries the next mode)
                os.write(error_write_end, f"{error}".encode()[:4000] or b"unknown")
            os._exit(1)
        os.close(error_write_end)
        with open(error_end, encoding="utf-8", errors="replace") as file:
            wrong = file.read()
        if not wrong:
            control.close()
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
        os.waitpid(child, 0)
        refusals[mode] = wrong
    control.send(json.dumps({"mode": None, "missing": {}, "refusals": refusals}).encode())
