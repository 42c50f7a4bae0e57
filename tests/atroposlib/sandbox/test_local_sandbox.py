"""The sandbox itself: what it answers, which limit ends what, and what happens when the host or a
process fails it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.sandbox import Limits, LocalSandbox, Outcome, Program, Raised, Returned
from atroposlib.sandbox.contract import same_value, verdict
from atroposlib.sandbox.inside import isolation
from atroposlib.sandbox.inside.supervisor import Memory, bytes_of
from atroposlib.sandbox.local import processes_below, read_results
from example_trainer.child_processes.guard import parents
from tests.conftest import ROOT

SCRIPT = "import sys, os\nprint(sys.stdin.read()[::-1], os.getcwd(), os.listdir('.'), __name__, dict(os.environ))"
OWNER = """
import asyncio
from atroposlib.sandbox import *
async def main():
    box = LocalSandbox(Limits(seconds=1000))
    await box.start()
    print(box._keeper.pid, flush=True)
    await box.run(Program('import time; time.sleep(1000)'))
asyncio.run(main())
"""
MANY = """
import os, signal, socket, time
from atroposlib.sandbox.inside.supervisor import Memory, wait
read, write = os.pipe()
child = os.fork()
if child == 0:
    for _ in range(19):
        if os.fork() == 0:
            break
    held = bytearray(b"x") * (16 << 20)
    os.write(write, b"x")
    time.sleep(600)
for _ in range(20):
    os.read(read, 1)
status, theirs = socket.socketpair()
memory = Memory(os.open("/proc", os.O_RDONLY), own=False, own_network=False)
order = {"seconds": 600, "memory": 64 << 20}
print(wait(order, child, memory, status, time.monotonic(), 16)[0], flush=True)
os.killpg(0, signal.SIGKILL)
"""
"""A watcher that first looks when there are too many processes, which have too much memory."""
PIECES = [b"{", b'"call"', b":", b"0", b"1", b"}", b",", b'"value"', b"\n"]
OTHER_WAYS = Path(__file__).with_name("other_ways.py")


def in_sandbox(
    work: Callable[[LocalSandbox], Coroutine[Any, Any, Any]], limits: Limits | None = None
) -> Any:
    async def run() -> Any:
        box = LocalSandbox(limits)
        await box.start()
        try:
            return await work(box)
        finally:
            await box.close()

    return asyncio.run(run())


def run_all(*programs: Program, limits: Limits | None = None) -> list[Outcome]:
    async def work(box: LocalSandbox) -> Any:
        return await asyncio.gather(*(box.run(program) for program in programs))

    return list(in_sandbox(work, limits))


def test_what_comes_of_programs() -> None:
    good, script, broken, missing, cpu, empty = run_all(
        Program(
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\n"
            "def f(a, b=2):\n    print('é')\n    return (P(a).x / b, {1: None})",
            "f",
            [[1], [4, 2], ["x"], [[]], []],
        ),
        Program(SCRIPT, stdin="abc"),
        Program("def f(:", "f", [[1]]),
        Program("g = 1", "f", [[1]]),
        Program("while True: pass"),
        Program("", "f", []),
        limits=Limits(seconds=60, cpu_seconds=1),
    )
    assert good.results[:2] == [Returned([0.5, {"1": None}]), Returned([2.0, {"1": None}])]
    assert all(
        isinstance(result, Raised) and result.text.startswith("TypeError: ")
        for result in good.results[2:]
    )
    assert (len(good.results), good.end, good.code, good.left, good.output) == (
        5,
        "exited",
        0,
        0,
        "é\n" * 4,
    )
    assert script.output == "cba /tmp [] __main__ {}\n"
    assert "SyntaxError" in str(broken.problem)
    assert missing.problem == "it defines no function f"
    assert (cpu.end, verdict(cpu, []).kind) == ("cpu", "timeout")
    assert 0.3 < cpu.cpu_seconds < 3  # as a busy machine counts it
    assert empty.problem == "it defines no function f"


ORDINARY = {
    "processes": """
import mmap, multiprocessing, tempfile
def f():
    fork = multiprocessing.get_context("fork")
    one, other = fork.Pipe()
    file = tempfile.TemporaryFile()
    file.truncate(4096)
    array = mmap.mmap(file.fileno(), 4096)
    def work():
        array[7] = 6
        other.send("done")
    child = fork.Process(target=work)
    child.start()
    result = [one.recv(), array[7]]
    child.join()
    return result + [child.exitcode]
""",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
def f():
    with ThreadPoolExecutor(8) as pool:
        return [sum(pool.map(lambda x: x * x, range(10))), "threads", 0]
""",
    "event loop": """
import asyncio
async def work():
    loop = asyncio.get_running_loop()
    return [await asyncio.gather(asyncio.sleep(0, 1), loop.run_in_executor(None, int, "2")), "loop", 0]
def f():
    return asyncio.run(work())
""",
    "files": """
import mmap, shutil, sqlite3, subprocess, sys, tempfile
def f():
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + "/a", "w") as file:
            file.write("hello" * 10000)
        shutil.copyfile(folder + "/a", folder + "/b")
        with open(folder + "/b", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            found = view[:5].decode()
        with sqlite3.connect(folder + "/c") as base:
            base.execute("create table t (x)")
            base.execute("insert into t values (1)")
        with mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private:
            private[5] = 7
            number = private[5]
        said = subprocess.run([sys.executable, "-S", "-c", "print(1)"], capture_output=True, text=True)
    return [found, number, said.stdout.strip()]
""",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("processes", ["done", 6, 0]), ("threads", [285, "threads", 0])),
        *(("event loop", [[1, 2], "loop", 0]), ("files", ["hello", 7, "1"])),
    ],
)
def test_an_ordinary_program_works(name: str, value: list[Any]) -> None:
    (outcome,) = run_all(
        Program(ORDINARY[name], "f", [[]]), limits=Limits(seconds=60, cpu_seconds=30)
    )
    assert outcome.results == [Returned(value)], outcome


def test_a_refusal_is_an_error_that_counts_as_contained() -> None:
    shared = "import mmap\ndef f():\n    return len(mmap.mmap(-1, 4096))"
    large = "def f():\n    return len(bytearray(1 << 40))"
    outcomes = run_all(
        Program(shared, "f", [[]]), Program(large, "f", [[]]), Program(f"{shared}\nf()", "f", [[]])
    )
    judged = [verdict(outcome, [4096]) for outcome in outcomes]
    assert [each.kind for each in judged] == ["contained"] * 3
    assert [each.why for each in judged] == [
        "refused by the sandbox: call 0 raised PermissionError: [Errno 1] Operation not permitted",
        "refused by the sandbox: call 0 raised MemoryError",
        "refused by the sandbox: PermissionError: [Errno 1] Operation not permitted",
    ]


STATUS = b"Name:\tx\nVmPeak:\t 900 kB\nVmSize:\t 640 kB\nVmRSS:\t 8 kB\nVmPTE:\t 4 kB\nVmSwap:\t 2 kB\nThreads:\t1\n"


def test_resident_swapped_and_page_tables_are_added_up() -> None:
    assert bytes_of(STATUS) == (14 << 10, (640 << 10) // os.sysconf("SC_PAGESIZE") * 256)
    assert bytes_of(b"Name:\tx\nState:\tZ (zombie)\n") is None


def test_records_of_mappings_count_for_all_processes_but_the_largest(tmp_path: Path) -> None:
    page = os.sysconf("SC_PAGESIZE")
    for name, pages in (("1", 5), ("7", 100), ("8", 30), ("9", 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status").write_text(f"VmSize: {pages * page >> 10} kB\nVmRSS: 4 kB\n")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        assert Memory(descriptor, own=True, own_network=False).used() == 3 * 4096 + 50 * 256
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("own", [True, False])
def test_memory_of_all_processes_is_found_in_either_proc(own: bool) -> None:
    """Without a /proc of its own a watcher finds its descendants one by one."""
    script = "import time, sys; held = bytearray(b'x') * (32 << 20); print(1, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    descriptor = os.open("/proc", os.O_RDONLY)
    try:
        used = Memory(descriptor, own=own, own_network=False).used()
    finally:
        os.close(descriptor)
        child.kill()
        child.wait()
        child.stdout.close()
    assert used > 32 << 20


def test_processes_beyond_the_limit_are_the_cause_however_late_the_watcher_looks() -> None:
    watcher = subprocess.run(
        [sys.executable, "-c", MANY],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=240, start_new_session=True,
    )  # fmt: skip
    assert watcher.stdout == "processes\n"


def test_output_is_counted_and_its_beginning_kept() -> None:
    limits = Limits(output=300_000, kept_output=1000)
    some, much = run_all(
        Program("print('x' * 200_000)"), Program("while True: print('y' * 1000)"), limits=limits
    )
    assert (some.end, some.output, some.output_bytes) == ("exited", "x" * 1000, 200_001)
    assert (much.end, len(much.output)) == ("output", 1000)
    assert 300_000 < much.output_bytes < 600_000, "a full pipe holds it up, however late its end is"


def test_a_keeper_that_dies_is_started_again_and_its_programs_run_anew() -> None:
    async def work(box: LocalSandbox) -> Any:
        assert box._keeper is not None
        first = box._keeper
        running = asyncio.create_task(
            box.run(Program("import time\ntime.sleep(0.3)\ndef f():\n    return 1", "f", [[]]))
        )
        await asyncio.sleep(0.1)
        # Its first process ends with its children.
        os.kill(processes_below(first.pid)[0], signal.SIGKILL)
        first.wait(60)
        return await running

    assert in_sandbox(work).results == [Returned(1)]


def test_a_program_that_nobody_waits_for_any_more_ends() -> None:
    async def work(box: LocalSandbox) -> float:
        assert box._keeper is not None
        running = asyncio.create_task(box.run(Program("import time\ntime.sleep(1000)")))
        before = await until(lambda: len(processes_below(box._keeper.pid)) > 3)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        await until(lambda: len(processes_below(box._keeper.pid)) <= 2)
        return before

    in_sandbox(work, Limits(seconds=1000))


def test_all_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment)
    assert owner.stdout is not None
    keeper = int(owner.stdout.readline())
    asyncio.run(until(lambda: len(processes_below(keeper)) > 3))
    family = processes_below(keeper)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    asyncio.run(until(lambda: not {keeper, *family} & parents().keys()))


async def until(probe: Callable[[], bool], seconds: float = 60) -> float:
    began = time.monotonic()
    while not probe():
        assert time.monotonic() - began < seconds, "it did not come to that"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def other_way(way: str, python: str = sys.executable, *before: str) -> dict[str, Any]:
    command = [*before, python, str(OTHER_WAYS), way]
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


def system_python() -> str:
    """One that another user may run, too."""
    for name in ("/usr/bin/python3", "/usr/local/bin/python3"):
        said = subprocess.run(
            [name, "-c", "import sys; print(sys.version_info >= (3, 11))"],
            capture_output=True,
            text=True,
        )
        if said.stdout.strip() == "True":
            return name
    pytest.skip("no Python of the system's that other users may run")


def held_all(told: dict[str, Any], mode: str) -> dict[str, Any]:
    return {
        "mode": mode,
        "missing": {},
        "kinds": dict.fromkeys(told["kinds"], "held"),
        "honest": "right",
    }


def as_ordinary_user() -> tuple[str, ...]:
    """The interpreter, and what begins its command line, of a user without rights."""
    if os.geteuid() != 0:
        return (sys.executable,)
    return (system_python(), "setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups")


def test_an_ordinary_user_holds_programs_as_well() -> None:
    told = other_way("plain", *as_ordinary_user())
    assert told == held_all(told, "user_namespace")


def test_without_namespaces_what_the_user_starts_elsewhere_takes_nothing_of_a_program() -> None:
    assert other_way("busy user", *as_ordinary_user()) == {
        "mode": "restricted",
        "honest": "right",
        "hostile": "processes",
        "kind": "contained",
    }


def test_programs_of_two_sandboxes_share_no_user() -> None:
    who = Program("import os\ndef f():\n    return os.getuid()", "f", [[]])

    async def two(box: LocalSandbox) -> Any:
        other = LocalSandbox()
        await other.start()
        try:
            outcomes = [await each.run(who) for each in (box, other)]
        finally:
            await other.close()
        return box.mode, [outcome.results for outcome in outcomes]

    mode, (one, other) = in_sandbox(two)
    if mode != "users":
        pytest.skip("programs have users of their own only where root makes the sandbox")
    assert one != other


def test_without_namespaces_landlock_and_seccomp_hold_them() -> None:
    told = other_way("no namespaces", *((system_python(),) if os.geteuid() == 0 else ()))
    assert told == held_all(told, "restricted")


def test_what_a_host_cannot_give_is_named_and_refused_unless_allowed() -> None:
    python = (system_python(),) if os.geteuid() == 0 else ()
    refused = other_way("no landlock", *python)["refused"]
    assert refused["missing"] == ["disk", "files"]
    assert "files (Landlock 3 is needed (Linux 6.2), this kernel has none)" in refused["message"]
    assert "user_namespace: unshare: Operation not permitted" in refused["message"]
    assert refused["message"].endswith("or go without files,disk")
    assert other_way("allowed", *python)["missing"].keys() == {"disk", "files"}
    with pytest.raises(ValueError, match="'netwrok' is not an isolation; there are files, network"):
        LocalSandbox(allow_missing=["netwrok"])


HEADERS = {
    0: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    1: Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("column", HEADERS)
def test_numbers_of_calls_are_those_of_the_kernels_headers(column: int) -> None:
    if not HEADERS[column].exists():
        pytest.skip(f"no {HEADERS[column]} here")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[column].read_text())
    theirs = {name: int(number) for name, number in found}
    ours = {
        name: row[column]
        for name, row in (
            isolation.FORBIDDEN | isolation.WITHOUT_NAMESPACES | isolation.BY_ARGUMENT
        ).items()
    }
    newest = max(theirs.values())
    assert {
        name: number for name, number in ours.items() if number is not None and number <= newest
    } == {name: theirs[name] for name in ours if name in theirs}


def test_paths_within_others_are_left_out() -> None:
    assert isolation.outermost(["/a/b", "/a", "/ab", "/a/b/c"]) == ["/a", "/ab"]


@given(st.binary(max_size=300) | st.lists(st.sampled_from(PIECES)).map(b"".join))
def test_whatever_a_program_tells_is_read(data: bytes) -> None:
    results, problem = read_results(data, 2)
    assert len(results) <= 2
    assert problem is None or isinstance(problem, str)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(json_values)
@settings(max_examples=40)
def test_a_value_is_the_same_after_its_way_through_json(value: Any) -> None:
    assert same_value(value, json.loads(json.dumps(value)))


@given(json_values, json_values)
@settings(max_examples=40)
def test_values_that_differ_are_told_apart(one: Any, other: Any) -> None:
    if same_value(one, other) and "." not in repr(one) and "e" not in repr(one):
        assert json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        *(
            (1, 1.0, False),
            (1.0, 1, True),
            (1, True, False),
            (True, 1, False),
            (0, False, False),
            (None, 0, False),
            ("1", 1, False),
        ),
        *(
            (1.0, 1 + 1e-9, True),
            (1.0, 1.001, False),
            (1.0, 10**400, False),
            (float("nan"), float("nan"), True),
        ),
        *(
            (3.2e-7, 0.0, False),
            (3.2e-7, 3.2001e-7, True),
            (-3.2e-7, 3.2e-7, False),
            (0.0, 1e-12, True),
            (2e-3, 2.0005e-3, True),
        ),
        *(
            ((1, 2), [1, 2], True),
            ([1], [1, 2], False),
            ({"a": 1}, {"a": 1, "b": 2}, False),
            ([], {}, False),
        ),
    ],
)
def test_types_count(expected: Any, got: Any, same: bool) -> None:
    assert same_value(expected, got) is same


def test_a_script_reads_its_input_and_its_errors_are_not_its_output() -> None:
    debugging, leaving, failing, long = run_all(
        Program("import sys\nprint('n?', file=sys.stderr)\nprint(int(input()) + 1)", stdin="12\n"),
        Program(
            "try:\n    print(open(0).read())\n    exit()\nexcept Exception:\n    print('no exit')"
        ),
        Program("print(1)\nprint(1 // int(input()))", stdin="0\n"),
        Program("import sys\nwhile True:\n    print('x' * 1000, file=sys.stderr)"),
        limits=Limits(output=300_000, kept_output=1000),
    )
    assert (debugging.output, debugging.errors) == ("13\n", "n?\n")
    assert (leaving.output, leaving.end, leaving.problem) == ("\n", "exited", None)
    assert failing.output == "1\n"
    assert str(failing.problem).startswith("ZeroDivisionError")
    assert (long.output, long.end, len(long.errors)) == ("", "output", 1000)
