"""Measure how many generators one rollout service serves. Simulated time: generators sleep as long
as a model would take.

    python bench/async_scaling.py --output DIR                    1, 2, 4, … 64 generators, then as fast as it goes
    python bench/async_scaling.py --output DIR --into bench/results/async.json

Service, store, wire and connections are real. A generator samples at the rate of one H200 with
Qwen3-1.7B (bench/results/generate_cost.json): in between it sleeps. The trainer takes batches and
acknowledges them. Two parts:

    generators   tokens a second that arrive, against the number of generators; the service's share of a core; a post's time
    saturation   posts as fast as some connections can, with a trainer that takes them; and a full queue that is only drained

Writes async_scaling.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from bench.gpu.processes import BenchError, Task, free_port
from bench.gpu.runs import INTO, Results, run_and_report
from bench.gpu.summary import result_table
from bench.measured import Options, command_line
from bench.rollout_api_load import cpu_seconds, machine, ours, server
from bench.sleeping_roles import Caller, Work, work_of

MODULE = "bench.sleeping_roles"
RAMP_SECONDS = 2.0
START_SECONDS = 0.25
"""For each process that has to start on these cores."""
MODEL = ("generate_cost", "ways/numbers")
"""Where the rate of the model stands that is simulated."""


def quantile(values: list[float], share: float) -> float:
    """Return a quantile of sorted or unsorted values; 0 if there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


class Benchmark:
    """One service for each measurement."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        self.args, self.folder, self.stack = args, work, stack
        model = json.loads(
            (ROOT / "bench" / "results" / f"{MODEL[0]}.json").read_text(encoding="utf-8")
        )
        shown = model["work"]
        self.rate = float(model["ways"]["numbers"]["tokens_per_second"])
        self.work = work_of(self.rate, shown["in_flight"], shown["group"], shown["mean_tokens"])
        simulated = {
            **asdict(self.work),
            "tokens_per_second": round(self.rate),
            "model": shown["shape"],
            "from": MODEL[0],
        }
        settings = {"seconds": args.seconds, "batch": args.batch, "simulated": simulated}
        self.results = Results(args.output / "async_scaling.json", settings=settings)

    def run(self) -> None:
        """Measure both parts."""
        self.results.put("machine", value=machine())
        for number in self.args.generators:
            self.results.measure(
                "generators", str(number), run=partial(self._generators, number, self.work)
            )
        rushed = replace(self.work, in_flight=1, seconds=0.0)
        self.results.measure(
            "saturation", "service", run=partial(self._generators, self.args.clients, rushed)
        )
        self.results.measure("saturation", "drain", run=self._drain)

    def _task(self, name: str, seconds: float, **asked: Any) -> Task:
        task = Task(name, MODULE, asked, self.args.output, seconds)
        self.stack.callback(task.stop)
        return task

    def _registered(self, port: int) -> None:
        """Register a trainer, without which no environment is let in."""
        caller = Caller(port)
        registration = {
            "wandb_group": "g",
            "wandb_project": "p",
            "batch_size": self.args.batch,
            "checkpoint_dir": "x",
        }
        registration |= {
            "max_token_len": self.work.tokens + 1,
            "save_checkpoint_interval": 0,
            "starting_step": 0,
        }
        caller.json("POST", "/register", registration | {"num_steps": 10**6, "ack_batches": True})
        caller.json("GET", "/batch")

    def _generators(self, number: int, work: Work) -> dict[str, Any]:
        """So many generators, and a trainer that takes what they post."""
        args, port = self.args, free_port()
        with (
            tempfile.TemporaryDirectory(dir=self.folder) as folder,
            server(ours(port, Path(folder)), port, ROOT) as pid,
        ):
            self._registered(port)
            begin = time.monotonic() + 1.0 + START_SECONDS * (number + 1)
            count_from = begin + RAMP_SECONDS
            end = count_from + args.seconds
            limits = {"port": port, "count_from": count_from, "end": end}
            deadline = end - time.monotonic() + 60
            batch_groups = args.batch // work.group
            tasks = [
                self._task("trainer", deadline, role="trainer", batch_groups=batch_groups, **limits)
            ]
            tasks += [
                self._task(
                    f"generator {n}",
                    deadline,
                    role="generator",
                    seed=n,
                    begin=begin,
                    work=asdict(work),
                    **limits,
                )
                for n in range(number)
            ]
            time.sleep(max(0.0, count_from - time.monotonic()))
            used = cpu_seconds(pid)
            time.sleep(max(0.0, end - time.monotonic()))
            used = cpu_seconds(pid) - used
            late = time.monotonic() - end
            queued = Caller(port).json("GET", "/status")["queue_size"]
            trainer, *generators = [task.answer() for task in tasks]
            for task in tasks:
                task.stop()
        posted = sum(found["posted"] for found in generators)
        seconds = [took for found in generators for took in found["post_seconds"]]
        if late > 1.0:
            raise BenchError(f"this machine is too busy: the counting ended {late:.1f} s late")
        return {
            "generators": number,
            "groups_per_second": round(posted / args.seconds, 2),
            "tokens_per_second": round(posted * work.group * work.tokens / args.seconds),
            "offered_tokens_per_second": round(number * self.rate) if work.seconds else None,
            "trained_groups_per_second": round(trainer["groups"] / args.seconds, 2),
            "trainer_busy_share": round(trainer["busy_seconds"] / args.seconds, 4),
            "service_core_share": round(used / args.seconds, 4),
            "service_ms_per_group": round(1e3 * used / posted, 3) if posted else None,
            "post_ms": {
                "p50": round(1e3 * quantile(seconds, 0.5), 2),
                "p99": round(1e3 * quantile(seconds, 0.99), 2),
            },
            "refused": sum(found["refused"] for found in generators),
            "queued_at_the_end": queued,
            "body_bytes": statistics.fmean(found["body_bytes"] for found in generators),
        }

    def _drain(self) -> dict[str, Any]:
        """A queue that is full, and a trainer that empties it: how fast can one take and
        acknowledge?
        """
        args, port, work = self.args, free_port(), replace(self.work, in_flight=1, seconds=0.0)
        with (
            tempfile.TemporaryDirectory(dir=self.folder) as folder,
            server(ours(port, Path(folder)), port, ROOT) as pid,
        ):
            self._registered(port)
            begin = time.monotonic() + 1.0
            limits = {"port": port, "count_from": begin, "end": begin + args.seconds}
            fill = self._task(
                "filler",
                2 * args.seconds + 60,
                role="generator",
                seed=0,
                begin=begin,
                work=asdict(work),
                **limits,
            )
            groups = fill.answer()["posted"]
            groups -= groups % (args.batch // work.group)
            if not groups:
                raise BenchError("nothing could be posted")
            began = time.monotonic() + 1.0
            limits = {
                "port": port,
                "count_from": 0.0,
                "end": began + 4 * args.seconds,
                "groups": groups,
            }
            used = cpu_seconds(pid)
            drain = self._task(
                "drainer",
                4 * args.seconds + 60,
                role="trainer",
                batch_groups=args.batch // work.group,
                **limits,
            )
            found = drain.answer()
            used = cpu_seconds(pid) - used
        rate = found["groups"] / found["busy_seconds"]
        return {
            "groups": found["groups"],
            "groups_per_second": round(rate, 2),
            "tokens_per_second": round(rate * work.group * work.tokens),
            "service_ms_per_group": round(1e3 * used / found["groups"], 3),
        }


COLUMNS = {
    "groups/s": "groups_per_second",
    "tokens/s": "tokens_per_second",
    "offered": "offered_tokens_per_second",
    "of a core": "service_core_share",
    "CPU ms a group": "service_ms_per_group",
    "post p50 ms": "post_ms/p50",
    "p99": "post_ms/p99",
    "failed": "failed",
}


def report(data: dict[str, Any]) -> str:
    """Format the table of a results file."""
    rows = {**data.get("generators", {}), **data.get("saturation", {})}
    return "\n".join(result_table(rows, COLUMNS, "generators (asleep)"))


OPTIONS: Options = {
    "--output": {"type": Path, "required": True, "help": "folder for the results and the logs"},
    "--generators": {"type": int, "nargs": "+", "default": [1, 2, 4, 8, 16, 32, 64]},
    "--seconds": {"type": float, "default": 15.0, "help": "that are counted, of each measurement"},
    "--batch": {"type": int, "default": 256, "help": "sequences of a batch"},
    "--clients": {"type": int, "default": 8, "help": "connections that post as fast as they can"},
    **INTO,
}


def main(arguments: list[str] | None = None) -> int:
    args = command_line(__doc__, OPTIONS).parse_args(arguments)
    return run_and_report(args, Benchmark, report, "scaling")


if __name__ == "__main__":
    sys.exit(main())
