"""Run as a process: a sandbox on a host that allows less, and some hostile programs in it.

Needs nothing but Python.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

# The package's own first lines need pydantic, which the system's Python may not have.
package = types.ModuleType("atroposlib")
package.__path__ = [str(Path(__file__).resolve().parents[3] / "atroposlib")]
sys.modules["atroposlib"] = package

from atroposlib.sandbox import Limits, LocalSandbox, Program, SandboxUnavailable  # noqa: E402
from atroposlib.sandbox.contract import verdict  # noqa: E402
from atroposlib.sandbox.inside import isolation  # noqa: E402

CHOSEN = """memory over many processes|memory in a process whose first thread ended|memory in page tables
memory in file locks that show no process|memory in shared maps that a child keeps|memory in large sockets
memory in standard input|memory in a memfd|killing a process of the same user|killing who made it|signals by ownership of a pipe
limits of its watcher|looking into its watcher|secrets in the environment of others|secrets of the user|network by address
a socket with an abstract name|deleting files|emptying Python's own files|writing where it may not|filling the disk|a daemon
orphans in groups of their own|higher limits|becoming root|capabilities|mounting|namespaces of its own|loosening its filter
closing everything|telling results of its own|a file too large"""

BY_MEMORY = (
    "memory over many processes",
    "memory in a process whose first thread ended",
    "memory in page tables",
)
"""Programs that the sum over all their processes ends."""


def refuse_calls(names: tuple[str, ...], numbers: tuple[int, ...] = ()) -> None:
    """As container engines do it: namespaces and mounts get EPERM."""
    column = list(isolation.AUDIT_ARCH).index(os.uname().machine)
    program = isolation._step(isolation.LOAD, isolation.NUMBER_AT)
    for number in (*(isolation.FORBIDDEN[name][column] for name in names), *numbers):
        program += isolation._step(isolation.JUMP_EQUAL, number or 0, 0, 1) + isolation.refuse(
            isolation.EPERM
        )
    isolation.forbid_new_privileges()
    isolation.install_filter(program + isolation._step(isolation.RETURN, isolation.ALLOW))


THREADS_LATER = """
import time
from concurrent.futures import ThreadPoolExecutor
def answer(x):
    time.sleep(1)
    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(lambda y: y * 17, [x]))
"""
PROCESSES_WITHOUT_END = """
import os, time
def answer(x):
    while True:
        try: os.fork()
        except OSError: time.sleep(0.01)
"""


async def beside_a_busy_user() -> dict[str, object]:
    """Run a program that starts threads after its user started many, and one with processes
    without end.
    """
    refuse_calls(("unshare", "mount", "setns", "pivot_root"))
    async with asyncio.timeout(120):
        box = LocalSandbox(Limits(seconds=30, cpu_seconds=10))
        await box.start()
        honest = asyncio.ensure_future(box.run(Program(THREADS_LATER, "answer", [[3]])))
        await asyncio.sleep(0.5)
        over = threading.Event()
        for _ in range(40):
            threading.Thread(target=over.wait).start()
        told = verdict(await honest, [51]).kind
        over.set()
        hostile = await box.run(Program(PROCESSES_WITHOUT_END, "answer", [[3]]))
        await box.close()
    return {
        "mode": box.mode,
        "honest": told,
        "hostile": hostile.end,
        "kind": verdict(hostile, [51]).kind,
    }


async def main(way: str) -> dict[str, object]:
    if way == "busy user":
        return await beside_a_busy_user()
    if way != "plain":
        landlock = (isolation.LANDLOCK_CREATE_RULESET,) if way in ("no landlock", "allowed") else ()
        refuse_calls(("unshare", "mount", "setns", "pivot_root"), landlock)
    allowed = ("files", "disk") if way == "allowed" else ()
    box = LocalSandbox(Limits(seconds=60, cpu_seconds=1, memory=192 << 20), allowed, at_once=8)
    try:
        await box.start()
    except SandboxUnavailable as error:
        return {"refused": {"message": str(error), "missing": sorted(error.missing)}}
    if allowed:
        await box.close()
        return {"missing": box.missing}
    text = Path(__file__).with_name("hostile_programs.txt").read_text().partition("\nPRELUDE\n")[2]
    prelude, *sections = text.split("\n## ")
    programs = dict(section.split("\n", 1) for section in sections)
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])  # noqa: ASYNC220
    places = {
        "SECRET": __file__,
        "FOLDER": os.path.dirname(__file__),
        "NAME": "none",
        "PORT": 1,
        "PARENT": os.getpid(),
    }
    names = [name for line in CHOSEN.splitlines() for name in line.split("|")]

    def filled(name: str) -> Program:
        code = f"{prelude}\n{programs[name]}"
        for place, value in (places | {"VICTIM": victim.pid}).items():
            code = code.replace(f"@{place}@", str(value))
        return Program(code, "answer", [[3]])

    outcomes = await asyncio.gather(*(box.run(filled(name)) for name in names))
    honest = await box.run(
        Program("import decimal, csv\ndef answer(x): return x * 17", "answer", [[3]])
    )
    alive = victim.poll() is None
    victim.kill()
    victim.wait()
    await box.close()
    kinds = {}
    for name, outcome in zip(names, outcomes, strict=True):
        held = (
            alive
            and "BREACH" not in outcome.output + outcome.errors
            and verdict(outcome, [51]).kind != "right"
        )
        if name in BY_MEMORY:
            held = held and outcome.end == "memory"
        kinds[name] = "held" if held else f"{outcome}"
    return {
        "mode": box.mode,
        "missing": box.missing,
        "kinds": kinds,
        "honest": verdict(honest, [51]).kind,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
