"""Measure how fast a parameter server takes weights and hands them on. To light vLLM servers
without an engine, on this machine.

    python bench/parameter_server.py --output DIR --device cpu                               1, 2 and 4 of them
    python bench/parameter_server.py --output DIR --shape qwen3-1.7b                         on one or two GPUs, by every route
    python bench/parameter_server.py --output DIR --device cpu --into bench/results/async.json

It takes about two minutes. On CPUs the weights go the way of a run on one machine. That is memory
that receivers read in place, and Gloo if they share none. (`read_in_place` in the results counts
the servers that read it.) On GPUs each route is tried: all on one GPU (CUDA IPC), and the parameter
server in the host's memory. Where there are two GPUs, it is also on one of its own (NCCL). A
trainer pushes one version after the other and waits for the servers in between. So a push and a
pull do not share the cores. At the end the servers must hold its weights, by their checksums. The
duration of a pull comes from the parameter server's own record (docs/timelines.md). Writes
parameter_server.json.
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
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import torch

from bench.gpu.light_fleet import LightFleet
from bench.gpu.processes import BenchError, Child, free_port, tail, wait_all
from bench.gpu.runs import (
    ASK_SECONDS,
    INTO,
    TRAINER_TIMEOUT,
    Sitting,
    common_options,
    run_and_report,
    shrink_if_tiny,
)
from bench.gpu.shapes import write_model_folder
from bench.gpu.summary import result_table
from bench.gpu.trainer import trainer_arguments
from bench.gpu.training_stack import answers
from bench.measured import Options, command_line
from bench.timeline_spans import read_folder
from example_trainer.launcher import roles
from vllm_patching.protocol.timeline import VARIABLE


@dataclass(frozen=True)
class Way:
    """Where the weights are, and so how they travel. The trainer's are on the first GPU, if there
    is one.

    Attributes:
        holder, servers: the devices of the parameter server's and of each vLLM server's weights.
    """

    holder: str
    servers: tuple[str, ...]

    @property
    def needs(self) -> int:
        """GPUs."""
        return 1 + max(
            (int(device[5:]) for device in (self.holder, *self.servers) if device != "cpu"),
            default=-1,
        )


def ways(on_gpu: bool, numbers: list[int]) -> dict[str, Way]:
    """Return the ways to measure, by name.

    NCCL connects no two processes on one GPU, so one server is all it can have there.
    """
    if not on_gpu:
        return {str(number): Way("cpu", ("cpu",) * number) for number in numbers}
    found = {
        "GPU to GPU": Way("cuda:1", ("cuda:0",)),
        "one GPU and another": Way("cuda:0", ("cuda:0", "cuda:1")),
    }
    found |= {f"one GPU, {number}": Way("cuda:0", ("cuda:0",) * number) for number in numbers}
    return {**found, f"host memory, {numbers[0]}": Way("cpu", ("cuda:0",) * numbers[0])}


class Benchmark(Sitting):
    """A parameter server of its own for each way."""

    def run(self) -> None:
        """All ways that were asked for, and that this machine has the GPUs for."""
        args = self.args
        self.describe(shape=args.shape, load_average_before=os.getloadavg())
        self.model = write_model_folder(self.work / "model", args.shape)
        self.fleet = LightFleet(args.shape, args.output, TRAINER_TIMEOUT)
        self.stack.callback(self.fleet.stop)
        self.ports: list[tuple[str, int]] = []
        gpus = torch.cuda.device_count() if self.on_gpu else 0
        for name, way in ways(self.on_gpu, args.servers).items():
            if way.needs <= gpus:
                self.results.measure("servers", name, run=partial(self._measure, name, way))
            else:
                print(f"skipped {name}: needs {way.needs} GPUs, there are {gpus}")

    def _servers(self, devices: tuple[str, ...]) -> list[int]:
        """The ports of vLLM servers with weights there; they are kept for the next way."""
        free, found = list(self.ports), []
        for device in devices:
            place = next((place for place in free if place[0] == device), None)
            if place is None:
                place = (device, self.fleet.start(self.work / f"light-{len(self.ports)}", device))
                self.ports.append(place)
            else:
                free.remove(place)
            found.append(place[1])
        return found

    def _measure(self, name: str, way: Way) -> dict[str, Any]:
        port, ports = free_port(), self._servers(way.servers)
        mark = re.sub(r"\W+", "-", name)
        folder = self.work / f"timeline-{mark}"
        command = roles.parameter_server(
            self.model,
            None,
            [f"127.0.0.1:{each}" for each in ports],
            port=port,
            device=way.holder,
            bridge_timeout=TRAINER_TIMEOUT,
            dtype=roles.weights_dtype(self.on_gpu),
            log_dir=self.work,
        )
        log = self.args.output / f"parameter-server-{mark}.log"
        threads = {} if self.on_gpu else {"OMP_NUM_THREADS": "1"}
        holder = Child("parameter server", command, log, {VARIABLE: str(folder), **threads})
        self.stack.callback(holder.stop)
        wait_all({"parameter server": lambda: answers(f"http://127.0.0.1:{port}/weights")}, 90)
        arguments = trainer_arguments(self.args.shape, port, self.args.device, TRAINER_TIMEOUT)
        trainer = self.worker(f"trainer of {mark}", "bench.gpu.trainer", arguments)
        size = trainer.ask("load", timeout=180, spare=True)["model_bytes"]
        trainer.ask(
            "connect", timeout=ASK_SECONDS, kind="broadcast", transfer="overlapped", ports=[port]
        )
        self._until_all_serve(ports, port, log)
        pushes = []
        for _ in range(self.args.updates):
            (row,) = trainer.ask("sync", timeout=ASK_SECONDS, count=1)
            pushes.append(row["end"] - row["start"])
            self._until_all_serve(ports, port, log)
        if different := [
            each
            for each in ports
            if not trainer.ask("is_served_by", timeout=ASK_SECONDS, port=each)
        ]:
            raise BenchError(
                f"the vLLM servers at {different} do not hold the trainer's weights:\n{tail(log)}"
            )
        trainer.stop()
        holder.stop()
        processes, _ = read_folder(folder)
        pulls = [(s.end - s.begin) / 1e9 for p in processes for s in p.spans if s.what == "pull"][
            -self.args.updates :
        ]
        push, pull = statistics.median(pushes), statistics.median(pulls)
        return {
            "updates": len(pulls),
            "read_in_place": read_in_place(log, len(ports)),
            "model_bytes": size,
            "push_ms": round(1e3 * push, 1),
            "pull_ms": round(1e3 * pull, 1),
            "push_gb_per_second": round(size / push / 1e9, 3),
            "pull_gb_per_second": round(size / pull / 1e9, 3),
            "delivered_gb_per_second": round(len(ports) * size / pull / 1e9, 3),
        }

    def _until_all_serve(self, ports: list[int], holder: int, log: Path) -> None:
        """Wait until all have the same version, which is that of the parameter server at port
        `holder`.
        """
        deadline = time.monotonic() + TRAINER_TIMEOUT
        while True:
            states = [
                httpx.get(f"http://127.0.0.1:{port}/bridge/state", timeout=30).json()
                for port in ports
            ]
            held = [
                state["weight_version"]
                for state in states
                if state["healthy"] and state["target_version"] is None
            ]
            if len(held) == len(ports) and len(set(held)) == 1 and held[0] == _held(holder):
                return
            if time.monotonic() > deadline:
                raise BenchError(
                    f"the servers are at {held} after {TRAINER_TIMEOUT:g} s:\n{tail(log)}"
                )
            time.sleep(0.05)


def _held(port: int) -> int:
    version: int = httpx.get(f"http://127.0.0.1:{port}/weights", timeout=30).json()[
        "weight_version"
    ]
    return version


def read_in_place(log: Path, servers: int) -> int:
    """Count the vLLM servers that read a parameter server's memory in place, by its last log line."""
    told = re.findall(
        rf"The weights are read where they are by (\d+) of {servers} receivers",
        log.read_text(errors="replace"),
    )
    return int(told[-1]) if told else 0


COLUMNS = {
    "push ms": "push_ms",
    "pull ms": "pull_ms",
    "push GB/s": "push_gb_per_second",
    "pull GB/s": "pull_gb_per_second",
    "delivered GB/s": "delivered_gb_per_second",
    "updates": "updates",
    "failed": "failed",
}


def report(data: dict[str, Any]) -> str:
    """Format the table of a results file."""
    return "\n".join(result_table(data.get("servers", {}), COLUMNS, "vLLM servers"))


OPTIONS: Options = {
    "--servers": {
        "type": int,
        "nargs": "+",
        "help": "vLLM servers; 1, 2 and 4 on a CPU, 1 and 2 on GPUs",
    },
    "--updates": {"type": int, "default": 10},
    **INTO,
}


def main(arguments: list[str] | None = None) -> int:
    options = common_options("parameter_server", "100mb") | OPTIONS
    args = shrink_if_tiny(command_line(__doc__, options).parse_args(arguments))
    section, servers = "parameter_server", [1, 2, 4]
    if args.device == "cuda":
        section, servers = "parameter_server_gpu", [1, 2]
    args.servers = args.servers or servers
    return run_and_report(args, Benchmark, report, section)


if __name__ == "__main__":
    sys.exit(main())
