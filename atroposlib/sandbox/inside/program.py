"""The process that gives up its rights, runs a program, and reports the results.

A report is not trustworthy, because the program runs in the same process. It contains the values
that a function returned, and no verdict on them.
"""

import builtins
import contextlib
import fcntl
import gc
import json
import os
import resource
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from . import isolation

RESULTS = 3
"""The descriptor to which results are written."""
LONGEST_PROBLEM = 500
"""Characters of an exception's text that are reported."""

Order = dict[str, Any]
"""The limits of one run, as `atroposlib.sandbox.contract.Limits` has them, and `user`, its user
id."""


def limit(order: Order, others: int) -> None:
    """Set the limits of this process and its children.

    Args:
        order: the limits.
        others: processes that the kernel counts along with the program's.
    """
    limits = {
        resource.RLIMIT_CPU: (order["cpu_seconds"], order["cpu_seconds"] + 1),
        resource.RLIMIT_AS: (order["memory"],) * 2,
        resource.RLIMIT_FSIZE: (order["disk"],) * 2,
        resource.RLIMIT_NOFILE: (order["open_files"],) * 2,
        resource.RLIMIT_NPROC: (order["processes"] + others,) * 2,
        resource.RLIMIT_STACK: (8 << 20,) * 2,
        resource.RLIMIT_SIGPENDING: (256,) * 2,
    }
    none = ("CORE", "MEMLOCK", "MSGQUEUE", "NICE", "RTPRIO")
    limits |= {getattr(resource, f"RLIMIT_{name}"): (0, 0) for name in none}
    for which, (soft, hard) in limits.items():
        most = resource.getrlimit(which)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(which, (soft, hard))


def give_up_rights(order: Order, mode: str, readable: list[str]) -> None:
    """Give up all rights of this process for good."""
    isolation.bound_capabilities()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(*[order["user"]] * 3)
        os.setresuid(*[order["user"]] * 3)
    isolation.drop_capabilities()
    isolation.forbid_new_privileges()
    if mode == "restricted":
        with contextlib.suppress(OSError):  # the keeper reported missing isolations at the start
            handled, scoped, rules = isolation.landlock_rules(
                isolation.landlock_version(), readable
            )
            isolation.landlock(
                handled, scoped, [*rules, ("/dev/null", 0b110), ("/dev/urandom", 0b100)]
            )
    with contextlib.suppress(OSError):
        isolation.install_filter(
            isolation.seccomp_filter(os.uname().machine, namespaces=mode != "restricted")
        )


def take_descriptors(request: int, output: int, errors: int, results: int) -> dict[str, Any]:
    """Read what is to be run; standard input, output and error and the results are all that stays
    open.
    """
    size = os.fstat(request).st_size
    task: dict[str, Any] = json.loads(os.pread(request, size, 0))
    stdin = os.open("/dev/null", os.O_RDONLY)
    if task["stdin"]:
        stdin = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(stdin, "wb", closefd=False) as file:
            file.write(task["stdin"].encode(errors="surrogatepass"))
        os.lseek(stdin, 0, os.SEEK_SET)
        # The program holds a descriptor that can write: without seals it could keep data of its own
        # in this memory.
        fcntl.fcntl(
            stdin,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE,
        )
    # Out of each other's way before each gets its place.
    apart = [os.dup2(fd, 60 + i) for i, fd in enumerate((stdin, output, errors, results))]
    for place, fd in enumerate(apart):
        os.dup2(fd, place)
    os.closerange(RESULTS + 1, 4096)
    return task


def report(entry: dict[str, Any], write: Callable[[int, bytes], int] = os.write) -> None:
    """Write one line of results."""
    data = json.dumps(entry).encode() + b"\n"
    while data:
        data = data[write(RESULTS, data) :]


def problem_of(error: BaseException) -> str:
    """The last line of an exception's report, which may be hostile itself."""
    try:
        return traceback.format_exception_only(type(error), error)[-1].strip()[:LONGEST_PROBLEM]
    except BaseException:  # noqa: BLE001 (its __str__ is the program's code)
        return "an exception that cannot be shown"


def run(task: dict[str, Any]) -> None:
    """Run the program, and call its function with each of the arguments."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    # Without Python's module `site`, which needs files, these two are missing.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    own_folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.argv, sys.path[:] = ["program.py"], [path for path in sys.path if path != own_folder]
    function = task["function"]
    # A module of its own, as dataclasses and pickle expect one.
    module = types.ModuleType("program" if function else "__main__")
    sys.modules[module.__name__], names = module, module.__dict__
    write = report
    try:
        exec(compile(task["code"], "program.py", "exec"), names)
        if not function:
            sys.stdout.flush()
            write({"done": True})
            return
        call = names.get(function)
        if not callable(call):
            write({"problem": f"it defines no function {function}"})
            return
    except BaseException as error:  # noqa: BLE001 (whatever it raises, SystemExit included, is its own)
        if not function and isinstance(error, SystemExit) and error.code in (None, 0):
            write({"done": True})
        else:
            write({"problem": problem_of(error)})
        return
    for number, arguments in enumerate(task["calls"]):
        try:
            write({"call": number, "value": call(*arguments)})
        except BaseException as error:  # noqa: BLE001
            write({"call": number, "raised": problem_of(error)})


def become_program(
    order: Order, mode: str, readable: list[str], descriptors: tuple[int, ...], others: int
) -> None:
    """Become the program. Never return."""
    code = 70
    try:
        os.setsid()
        task = take_descriptors(*descriptors)
        limit(order, others)
        give_up_rights(order, mode, readable)
        gc.enable()
        run(task)
        code = 0
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 (nothing of it may reach the keeper's code)
        with contextlib.suppress(BaseException):
            os.write(2, f"{problem_of(error)}\n".encode(errors="replace"))
    finally:
        os._exit(code)
