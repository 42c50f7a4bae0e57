"""Over a hundred hostile programs, several at once, with honest ones among them: all are held, none
scores, none hangs.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from atroposlib.sandbox import Limits, LocalSandbox, Outcome, Program
from atroposlib.sandbox.contract import verdict

pytestmark = pytest.mark.nightly

FILE = Path(__file__).with_name("hostile_programs.txt")
HEAD, _, BODY = FILE.read_text().partition("\nPRELUDE\n")
PRELUDE, *SECTIONS = BODY.split("\n## ")
PROGRAMS = dict(section.split("\n", 1) for section in SECTIONS)
HONEST = "def answer(x):\n    return x * @FACTOR@"
LIMITS = Limits(seconds=120, cpu_seconds=1, memory=192 << 20)
"""The deadline is long, so that a busy machine ends no program by it."""
SHORT = replace(LIMITS, seconds=4)
UNTIL_DEADLINE = (
    "sleeping for ever",
    "sleeping with every signal ignored",
    "stopping itself",
    "vfork bomb with exec",
    "waiting for a lock that nobody opens",
)
"""Nothing but the deadline ends them, so they get a short one."""
CALLS = [[2], [3]]
AT_ONCE = 12


class Ran(NamedTuple):
    """The programs' purpose, and their outcome."""

    outcomes: dict[str, Outcome]
    honest: list[Outcome]
    expected: list[int]
    canary: str
    reached: list[str]


def descendants(pid: int) -> list[int]:
    """Processes below one, from /proc."""
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parents[int(path.name)] = int(
                    (path / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except (OSError, IndexError):
                continue  # it has ended in between
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def filled(code: str, places: dict[str, Any]) -> str:
    """Return a program with the values in the places of their names."""
    for name, value in places.items():
        code = code.replace(f"@{name}@", str(value))
    return code


async def run_all(places: dict[str, Any], factor: int) -> tuple[dict[str, Outcome], list[Outcome]]:
    """Run the hostile programs beside honest ones; no process of theirs may be left."""
    box = LocalSandbox(LIMITS, at_once=AT_ONCE)
    short = LocalSandbox(SHORT, at_once=len(UNTIL_DEADLINE))
    for each in (box, short):
        await each.start()
        assert each.missing == {}
    keepers = [each._keeper.pid for each in (box, short) if each._keeper is not None]

    def alive() -> list[int]:
        return [pid for keeper in keepers for pid in descendants(keeper)]

    idle = len(alive())
    names = list(PROGRAMS)
    programs = [
        Program(f"{PRELUDE}\n{filled(PROGRAMS[name], places)}", "answer", CALLS) for name in names
    ]
    honest = [Program(HONEST.replace("@FACTOR@", str(factor)), "answer", CALLS) for _ in range(12)]
    boxes = [short if name in UNTIL_DEADLINE else box for name in names]
    tried = [each.run(program) for each, program in zip(boxes, programs, strict=True)]
    ended = await asyncio.gather(*tried, *(box.run(program) for program in honest))
    deadline = time.monotonic() + 60
    while len(left := alive()) > idle:  # a process that was killed is seen until it is reaped
        assert time.monotonic() < deadline, f"processes are left: {left}"
        await asyncio.sleep(0.05)
    await box.close()
    await short.close()
    return dict(zip(names, ended, strict=False)), ended[len(names) :]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("host")
    canary = secrets.token_hex(16)
    (folder / "secret").write_text(canary)
    folder.chmod(0o777)
    factor = secrets.randbelow(10**9) + 10**9
    expected = [call[0] * factor for call in CALLS]
    reached: list[str] = []
    os.environ["SANDBOX_CANARY"] = canary
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    listener = socket.create_server(("127.0.0.1", 0))
    abstract, named = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{canary[:8]}")
    named.bind(str(folder / "socket"))
    for server in (abstract, named):
        server.listen()
    places = {
        # Backwards, since a program finds its own text in memory.
        **{"CANARY": canary[::-1], "EXPECTED": str(expected[0])[::-1], "NAME": canary[:8]},
        **{"SECRET": folder / "secret", "FOLDER": folder, "PORT": listener.getsockname()[1]},
        **{"PARENT": os.getpid(), "VICTIM": victim.pid},
    }

    host = socket.gethostname()
    try:
        outcomes, honest = asyncio.run(run_all(places, factor))
        for server in (listener, abstract, named):
            server.setblocking(False)
            try:
                reached.append(str(server.accept()))
            except BlockingIOError:
                server.close()
        if victim.poll() is not None:
            reached.append("the victim")
        if (folder / "secret").read_text() != canary or {
            path.name for path in folder.iterdir()
        } != {"secret", "socket"}:
            reached.append("the folder")
        if (
            socket.gethostname() != host
            or Path("/dev/shm/new").exists()
            or Path("/var/tmp/new").exists()
        ):
            reached.append("the host's name or its shared folders")
    finally:
        del os.environ["SANDBOX_CANARY"]
        victim.kill()
        victim.wait()
    return Ran(outcomes, honest, expected, canary, reached)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_held_and_scores_nothing(ran: Ran, name: str) -> None:
    outcome = ran.outcomes[name]
    said = f"{outcome.output} {outcome.errors} {outcome.results} {outcome.problem}"
    assert "BREACH" not in said, said
    assert ran.canary not in said
    judged = verdict(outcome, ran.expected)
    assert (judged.kind != "right", judged.passed) == (True, 0), judged
    assert (outcome.end == "deadline") == (name in UNTIL_DEADLINE), outcome


def test_there_are_a_hundred() -> None:
    assert len(PROGRAMS) >= 100


def test_nothing_of_the_host_was_reached(ran: Ran) -> None:
    assert ran.reached == []


def test_honest_programs_among_them_are_right(ran: Ran) -> None:
    assert [verdict(outcome, ran.expected).kind for outcome in ran.honest] == ["right"] * len(
        ran.honest
    )


def test_each_kind_of_end_was_met(ran: Ran) -> None:
    """Otherwise it would be something else that held them."""
    ends_by_name = {name: outcome.end for name, outcome in ran.outcomes.items()}
    assert {"exited", "signal", "deadline", "memory", "output"} <= set(ends_by_name.values())
    kinds = {name: verdict(outcome, ran.expected).kind for name, outcome in ran.outcomes.items()}
    assert kinds["sleeping with every signal ignored"] == kinds["spinning for ever"] == "timeout"
    assert (
        kinds["output without end"]
        == kinds["a daemon"]
        == kinds["memory over many processes"]
        == "contained"
    )
    for name in (
        "over many processes",
        "in a process whose first thread ended",
        "in page tables",
        "in sockets",
        "in file locks",
        "by all ways at once",
    ):
        assert ends_by_name[f"memory {name}"] == "memory", ran.outcomes[f"memory {name}"]
    assert kinds["memory in shared maps that a child keeps"] == "contained"
    assert kinds["leaving before the tests"] == kinds["not Python"] == "crash"
    assert kinds["telling results of its own"] == "wrong"
