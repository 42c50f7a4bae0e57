#!/usr/bin/env python3
"""What the page at /ui costs: the rollout service under load without it, with it, and with ten pages open; and how long
it takes until a long run is open.

    python bench/page_cost.py                  # the service under load, five rounds of each
    python bench/page_cost.py --open           # a run of 10,000 steps, from the first request to the last figure

The load is that of rollout_api_load.py. Pages are held open by a process of its own, which shares the machine's cores with
service and load; each follows the run's events as a browser does. Writes bench/results/page_cost.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # run by path: import from the repository, and never a sibling file by a bare name

import argparse
import asyncio
import http.client
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.measured import measured, put_into
from bench.rollout_api_load import LOAD, cpu_seconds, free_port, machine, put_load, rss_mib, server

RESULTS = ROOT / "bench" / "results" / "page_cost.json"
KINDS = {"without the page": None, "with it": 0, "ten pages open": 10}
"""What is measured -> pages that are open; None for a service without."""
FIGURES = 130
"""Of a row of the trainer."""
SHOWN = ("reward_mean", "kl", "entropy", "clip_fraction", "tokens_per_second", "mfu", "age_mean", "response_length_mean")
OPENED = (
    "/ui", "/ui/api/page", "/ui/api/names", "/ui/api/stack", "/ui/api/events", "/ui/api/evaluations",
    f"/ui/api/series?points=2000&names={','.join(SHOWN)}", "/ui/api/weights",
)  # fmt: skip
"""What a browser asks for when a person opens the overview and the weights."""
MOST_SECONDS = 2.0
MOST_SLOWER = 0.05


async def hold_open(port: int, pages: int) -> None:
    """Follow the events of so many pages until the process is ended. Says `open` as soon as all are."""

    async def follow(opened: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /ui/api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await writer.drain()
        while line := await reader.readline():
            if line.startswith(b"event: hello"):
                opened.set()
        raise SystemExit("the service closed a page")

    opened = [asyncio.Event() for _ in range(pages)]
    following = [asyncio.create_task(follow(event)) for event in opened]
    await asyncio.gather(*(event.wait() for event in opened))
    print("open", flush=True)
    await asyncio.gather(*following)


@contextmanager
def open_pages(port: int, pages: int) -> Iterator[None]:
    """In the block so many pages are open."""
    if not pages:
        yield
        return
    command = [sys.executable, __file__, "--hold-open", str(pages), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or process.stdout.readline().strip() != "open":
                sys.exit("error: the pages could not be opened")
            yield
        finally:
            process.kill()


def under_load(kind: str, groups: int) -> dict[str, float]:
    """One run of the load on a fresh service."""
    pages, port = KINDS[kind], free_port()
    with tempfile.TemporaryDirectory(prefix="page", dir=ROOT / "runs") as folder:
        command: list[str | Path] = [sys.executable, "-m", "atroposlib.cli.run_api", "--port", str(port)]
        command += ["--store", Path(folder, "rollouts.db"), "--run-folder", folder]
        command += ["--no-ui"] if pages is None else []
        with server(command, port, ROOT) as pid, open_pages(port, pages or 0):
            before = cpu_seconds(pid)
            result = put_load(port, 16, groups)
            used = cpu_seconds(pid) - before
    return result | {"cpu_ms_per_group": used / groups * 1e3}


def compare(rounds: int, groups: int) -> dict[str, Any]:
    """All kinds in turn, so that all meet the same machine; each round in another order."""
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in random.Random(number).sample(list(KINDS), len(KINDS)):
            runs[kind].append(under_load(kind, groups))
            print(f"round {number + 1} {kind:17} " + " ".join(f"{k}={v:g}" for k, v in runs[kind][-1].items()), flush=True)
    middle = {kind: {key: statistics.median(run[key] for run in found) for key in found[0]} for kind, found in runs.items()}
    bare, watched = middle["without the page"], middle["ten pages open"]
    slower = {key: 1 - watched[key] / bare[key] for key in ("posted", "drained")}
    slower["p50"] = watched["p50"] / bare["p50"] - 1
    verdict = {f"ten pages cost at most 5 % of {name}": share <= MOST_SLOWER for name, share in slower.items()}
    for kind, found in middle.items():
        print(f"{kind:17} " + " ".join(f"{key}={value:g}" for key, value in found.items()))
    for text, good in verdict.items():
        print(f"{'yes' if good else 'NO':>4}  {text}")
    return {"groups": groups, "runs": runs, "medians": middle, "slower": slower, "verdict": verdict}


def write_long_run(folder: Path, steps: int) -> None:
    """The files of a run of so many steps, as the trainer and the environments write them."""
    draw = random.Random(0)
    names = [*SHOWN, *(f"figure_{number}" for number in range(FIGURES - len(SHOWN)))]
    figures = {name: draw.random() for name in names}
    (folder / "trainer").mkdir()
    with (folder / "trainer" / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            figures = {name: value + draw.gauss(0, 0.01) for name, value in figures.items()}
            file.write(json.dumps({"step": step, **figures, "checksum": f"{step:016x}"}) + "\n")
    with (folder / "trainer" / "evaluations.jsonl").open("w") as file:
        for number in range(1, steps // 20):
            row = {
                "id": number,
                "time": 1e9 + number,
                "step": 20 * number,
                "name": "task",
                "metrics": {"eval/correct": draw.random()},
            }
            file.write(json.dumps(row) + "\n")


def opening(steps: int, paths: Sequence[str]) -> dict[str, Any]:
    """How long a page of a long run takes, when nobody has opened it before, and when somebody has."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="page", dir=ROOT / "runs") as folder:
        write_long_run(Path(folder), steps)
        command = [sys.executable, "-m", "atroposlib.cli.view_run", folder, "--port", str(port)]
        with server(command, port, ROOT) as pid:
            before = rss_mib(pid)
            first = asked(port, paths)
            again = asked(port, paths)
            memory = rss_mib(pid) - before
    whole = sum(first.values())
    print(f"{steps} steps: open after {whole:.2f} s, again after {sum(again.values()):.2f} s, {memory:.0f} MiB")
    for path, seconds in first.items():
        print(f"  {seconds:.3f} s  {path[:80]}")
    verdict = {f"open within {MOST_SECONDS:g} s": whole <= MOST_SECONDS}
    return {"steps": steps, "seconds": whole, "first": first, "again": again, "memory_mib": memory, "verdict": verdict}


def asked(port: int, paths: Sequence[str]) -> dict[str, float]:
    """Seconds for each address, one after the other."""
    found = {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for path in paths:
        begin = time.perf_counter()
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            sys.exit(f"error: {path}: {answer.status} {body[:300]!r}")
        found[path] = time.perf_counter() - begin
    return found


def main() -> None:
    """Run what was asked for, and add it to the results file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind (default: 5)")
    parser.add_argument("--groups", type=int, default=4096, help="groups of each run (default: 4096)")
    parser.add_argument("--open", action="store_true", help="instead, open a long run")
    parser.add_argument("--steps", type=int, default=10_000, help="of the long run (default: 10000)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--hold-open", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hold_open:
        asyncio.run(hold_open(arguments.port, arguments.hold_open))
        return
    os.makedirs(ROOT / "runs", exist_ok=True)
    described = {"machine": machine(), "measured": measured()}
    if arguments.open:
        put_into(arguments.out, "open", described | opening(arguments.steps, OPENED))
    elif not LOAD.exists():
        print("skipped: ../shared/bench/api_load.py, the load, is not there")
    else:
        put_into(arguments.out, "load", described | compare(arguments.rounds, arguments.groups))


if __name__ == "__main__":
    main()
