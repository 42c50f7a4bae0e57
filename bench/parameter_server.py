"""How fast does a parameter server take weights, and hand them on? To light vLLM servers without an engine, on this machine.

    python bench/parameter_server.py --output DIR --device cpu                               1, 2 and 4 of them
    python bench/parameter_server.py --output DIR --device cpu --into bench/results/async.json

All of it takes about two minutes on two cores. The weights go the way that a run's on one machine would: through memory that
receivers read where it is, and Gloo where there is none to share (`read_in_place` in the results says how many read it).
A trainer pushes one version after the other and waits for the servers in between, so that a push and a pull do not share the
cores. How long a pull takes is what the parameter server wrote down itself (docs/timelines.md). Writes parameter_server.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import os
import re
import statistics
import time
from functools import partial
from typing import Any

import httpx

from bench.gpu.light_fleet import LightFleet
from bench.gpu.processes import BenchError, Child, free_port, tail, wait_all
from bench.gpu.runs import ASK_SECONDS, TRAINER_TIMEOUT, Sitting, command_line, run_and_report
from bench.gpu.shapes import write_model_folder
from bench.gpu.summary import table
from bench.gpu.trainer import trainer_arguments
from bench.gpu.training_stack import answers
from bench.measured import put_into
from bench.timeline_spans import read_folder
from vllm_patching.protocol.timeline import VARIABLE


class Benchmark(Sitting):
    """A parameter server of its own for each number of vLLM servers."""

    def run(self) -> None:
        """All numbers that were asked for."""
        args = self.args
        if self.on_gpu:
            raise BenchError("only --device cpu has been written: the light servers have no GPU")
        self.describe(shape=args.shape, load_average_before=os.getloadavg())
        self.model = write_model_folder(self.work / "model", args.shape)
        fleet = LightFleet(args.shape, args.output, TRAINER_TIMEOUT)
        self.stack.callback(fleet.stop)
        self.ports = [fleet.start(self.work / f"light-{number}") for number in range(max(args.servers))]
        for number in args.servers:
            self.results.measure("servers", str(number), run=partial(self._measure, number))
        if args.into and not self.results.failures:
            put_into(args.into, "parameter_server", self.results.data)

    def _measure(self, number: int) -> dict[str, Any]:
        port, ports = free_port(), self.ports[:number]
        folder = self.work / f"timeline-{number}"
        command = [sys.executable, "-u", "-m", "example_trainer.parameter_server", "--model-name", str(self.model)]
        command += ["--port", str(port), "--device", "cpu", "--bridge-timeout", f"{TRAINER_TIMEOUT:g}"]
        command += ["--log-dir", str(self.work), "--vllm-servers", ",".join(f"127.0.0.1:{each}" for each in ports)]
        log = self.args.output / f"parameter-server-{number}.log"
        holder = Child("parameter server", command, log, {VARIABLE: str(folder), "OMP_NUM_THREADS": "1"}, pipes=False)
        self.stack.callback(holder.stop)
        wait_all({"parameter server": lambda: answers(f"http://127.0.0.1:{port}/weights")}, 90)
        arguments = trainer_arguments(self.args.shape, port, "cpu", TRAINER_TIMEOUT)
        trainer = self.worker(f"trainer of {number}", "bench.gpu.trainer", arguments)
        size = trainer.ask("load", timeout=180, spare=True)["model_bytes"]
        trainer.ask("connect", timeout=ASK_SECONDS, kind="broadcast", transfer="overlapped", ports=[port])
        self._until_all_serve(ports, holder)
        pushes = []
        for _ in range(self.args.updates):
            (row,) = trainer.ask("sync", timeout=ASK_SECONDS, count=1)
            pushes.append(row["end"] - row["start"])
            self._until_all_serve(ports, holder)
        trainer.stop()
        holder.stop()
        processes, _ = read_folder(folder)
        pulls = [(s.end - s.begin) / 1e9 for p in processes for s in p.spans if s.what == "pull"][-self.args.updates :]
        push, pull = statistics.median(pushes), statistics.median(pulls)
        return {
            "updates": len(pulls),
            "read_in_place": read_in_place(log, number),
            "model_bytes": size,
            "push_ms": round(1e3 * push, 1),
            "pull_ms": round(1e3 * pull, 1),
            "push_gb_per_second": round(size / push / 1e9, 3),
            "pull_gb_per_second": round(size / pull / 1e9, 3),
            "delivered_gb_per_second": round(number * size / pull / 1e9, 3),
        }

    def _until_all_serve(self, ports: list[int], holder: Child) -> None:
        """Wait until all have the same version, which is the parameter server's."""
        deadline = time.monotonic() + TRAINER_TIMEOUT
        while True:
            states = [httpx.get(f"http://127.0.0.1:{port}/bridge/state", timeout=30).json() for port in ports]
            held = [state["weight_version"] for state in states if state["healthy"] and state["target_version"] is None]
            if len(held) == len(ports) and len(set(held)) == 1 and held[0] == self._held(holder):
                return
            if time.monotonic() > deadline:
                raise BenchError(f"the servers are at {held} after {TRAINER_TIMEOUT:g} s:\n{tail(holder.log)}")
            time.sleep(0.05)

    def _held(self, holder: Child) -> int:
        port = holder.process.args[holder.process.args.index("--port") + 1]  # type: ignore[union-attr,index]
        version: int = httpx.get(f"http://127.0.0.1:{port}/weights", timeout=30).json()["weight_version"]
        return version


def read_in_place(log: Path, servers: int) -> int:
    """How many of so many vLLM servers read a parameter server's memory where it is, as its log last said."""
    told = re.findall(rf"The weights are read where they are by (\d+) of {servers} receivers", log.read_text(errors="replace"))
    return int(told[-1]) if told else 0


def report(data: dict[str, Any]) -> str:
    """The table of a results file."""
    keys = ("push_ms", "pull_ms", "push_gb_per_second", "pull_gb_per_second", "delivered_gb_per_second", "updates")
    rows = [
        [number, *(found.get(key, found.get("failed", "")) for key in keys)]
        for number, found in data.get("servers", {}).items()
    ]
    return table(["vLLM servers", "push ms", "pull ms", "push GB/s", "pull GB/s", "delivered GB/s", "updates"], rows)


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__, shape="100mb", name="parameter_server")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--into", type=Path, help="results file that gets the figures, if nothing failed")
    args = parser.parse_args(arguments)
    args.output, args.shape = args.output.resolve(), "tiny" if args.tiny else args.shape
    return run_and_report(args.output, lambda work, stack: Benchmark(args, work, stack, args.name), report)


if __name__ == "__main__":
    sys.exit(main())
