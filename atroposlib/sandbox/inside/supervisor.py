"""The keeper: makes the sandbox once, then a process for each program, forked so that no Python has
to start.

Of a program's processes the first, its watcher, is process 1 of a process-id namespace: when it
ends, the kernel ends all the others, whatever they did to get away. Where there are no namespaces
the watcher inherits the orphans and ends them.
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

from . import filters, kernel, root_filesystem
from .memory import Memory
from .program import Order, become_program

MODES = ("users", "user_namespace", "restricted")
"""How programs are held, the best first: namespaces made by root, each program with a user id of
its own; namespaces in a user namespace, which ordinary users may make; or without namespaces, by
Landlock and seccomp."""
LOOK_SECONDS = 0.01
"""How often the memory of a program's processes is added up."""
LOCKS_SECONDS = 1.0
"""How often file locks are counted. Reading the list stops all processes of the host that lock a
file, for a moment."""
MOST_LOCKS = 1000
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
        OSError: the host does not allow it; says what.
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
        kernel.unshare(kernel.NAMESPACES)
    else:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(*[root_filesystem.NOBODY] * 3)
            os.setresuid(*[root_filesystem.NOBODY] * 3)
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.NAMESPACES)
        root_filesystem.map_one_user(user, group)
    first = os.fork()
    if first:
        for descriptor in held:
            os.close(descriptor)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    root_filesystem.build_root(readable)


def missing(mode: str) -> dict[str, str]:
    """Isolation -> why this host does not give it.

    What is here is tried by a program afterwards.
    """
    wrong = {}
    machine = os.uname().machine
    without_filter = ""
    if machine not in filters.AUDIT_ARCH:
        without_filter = f"no seccomp table for {machine}"
        wrong["syscalls"] = without_filter
    if mode == "restricted":
        try:
            filters.landlock_rules(kernel.landlock_version(), [])
        except OSError as error:
            wrong["files"] = wrong["disk"] = str(error.strerror)
        if without_filter:
            wrong |= dict.fromkeys(("processes", "network"), without_filter)
    return wrong


def keep(control: socket.socket, mode: str, readable: list[str], users: tuple[int, int]) -> None:
    """Answer orders until the other end is closed. An order is the limits as JSON, with four
    descriptors: what to run, where its output goes, where its results go, and a socket to its
    watcher. Each program is the next of the users, first id and number of ids, if this process is
    root."""
    for name in PRELOADED:
        importlib.import_module(name)

    gc.collect()
    gc.freeze()
    gc.disable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    namespaces = kernel.NAMESPACES | (kernel.CLONE_NEWUSER if mode == "user_namespace" else 0)
    count = 0
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, TOP_MESSAGE, 8)
        if not data:
            os._exit(0)
        order = json.loads(data) | {"user": users[0] + count % users[1]}
        count += 1
        # A failing fork closes the watcher's socket, which says that the program could not be run.
        with contextlib.suppress(OSError):
            if (os.fork() if mode == "restricted" else kernel.fork_into(namespaces)) == 0:
                control.close()
                begin(order, mode, readable, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def begin(order: Order, mode: str, readable: list[str], descriptors: list[int]) -> None:
    """Be a program's watcher, in its namespaces. Never returns."""
    request, output, results, status_descriptor = descriptors
    status = socket.socket(fileno=status_descriptor)
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if mode == "user_namespace":
            root_filesystem.map_one_user(0, 0, inside=root_filesystem.NOBODY)
        report = watch(order, mode, readable, (request, output, results), status)
    except BaseException as error:  # noqa: BLE001 (told to whoever ordered it, who raises it)
        report = {"broken": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):
        status.send(json.dumps(report).encode())
    os._exit(0)


def watch(
    order: Order,
    mode: str,
    readable: list[str],
    descriptors: tuple[int, int, int],
    status: socket.socket,
) -> Any:
    """Be the program's first process: see that it keeps to its time and memory, and end all that it
    started.

    Returns:
        What ended it, as `atroposlib.sandbox.local` reads it.
    """
    if mode == "restricted":
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        memory = Memory(
            os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
            own=False,
            own_network=False,
        )
    else:
        options = f"size={order['disk']},nr_inodes={order['files']},mode=1777"
        kernel.mount(
            "tmp", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, options
        )
        os.chdir("/tmp")
        memory = Memory(*hide_processes(), own_network=True)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    began = time.monotonic()
    # The kernel counts by user: the watcher too, if it is the same one; without namespaces, all
    # that this user runs.
    others = 0
    if os.geteuid() != 0:
        others = 1 if mode == "user_namespace" else tasks_of_this_user()
    child = os.fork()
    if child == 0:
        status.close()
        become_program(order, mode, readable, descriptors, others)
    for descriptor in descriptors:
        os.close(descriptor)
    end, peak = wait(order, child, memory, status, began)
    seconds = time.monotonic() - began
    code, left = end_all(child, mode)
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
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    except OSError:
        own = False
    descriptor = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    kernel.mount(
        "none",
        "/proc",
        "tmpfs",
        kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV,
        "size=4k,nr_inodes=2,mode=555",
    )
    return descriptor, own


def tasks_of_this_user() -> int:
    """Threads that run as this user, on the whole host."""
    count, user = 0, os.geteuid()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def wait(
    order: Order, child: int, memory: Memory, status: socket.socket, began: float
) -> tuple[str, int]:
    """Until the program ends or is to be ended: why, and the most memory that was seen, in bytes."""
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
            # Whoever ordered it says nothing more than that it is to end, by closing the socket.
            return "cancelled" if descriptor == status.fileno() else "exited", peak
        peak = max(peak, memory.used())
        if peak > order["memory"]:
            return "memory", peak
        if time.monotonic() >= count_locks_at:
            if memory.locks() > MOST_LOCKS:
                return "memory", peak
            count_locks_at = time.monotonic() + LOCKS_SECONDS


def end_all(child: int, mode: str) -> tuple[int, int]:
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
                    # Those of a process that was killed become this one's, and are found the next
                    # time.
                    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
                        for pid in file.read().split():
                            os.kill(int(pid), signal.SIGKILL)
                else:
                    os.kill(-1, signal.SIGKILL)
            reap(os.WNOHANG if mode == "restricted" else 0)
            time.sleep(0.001)
    return code, len(ended - by_itself)


def main() -> None:
    """Make the best sandbox that this host allows, and keep it."""
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(control.recv(TOP_MESSAGE))
    readable = root_filesystem.outermost([*root_filesystem.python_files(), *settings["readable"]])
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
                    users = root_filesystem.mapped_users()
                report = {"mode": mode, "missing": missing(mode), "refusals": refusals}
                os.close(error_write_end)
                control.send(json.dumps(report).encode())
                keep(control, mode, readable, users)
            except BaseException as error:  # noqa: BLE001 (said to the parent, which tries the next way)
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
