#!/usr/bin/env python3
"""Measure the cost of the page at /ui. The rollout service is under load without it and with ten
pages open. Measured are also the growth of its memory, and the time to open a run of 10,000 steps
and a million rollouts.

    python bench/page_cost.py                                  # everything, 20 minutes on two idle cores
    python bench/page_cost.py --parts load --rounds 20         # ten of them, and what decides
    python bench/page_cost.py --parts open --rollouts 50000    # one part, smaller

load     the load of rollout_api_load.py in short turns on two services, in rounds of four: without
         the page, with ten pages open, with, without. The next round is the other way round. So a
         machine that becomes slower, as another tenant's needs make it, is slower for both.
         Compared are the sums of one
         round: processor time of the service for a posted group, and groups posted per second. For
         the rounds' shares, the mean and its 95 % interval (Student's t) are given. A trainer
         writes a row each second into a run of 10,000 steps. 128 groups before use up what may be
         kept at once.
memory   the same load again and again on one service with ten pages open, and the service's memory after each.
open     a run that was not opened before: every list of rollouts by a fresh process, with nothing
         of the file in the system's memory. And what it costs to keep a group, in an empty archive and in one that is full.

Open pages are a process of their own, and share the machine's cores with service and load. They are
eight overviews, one list of rollouts and one page of weights. Each asks as often as its script does
(static/overview.js, rollouts.js, weights.js). Writes bench/results/page_cost.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(
    ROOT
)  # run by path: import from the repository, and never a sibling file by a bare name

import argparse
import asyncio
import copy
import http.client
import json
import math
import os
import random
import re
import shutil
import sqlite3
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson

from atroposlib.dashboard.rollouts.archive import MAX_BYTES, Archive, PostedGroup
from atroposlib.dashboard.rollouts.rollout_stats import TrainedTokens
from bench.gpu.processes import free_port
from bench.measured import Options, command_line, measured, put_into
from bench.rollout_api_load import LOAD, cpu_seconds, machine, put_load, rss_mib, server
from example_trainer.launcher import roles

FIGURES = 130
"""Figures in a row of the trainer."""
SHOWN = (
    "reward_mean", "response_length_mean", "response_length_p95", "response_length_max", "kl", "mismatch_kl", "reference_kl",
    "entropy", "clip_fraction", "clip_fraction_low", "clip_fraction_high", "seconds_wait", "seconds_train", "seconds_sync",
    "tokens_per_second", "forwarded_tokens_per_second", "mfu", "age_mean", "age_max", "ratio_p50", "ratio_p99", "ratio_max",
    "grad_norm", "waiting_share", "queue_size",
)  # fmt: skip
"""Figures that the overview draws (static/figures.js)."""
EVALUATED_EVERY = 20
GROUP_SIZE = 8
PROMPT, RESPONSE = (12, 40), (16, 48)
"""Fewest and most tokens: short, so that a million rollouts are within the bytes that a service
keeps by default."""
ENVIRONMENTS = (
    ("arithmetic", 0.5),
    ("code", 0.3),
    ("games", 0.15),
    ("tools", 0.049),
    ("rare", 0.001),
)
"""Name and share of the groups."""
TOKENS = 150_000
NEEDLE = "zqxjkv"
"""A text that one rollout has, the oldest."""
_SPELLED = [ord(letter) - 33 for letter in NEEDLE]
"""The tokens of single characters; the first is `!`."""
_COPIED = "environment, score, tokens, sampled, mean_logprob"


class Rows:
    """Rows of metrics.jsonl, one after the other."""

    def __init__(self) -> None:
        self._draw = random.Random(0)
        names = [*SHOWN, *(f"figure_{number}" for number in range(FIGURES - len(SHOWN)))]
        self._figures = {name: self._draw.random() for name in names}
        self.step = 0

    def line(self) -> str:
        """The next one."""
        self.step += 1
        self._figures = {
            name: value + self._draw.gauss(0, 0.01) for name, value in self._figures.items()
        }
        return (
            json.dumps({"step": self.step, **self._figures, "checksum": f"{self.step:032x}"}) + "\n"
        )


def write_figures(folder: Path, steps: int) -> Rows:
    """The trainer's rows and the evaluations of a run of so many steps, in `folder`/trainer.

    Returns the rows.
    """
    (folder / "trainer").mkdir(parents=True)
    rows, draw = Rows(), random.Random(1)
    with (folder / "trainer" / "metrics.jsonl").open("w") as file:
        file.writelines(rows.line() for _ in range(steps))
    with (folder / "trainer" / "evaluations.jsonl").open("w") as file:
        for number in range(1, steps // EVALUATED_EVERY + 1):
            told = {
                "id": number,
                "time": 1e9 + number,
                "step": EVALUATED_EVERY * number,
                "name": "task",
            }
            file.write(json.dumps(told | {"metrics": {"eval/correct": draw.random()}}) + "\n")
    return rows


def tokenizer_file() -> bytes:
    """Make a tokenizer.json of byte pairs, as large as a present model's; its texts are not a
    language.
    """
    draw = random.Random(2)
    single = [
        chr(code)
        for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]
    ]
    letters = [chr(code) for code in range(97, 123)]
    words, known, merges = [*letters, *("Ġ" + letter for letter in letters)], set(single), []
    vocabulary = {text: number for number, text in enumerate(single)}
    while len(vocabulary) < TOKENS:
        left, right = (
            draw.choice(words),
            draw.choice(letters) if draw.random() < 0.6 else draw.choice(words).strip("Ġ"),
        )
        text = left + right
        if (
            text not in known
            and len(text) <= 12
            and right in vocabulary
            and (left in vocabulary or left[0] == "Ġ")
        ):
            if left not in vocabulary:
                vocabulary[left] = len(vocabulary)
                merges.append(["Ġ", left[1:]])
                known.add(left)
            vocabulary[text] = len(vocabulary)
            merges.append([left, right])
            known.add(text)
            words.append(text)
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": merges,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    parts: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
    }
    return orjson.dumps(parts | {"decoder": level, "model": model})


def groups(count: int) -> Iterator[tuple[PostedGroup, TrainedTokens | None]]:
    """Yield groups as an environment posts them, and the trainer's report on the first rollout of
    most of them.
    """
    draw = random.Random(3)
    names = [name for name, _ in ENVIRONMENTS]
    shares = [share for _, share in ENVIRONMENTS]
    for number in range(count):
        prompt = [int(TOKENS ** draw.random()) for _ in range(draw.randint(*PROMPT))]
        answers = [
            [int(TOKENS ** draw.random()) for _ in range(draw.randint(*RESPONSE))]
            for _ in range(GROUP_SIZE)
        ]
        if number == 0:
            answers[0][: len(_SPELLED)] = _SPELLED
        logprobs = [[round(-draw.expovariate(2.0), 6) for _ in answer] for answer in answers]
        version = number // 64
        body = {
            "tokens": [prompt + answer for answer in answers],
            "masks": [[-100] * len(prompt) + answer for answer in answers],
            "scores": [
                float(draw.random() < 0.4) if number % 2 else round(draw.gauss(0, 1), 3)
                for _ in answers
            ],
            "inference_logprobs": [[1.0] * len(prompt) + row for row in logprobs],
            "weight_versions": [version] * GROUP_SIZE,
            "finish_reasons": ["stop" if draw.random() < 0.9 else "length" for _ in answers],
        }
        posted = PostedGroup(
            number, 1.7e9 + number, draw.choices(names, shares)[0], orjson.dumps(body)
        )
        told = np.asarray(logprobs[0], np.float32)
        columns = (
            told - np.float32(draw.expovariate(20.0)),
            np.abs(told),
            np.full(len(told), 0.5, np.float32),
        )
        yield (
            posted,
            TrainedTokens(version, len(told), *columns)
            if draw.random() < GROUP_SIZE / 12
            else None,
        )


def keep(archive: Archive, count: int) -> float:
    """Keep groups as the service does. Returns seconds of the processor for each."""
    some = list(groups(count))
    began = time.process_time()
    for start in range(0, count, 20):
        with archive.transaction():
            for posted, trained in some[start : start + 20]:
                group = archive.add(posted)
                if trained is not None:
                    archive.add_trained(group, [(0, trained)])
    return (time.process_time() - began) / count


def write_archive(path: Path, kept: int) -> dict[str, Any]:
    """An archive of so many groups, each kept as the service keeps it. Returns what it cost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    archive = Archive(path)
    with archive.transaction():
        archive.keep_tokenizer(tokenizer_file())
    seconds = keep(archive, kept)
    archive.close()
    return {"groups": kept, "processor_ms_per_group": seconds * 1e3}


def multiply(path: Path, rollouts: int) -> dict[str, Any]:
    """Copy the groups of an archive until it has so many rollouts, or a few more.

    Returns their number and the bytes.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    run = connection.execute
    run("PRAGMA synchronous = OFF")
    run("PRAGMA cache_size = -400000")
    groups_of_one, rollouts_of_one = run("SELECT max(id), sum(size) FROM groups").fetchone()
    copies = max(0, -(-rollouts // rollouts_of_one) - 1)
    run("BEGIN")
    for number in range(1, copies + 1):
        at = {
            "g": groups_of_one * number,
            "r": rollouts_of_one * number,
            "v": groups_of_one // 64 * number,
        }
        of_original = {"groups": groups_of_one, "rollouts": rollouts_of_one}
        run(
            "INSERT INTO groups SELECT id + :g, seq + :g, time + :g, environment, size, first + :r, n_bytes, body FROM groups "
            "WHERE id <= :groups",
            at | of_original,
        )
        run(
            f"INSERT INTO rollouts SELECT id + :r, {_COPIED}, oldest + :v, newest + :v, finish_reason, "
            "drift * (0.5 + abs(random() % 1000) / 1000.0), trained_version + :v, preview FROM rollouts WHERE id <= :rollouts",
            at | of_original,
        )
        run(
            f"INSERT INTO texts SELECT id + :r, replace(text, '{NEEDLE}', '') FROM texts WHERE id <= :rollouts",
            {"r": at["r"]} | of_original,
        )
        run(
            "INSERT INTO trained SELECT id + :r, weight_version + :v, trained, logprobs, entropies, advantages FROM trained "
            "WHERE id <= :rollouts",
            {"r": at["r"], "v": at["v"]} | of_original,
        )
    run("COMMIT")
    (count, held) = run("SELECT sum(size), sum(n_bytes) FROM groups").fetchone()
    connection.close()
    return {"rollouts": count, "counted_bytes": held, "file_bytes": path.stat().st_size}


def forget_cached(path: Path) -> None:
    """Let the system drop what it holds of a file in memory, so that it is read from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


RESULTS = ROOT / "bench" / "results" / "page_cost.json"
PARTS = ("load", "memory", "open")
BARE, PAGED, PAGES = "without the page", "ten pages open", 10
"""The two sides of the comparison."""
OVERVIEW = (
    "/ui/api/page", "/ui/api/names", "/ui/api/stack", "/ui/api/events", "/ui/api/evaluations", "/ui/api/runs",
    f"/ui/api/series?points=2000&names={','.join(SHOWN)}",
)  # fmt: skip
"""Addresses that a browser requests when a person opens the overview."""
LISTS = {
    "newest": "sort=newest", "best": "sort=best", "worst": "sort=worst", "most drifted": "sort=drifted",
    "longest": "sort=longest", "best of one environment": "sort=best&environment=code",
    "newest of a rare environment": "environment=rare", "best, from the middle on": "sort=best&cursor=0.5~{middle}",
    "newest with a common text": "text=a",
    "best with a common text": "sort=best&text=the", "with a text that is nowhere": "text=no%20such%20text",
}  # fmt: skip
"""Content of a list -> its query."""
WARM_GROUPS, CLIENTS = 128, 16
QUIET_SHARE, QUIET_SECONDS, SETTLE_SECONDS = 0.05, 0.5, 30.0
"""A share of a core, its duration, and the deadline: a service is idle when it has done the work
behind its answers.
"""
MOST_SECONDS, MOST_SLOWER, MOST_GROWTH_MIB = 2.0, 0.05, 8.0
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t of two sides at 95 %, by degrees of freedom from 1 on."""


async def hold_open(port: int, pages: int) -> None:
    """Follow a run on so many pages until the process is ended. Prints `open` as soon as all
    are.
    """
    kinds: list[tuple[Sequence[str], Sequence[bytes], float]] = [(OVERVIEW, (), 0.0)] * max(
        0, pages - 2
    )
    kinds += [(("/ui/api/rollouts?limit=50",), (b"event: rollouts",), 3.0)] * (pages > 1)
    kinds += [(("/ui/api/weights", "/ui/api/stack"), (b"event: rows", b"event: weights"), 5.0)] * (
        pages > 0
    )

    async def ask(path: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        answer = await reader.read(-1)
        writer.close()
        if not answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 404")):  # no rollout yet
            raise SystemExit(f"{path}: {answer[:300]!r}")

    async def follow(
        opened: asyncio.Event, paths: Sequence[str], renewed_by: Sequence[bytes], every: float
    ) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        writer.write(b"GET /ui/api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        asked = -every
        async for text in reader:
            line = text.rstrip()
            hello = line == b"event: hello"
            if hello or (line in renewed_by and time.monotonic() - asked >= every):
                asked = time.monotonic()
                for path in paths:
                    await ask(path)
            if hello:
                opened.set()
        raise SystemExit("the service closed a page")

    opened = [asyncio.Event() for _ in kinds]
    following = [
        asyncio.create_task(follow(event, *kind)) for event, kind in zip(opened, kinds, strict=True)
    ]
    waiting = asyncio.gather(*(event.wait() for event in opened))
    every: list[asyncio.Future[Any]] = [waiting, *following]
    await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
    if waiting.done():
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
            if process.poll() is not None:
                sys.exit("error: the pages were closed")
        finally:
            process.kill()


@contextmanager
def long_run(steps: int) -> Iterator[tuple[Path, Rows]]:
    """The figures of a run of so many steps, and what they go on with."""
    with tempfile.TemporaryDirectory(prefix="page", dir=ROOT / "runs") as name:
        yield Path(name), write_figures(Path(name), steps)


@contextmanager
def service(page: bool, run: tuple[Path, Rows]) -> Iterator[tuple[int, int]]:
    """A fresh service of a copy of such a run, which gets another step each second.

    Yields port and process id.
    """
    port, over = free_port(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="page", dir=ROOT / "runs") as name:
        folder, rows = Path(name), copy.deepcopy(run[1])
        shutil.copytree(run[0], folder, dirs_exist_ok=True)
        trainer = threading.Thread(target=_train, args=(folder, rows, over), daemon=True)
        store = folder / "rollouts.db"
        command = roles.service("127.0.0.1", port, store=store, run_folder=folder, no_ui=not page)
        with server(command, port, ROOT) as pid:
            trainer.start()
            try:
                yield port, pid
            finally:
                over.set()
                trainer.join()


def _train(folder: Path, rows: Rows, over: threading.Event) -> None:
    with (folder / "trainer" / "metrics.jsonl").open("a") as file:
        while not over.wait(1.0):
            file.write(rows.line())
            file.flush()


def under_load(port: int, pid: int, pages: int, groups: int) -> dict[str, float]:
    """One load on a service with so many pages open: what came of it, and processor time of the
    service for a group.
    """
    with open_pages(port, pages):
        put_load(port, CLIENTS, WARM_GROUPS)
        settle(pid)
        before = cpu_seconds(pid)
        result = put_load(port, CLIENTS, groups)
        return result | {"cpu_ms_per_group": (cpu_seconds(pid) - before) / groups * 1e3}


def settle(pid: int) -> None:
    """Return when a process has little to do."""
    deadline, busy = time.monotonic() + SETTLE_SECONDS, math.inf
    while busy > QUIET_SHARE * QUIET_SECONDS:
        if time.monotonic() > deadline:
            sys.exit(
                f"error: the service still takes {busy / QUIET_SECONDS:.0%} of a core {SETTLE_SECONDS:g} s after its load"
            )
        used = cpu_seconds(pid)
        time.sleep(QUIET_SECONDS)
        busy = cpu_seconds(pid) - used


def interval(shares: Sequence[float]) -> dict[str, float]:
    """The mean of some shares, two or more, and the interval in which it is with 95 %."""
    mean, free = statistics.fmean(shares), len(shares) - 1
    t = 1.960 + 2.372 / free + 2.823 / free**2  # its expansion: exact to three digits
    if free <= len(T95):
        t = T95[free - 1]
    half = t * statistics.stdev(shares) / len(shares) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def grown(
    runs: dict[str, list[dict[str, float]]], key: str, most: bool = False
) -> dict[str, float]:
    """By what share a figure is worse with pages: of each round's two loads of a kind, the sums are
    compared.

    Args:
        most: a rate, which is worse if it is less.
    """
    bare, paged = (
        [one[key] + other[key] for one, other in zip(of[::2], of[1::2], strict=True)]
        for of in runs.values()
    )
    return interval(
        [(one / other if most else other / one) - 1 for one, other in zip(bare, paged, strict=True)]
    )


def yes(good: bool) -> str:
    """Return a verdict's word."""
    if good:
        return "yes"
    return "no"


def said(share: dict[str, float]) -> str:
    """A share with its interval, in words."""
    return f"{share['mean']:+.1%} ({share['low']:+.1%} to {share['high']:+.1%})"


def compare(rounds: int, groups: int, steps: int) -> dict[str, Any]:
    """Rounds of four loads, both kinds twice, so that both meet the same machine."""
    runs: dict[str, list[dict[str, float]]] = {BARE: [], PAGED: []}
    with long_run(steps) as run, service(False, run) as bare, service(True, run) as paged:
        at = {BARE: (*bare, 0), PAGED: (*paged, PAGES)}
        for number in range(rounds):
            for kind in (
                (BARE, PAGED, PAGED, BARE) if number % 2 == 0 else (PAGED, BARE, BARE, PAGED)
            ):
                runs[kind].append(under_load(*at[kind], groups))
            if number:
                print(
                    f"round {number + 1}: processor time {said(grown(runs, 'cpu_ms_per_group'))} so far",
                    flush=True,
                )
    middle = {
        kind: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for kind, found in runs.items()
    }
    slower = {
        "processor": grown(runs, "cpu_ms_per_group"), "p50": grown(runs, "p50"),
        **{what: grown(runs, what, most=True) for what in ("posted", "drained")},
    }  # fmt: skip
    verdict = {}
    for what, share in slower.items():
        decided = share["high"] <= MOST_SLOWER or share["low"] > MOST_SLOWER
        verdict[f"ten pages cost at most 5 % of {what}"] = "not decided"
        if decided:
            verdict[f"ten pages cost at most 5 % of {what}"] = yes(share["high"] <= MOST_SLOWER)
        print(f"{what:10} {said(share)}")
    return {
        "rounds": rounds, "groups": groups, "clients": CLIENTS, "steps": steps, "groups_before": WARM_GROUPS, "runs": runs,
        "medians": middle, "slower": {PAGED: slower}, "verdict": verdict,
    }  # fmt: skip


def memory_of_service(loads: int, groups: int, steps: int) -> dict[str, Any]:
    """The service's memory after each of some loads, while ten pages are open."""
    found = []
    with long_run(steps) as run, service(True, run) as (port, pid), open_pages(port, PAGES):
        for number in range(loads):
            put_load(port, CLIENTS, groups)
            found.append(rss_mib(pid))
            print(f"after load {number + 1}: {found[-1]:.0f} MiB", flush=True)
    half = len(found) // 2
    growth = 0.0
    if half > 1:
        growth = statistics.fmean(found[half:]) - statistics.fmean(found[half // 2 : half])
    verdict = {f"grows by at most {MOST_GROWTH_MIB:g} MiB": yes(growth <= MOST_GROWTH_MIB)}
    return {
        "loads": loads,
        "groups": groups,
        "pages": PAGES,
        "rss_mib": found,
        "growth_mib": growth,
        "verdict": verdict,
    }


@contextmanager
def viewed(folder: Path) -> Iterator[tuple[int, int]]:
    """The page of a folder by a fresh process, of whose files the system has nothing in memory.

    Yields port and process id.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            forget_cached(path)
    port = free_port()
    with server(
        [sys.executable, "-m", "atroposlib.cli.view_run", str(folder), "--port", str(port)],
        port,
        ROOT,
        "/ui",
    ) as pid:
        yield port, pid


def asked(port: int, path: str) -> tuple[float, Any]:
    """Seconds for an address, and its JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    began = time.perf_counter()
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    seconds = time.perf_counter() - began
    connection.close()
    if answer.status != 200:
        sys.exit(f"error: {path}: {answer.status} {body[:300]!r}")
    return seconds, json.loads(body) if body.startswith(b"{") else None


def peak_mib(pid: int) -> float:
    """The most memory that a process ever had resident, in MiB."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def look(folder: Path, paths: Sequence[str]) -> dict[str, float]:
    """A fresh process is asked for some addresses. The figures are seconds at first, of the
    processor too, and again (the median of three), and its memory at most.
    """
    with viewed(folder) as (port, pid):
        before = cpu_seconds(pid)
        first = sum(asked(port, path)[0] for path in paths)
        used = cpu_seconds(pid) - before
        again = statistics.median(sum(asked(port, path)[0] for path in paths) for _ in range(3))
        return {"first": first, "first_processor": used, "again": again, "peak_mib": peak_mib(pid)}


def lists_of(folder: Path, middle: int) -> dict[str, dict[str, float]]:
    """Every list of the rollouts of a run, and one group."""
    found = {}
    for name, query in LISTS.items():
        path = f"/ui/api/rollouts?{query.format(middle=middle)}"
        found[name] = look(folder, ["/ui/rollouts", path])
    group = middle // GROUP_SIZE
    pages = [
        f"/ui/rollouts/{group}",
        *(f"/ui/api/rollouts/{group}{end}" for end in ("", "/0?count=500", "/1?count=500")),
    ]
    found["one group with two of its rollouts"] = look(folder, pages)
    for name, row in found.items():
        print(
            f"  {name:35} " + " ".join(f"{key}={value:.3g}" for key, value in row.items()),
            flush=True,
        )
    return found


def whole_search(folder: Path) -> dict[str, float]:
    """A text that the oldest rollout alone has, searched for until it is found."""
    with viewed(folder) as (port, _):
        longest = seconds = searched = requests = 0.0
        cursor = ""
        while True:
            took, told = asked(port, f"/ui/api/rollouts?text={NEEDLE}&limit=1{cursor}")
            longest, seconds, requests = max(longest, took), seconds + took, requests + 1
            searched += told["searched"]
            if told["rollouts"] or told["next"] is None:
                break
            cursor = f"&cursor={quote(told['next'])}"
    return {
        "seconds": seconds,
        "longest": longest,
        "requests": requests,
        "searched": searched,
        "found": len(told["rollouts"]),
    }


def opening(steps: int, rollouts: int) -> dict[str, Any]:
    """Measure the time to open a long run, part by part, and the work for a group that is kept."""
    with tempfile.TemporaryDirectory(prefix="page", dir=ROOT / "runs") as name:
        folder = Path(name)
        archive = folder / "observed" / "rollouts.db"
        write_figures(folder, steps)
        kept = write_archive(archive, min(5000, rollouts // GROUP_SIZE))
        few = lists_of(folder, kept["groups"] * GROUP_SIZE // 2)
        size = multiply(archive, rollouts)
        print(f"{size['rollouts']} rollouts, {size['file_bytes'] / 2**20:.0f} MiB", flush=True)
        many = lists_of(folder, size["rollouts"] // 2)
        overview = look(folder, ["/ui", *OVERVIEW])
        weights = look(folder, ["/ui/weights", "/ui/api/weights", "/ui/api/stack"])
        print(f"overview {overview}, weights {weights}", flush=True)
        search = whole_search(folder)
        full = Archive(archive, most_rollouts=size["rollouts"])
        seconds = keep(full, 400)
        full.close()
    slowest = max([*many.values(), overview, weights], key=lambda row: row["first"])["first"]
    small = all(
        row["peak_mib"] - few[name]["peak_mib"] <= MOST_GROWTH_MIB for name, row in many.items()
    )
    verdict = {
        f"everything opens within {MOST_SECONDS:g} s": yes(slowest <= MOST_SECONDS),
        "memory is that of a small archive": yes(small),
        "within the bytes that are kept by default": yes(size["counted_bytes"] <= MAX_BYTES),
    }
    keeping = {
        "empty_ms_per_group": kept["processor_ms_per_group"],
        "full_ms_per_group": seconds * 1e3,
    }
    return {
        "steps": steps, **size, "slowest": slowest, "overview": overview, "weights": weights, "rollouts_lists": many,
        "small_archive": {"rollouts": kept["groups"] * GROUP_SIZE, "lists": few}, "search": search, "keeping": keeping,
        "peak_mib": max(row["peak_mib"] for row in [*many.values(), overview, weights]), "verdict": verdict,
    }  # fmt: skip


OPTIONS: Options = {
    "--parts": {"nargs": "+", "choices": PARTS, "default": PARTS, "help": "default: all"},
    "--rounds": {
        "type": int,
        "default": 20,
        "help": "of four loads each (default: 20, ten minutes)",
    },
    "--groups": {"type": int, "default": 1536, "help": "of each load (default: 1536)"},
    "--loads": {"type": int, "default": 10, "help": "of the part of memory (default: 10)"},
    "--steps": {"type": int, "default": 10_000, "help": "of the long run (default: 10000)"},
    "--rollouts": {"type": int, "default": 1_000_000, "help": "of the long run (default: 1000000)"},
    "--out": {"type": Path, "default": RESULTS},
    "--hold-open": {"type": int, "help": argparse.SUPPRESS},
    "--port": {"type": int, "help": argparse.SUPPRESS},
}


def main() -> None:
    """Run what was asked for, and add it to the results file."""
    parser = command_line(__doc__, OPTIONS)
    arguments = parser.parse_args()
    if arguments.hold_open:
        asyncio.run(hold_open(arguments.port, arguments.hold_open))
        return
    if arguments.rounds < 2:
        parser.error(f"--rounds {arguments.rounds}: give at least 2")
    os.makedirs(ROOT / "runs", exist_ok=True)
    if not LOAD.exists() and set(arguments.parts) != {"open"}:
        parser.error(
            "../shared/bench/api_load.py, the load, is not there: only --parts open can be measured"
        )
    for part in arguments.parts:
        described = {"machine": machine(), "measured": measured()}
        if part == "load":
            found = compare(arguments.rounds, arguments.groups, arguments.steps)
        elif part == "memory":
            found = memory_of_service(arguments.loads, 2 * arguments.groups, arguments.steps)
        else:
            found = opening(arguments.steps, arguments.rollouts)
        put_into(arguments.out, part, described | found)
        for text, good in found["verdict"].items():
            print(f"{good:>11}  {text}", flush=True)


if __name__ == "__main__":
    main()
