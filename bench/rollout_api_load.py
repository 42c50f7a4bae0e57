#!/usr/bin/env python3
"""The same load on the public Atropos server and on ours, side by side, and what our memory does
over many groups.

    python bench/rollout_api_load.py                    # both servers in turn, three rounds
    python bench/rollout_api_load.py --memory-groups 100000
    python bench/rollout_api_load.py --load-alone       # on a server that answers at once

Ours keeps every group in SQLite (an answered post is on the disk); the public server keeps them in
memory. The load comes from ../shared/bench/api_load.py: 1,024 groups of 8 x 512 tokens with
logprobs, 16 clients, one trainer that drains. It shares the machine's cores with the server. Prints
a table and writes bench/results/rollout_api_load.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(
    ROOT
)  # run by path: import from the repository, and never a sibling file by a bare name

import http.client
import json
import os
import platform
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.gpu.processes import free_port
from bench.gpu.summary import table
from bench.measured import Options, command_line, measured, read_json
from bench.public_server import PUBLIC, public_python
from example_trainer.child_processes.processes import Supervisor
from example_trainer.launcher import roles

START_SECONDS = 180.0
LOAD = ROOT.parent / "shared" / "bench" / "api_load.py"
RESULT = re.compile(
    r"posted=(?P<posted>\d+) drained=(?P<drained>\d+) p50=(?P<p50>[\d.]+)ms p99=(?P<p99>[\d.]+)ms "
    r"lost=(?P<lost>\d+) dup=(?P<dup>\d+) order_inversions=(?P<inversions>\d+)"
)


@contextmanager
def server(command: Sequence[str], port: int, directory: Path, ready: str = "/") -> Iterator[int]:
    """A server process, from its first answer to the path `ready` on. Yields its process id."""
    with tempfile.TemporaryDirectory() as folder, Supervisor() as supervisor:
        log = Path(folder) / "server.log"
        process = supervisor.start("the server", command, log, directory=directory, grace=30.0)
        supervisor.wait_for_http(process, f"http://127.0.0.1:{port}{ready}", START_SECONDS)
        yield process.command_pid()


def cpu_seconds(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Resident memory in MiB."""
    return (
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    )


def put_load(port: int, clients: int, groups: int = 1024) -> dict[str, float]:
    """The load on the server at a port, and what it printed."""
    command: list[str | Path] = [sys.executable, LOAD, f"http://127.0.0.1:{port}"]
    command += ["--clients", str(clients), "--groups", str(groups)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    match = RESULT.search(done.stdout)
    if match is None:
        sys.exit(
            f"error: the load ended with {done.returncode}: {(done.stdout + done.stderr)[-1000:]}"
        )
    return {name: float(value) for name, value in match.groupdict().items()}


def measure(command: Sequence[str], port: int, directory: Path, clients: int) -> dict[str, float]:
    """One run of the load on a fresh server."""
    with server(command, port, directory) as pid:
        before = cpu_seconds(pid)
        result = put_load(port, clients)
        used = cpu_seconds(pid) - before
    return result | {"cpu_ms_per_group": used / 1024 * 1e3}


def ours(port: int, folder: Path) -> list[str]:
    """The command of our service, durable."""
    store = folder / f"rollouts-{port}.db"
    return roles.service("127.0.0.1", port, store=store)


def theirs(port: int) -> list[str]:
    """The command of the public server, isolated from the working directory and PYTHONPATH: its
    package is named as ours.
    """
    return [str(public_python()), "-I", "-m", "atroposlib.cli.run_api", "--port", str(port)]


def load_alone(clients: int) -> dict[str, float]:
    """The load on a server that answers at once: the most that the load can measure."""
    port = free_port()
    command = [sys.executable, str(ROOT / "bench" / "answer_at_once.py"), str(port)]
    return measure(command, port, ROOT, clients)


def compare(rounds: int, clients: int) -> dict[str, list[dict[str, float]]]:
    """Both servers in turn, so that both meet the same machine."""
    runs: dict[str, list[dict[str, float]]] = {"public": [], "ours": []}
    for number in range(rounds):
        for name in runs:
            port = free_port()
            with tempfile.TemporaryDirectory(prefix="rollouts", dir=ROOT / "runs") as folder:
                if name == "public":
                    result = measure(theirs(port), port, Path(folder), clients)
                else:
                    result = measure(ours(port, Path(folder)), port, ROOT, clients)
            runs[name].append(result)
            print(
                f"round {number + 1} {name:6} " + " ".join(f"{k}={v:g}" for k, v in result.items()),
                flush=True,
            )
    return runs


class MemoryLoad:
    """Small groups that are posted and drained without end, for the service's memory.

    A trainer that acknowledges takes batches while four clients post groups of 8 x 64 tokens, at
    most 256 groups ahead of it. A full queue needs memory, and only the rest is of interest here.
    """

    def __init__(self, port: int) -> None:
        self.port, self.ahead = port, threading.Semaphore(256)
        row = list(range(64))
        group = {"tokens": [row] * 8, "masks": [row] * 8, "scores": [0.5] * 8}
        self.body = json.dumps(group | {"inference_logprobs": [[-0.5] * 64] * 8})
        self.trainer = self.connection()

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection to the service."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def call(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        content: str | None = None,
    ) -> bytes | None:
        """Return the answer's body; None if the service refuses for now."""
        connection.request(method, path, content, {"content-type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        if response.status == 429:
            return None
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {data[:200]!r}")
        return data

    def register(self) -> None:
        """Register the trainer."""
        settings = {
            "wandb_group": "g", "wandb_project": "p", "batch_size": 64, "max_token_len": 65,
            "checkpoint_dir": "x", "save_checkpoint_interval": 0, "starting_step": 0,
            "num_steps": 10**6, "ack_batches": True,
        }  # fmt: skip
        self.call(self.trainer, "POST", "/register", json.dumps(settings))

    def post(self, count: int) -> None:
        """Post groups as one client."""
        connection = self.connection()
        for _ in range(count):
            if not self.ahead.acquire(timeout=120):
                raise RuntimeError("the trainer took nothing for 120 s")
            while self.call(connection, "POST", "/scored_data", self.body) is None:
                time.sleep(1)

    def batches(self, groups: int) -> Iterator[int]:
        """Take and acknowledge batches; yield the number of groups taken so far after each."""
        drained, last = 0, time.monotonic()
        while drained < groups - 7:
            answer = json.loads(self.call(self.trainer, "GET", "/batch") or "{}")
            if not answer.get("batch"):
                if time.monotonic() - last > 60:
                    sys.exit(f"error: no batch for 60 s after {drained} groups")
                time.sleep(0.005)
                continue
            last = time.monotonic()
            acknowledged = json.dumps({"batch_id": answer["batch_id"]})
            self.call(self.trainer, "POST", "/batch/ack", acknowledged)
            drained += len(answer["batch"])
            self.ahead.release(len(answer["batch"]))
            yield drained


def flat_memory(groups: int) -> dict[str, Any]:
    """Post and drain so many small groups, and watch the service's memory."""
    port = free_port()
    samples: list[tuple[int, float]] = []
    drained = 0
    with (
        tempfile.TemporaryDirectory(prefix="rollouts", dir=ROOT / "runs") as folder,
        server(ours(port, Path(folder)), port, ROOT) as pid,
    ):
        load = MemoryLoad(port)
        load.register()
        for _ in range(4):
            threading.Thread(target=load.post, args=(groups // 4,), daemon=True).start()
        for drained in load.batches(groups // 4 * 4):
            if drained // (groups // 20) > len(samples):
                samples.append((drained, rss_mib(pid)))
                print(f"{drained:7d} groups: {samples[-1][1]:.0f} MiB", flush=True)
        file_mib = sum(path.stat().st_size for path in Path(folder).iterdir()) / 2**20
    first, last = samples[len(samples) // 4][1], samples[-1][1]
    return {
        "groups": drained,
        "rss_mib": samples,
        "growth_mib_after_first_quarter": last - first,
        "store_mib": file_mib,
    }


def machine() -> dict[str, Any]:
    """Describe the machine."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cpu": cpu.group(1) if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory.group(1)) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_before": os.getloadavg(),
    }


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Print medians side by side; return them with the verdicts."""
    middle = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for name, found in runs.items()
    }
    rows = []
    for key, text in (
        ("posted", "groups/s posted"),
        ("drained", "groups/s drained"),
        ("p50", "post p50, ms"),
        ("p99", "post p99, ms"),
        ("cpu_ms_per_group", "server CPU, ms per group"),
        ("lost", "lost"),
        ("dup", "doubled"),
        ("inversions", "ids out of order"),
    ):
        public, mine = middle["public"][key], middle["ours"][key]
        rows.append([text, public, mine, mine / public if public else None])
    print(
        "\n"
        + table([f"median of {len(runs['ours'])} rounds", "public", "ours", "ours/public"], rows)
    )
    verdict = {
        "posted at least 4 x": middle["ours"]["posted"] >= 4 * middle["public"]["posted"],
        "drained at least 6 x": middle["ours"]["drained"] >= 6 * middle["public"]["drained"],
        "p99 no worse": middle["ours"]["p99"] <= middle["public"]["p99"],
        "nothing lost or doubled": all(run["lost"] == run["dup"] == 0 for run in runs["ours"]),
    }
    for text, good in verdict.items():
        print(f"{'yes' if good else 'NO':>4}  {text}")
    return {"medians": middle, "verdict": verdict}


OPTIONS: Options = {
    "--rounds": {"type": int, "default": 3, "help": "runs of each server (default: 3)"},
    "--clients": {"type": int, "default": 16, "help": "connections that post (default: 16)"},
    "--memory-groups": {
        "type": int,
        "metavar": "N",
        "help": "instead, post and drain N groups and watch the memory",
    },
    "--load-alone": {
        "action": "store_true",
        "help": "instead, put the load on a server that answers at once",
    },
    "--out": {"type": Path, "default": ROOT / "bench" / "results" / "rollout_api_load.json"},
}


def main() -> None:
    """Run what was asked for, and add it to the results file."""
    arguments = command_line(__doc__, OPTIONS).parse_args()
    (ROOT / "runs").mkdir(exist_ok=True)
    results = read_json(arguments.out)
    described = machine()
    if arguments.memory_groups:
        results["memory"] = {
            "machine": described,
            "measured": measured(),
            **flat_memory(arguments.memory_groups),
        }
    elif not LOAD.exists():
        print("skipped: ../shared/bench/api_load.py, the load that both servers get, is not there")
        return
    elif arguments.load_alone:
        alone = load_alone(arguments.clients)
        print(" ".join(f"{name}={value:g}" for name, value in alone.items()))
        results["load alone"] = {"machine": described, "measured": measured(), **alone}
    else:
        runs = compare(arguments.rounds, arguments.clients)
        name = "load"
        if arguments.clients != 16:
            name = f"load, {arguments.clients} clients"
        results[name] = {
            "machine": described,
            "measured": measured(),
            "public_server": PUBLIC,
            "clients": arguments.clients,
            "runs": runs,
            **compared(runs),
        }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
