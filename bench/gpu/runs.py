"""The common harness of benchmarks: options, processes that end with the run, results that survive
a failure, updates under load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx

from bench.gpu import engine_clock
from bench.gpu.machine import describe
from bench.gpu.processes import BenchError, Worker, device_variables, ended_by_sigterm, wait_all
from bench.gpu.shapes import SHAPES, tiny_of
from bench.gpu.summary import find_halts, gigabytes_per_second, spread_by_phase, spread_ms
from bench.gpu.trainer import trainer_arguments
from bench.gpu.vllm_server import READY_SECONDS, ServerOptions, VllmServer
from bench.measured import Options, measured, put_into

ASK_SECONDS = 120.0
TRAINER_TIMEOUT = 60.0
"""Seconds for each phase of an update."""


class Results:
    """A JSON file that is written after every measurement, so that one which fails or is cut off
    loses nothing else.

    The file and each row of it carry `measured`: commit, date and run.
    """

    def __init__(self, path: Path, **first: Any) -> None:
        self.path, self.failures = path, list[str]()
        self.data: dict[str, Any] = {"measured": measured(), **first}
        path.parent.mkdir(parents=True, exist_ok=True)

    def put(self, *keys: str, value: Any) -> None:
        """Store under nested keys and write the file, which is whole at every moment, also if the
        process is killed.
        """
        place = self.data
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        draft = self.path.with_name(f".{self.path.name}.draft")
        draft.write_text(json.dumps(self.data, indent=1))
        draft.replace(self.path)

    def measure(self, *keys: str, run: Callable[[], Any]) -> Any:
        """Store what `run` returns; None (and a line in `failures`) if it fails."""
        name = " ".join(keys)
        started = time.monotonic()
        try:
            value = run()
        except (BenchError, httpx.HTTPError, OSError, ValueError, KeyError, RuntimeError) as error:
            self.failures.append(f"{name}: {error}")
            self.put(*keys, value={"failed": str(error).splitlines()[0][:500]})
            print(f"FAILED  {name}: {error}", flush=True)
            return None
        self.put(
            *keys, value={**value, "measured": measured()} if isinstance(value, dict) else value
        )
        print(f"{time.monotonic() - started:6.1f} s  {name}", flush=True)
        return value


class Benchmark(Protocol):
    """The part of a benchmark that `run_and_report` needs. `run` puts its figures into `results`."""

    results: Results

    def run(self) -> None: ...


def run_and_report(
    args: argparse.Namespace,
    make: Callable[[argparse.Namespace, Path, ExitStack], Benchmark],
    report: Callable[[dict[str, Any]], str],
    section: str = "",
) -> int:
    """Run a benchmark, print its tables and failures, also when it is cut short.

    Returns the exit status.

    Args:
        args: `output` is the folder for the results and the logs. `into` is a results file of
            several scripts, which gets the figures under `section` if nothing failed.
        make: takes the arguments, a temporary folder, and a stack that ends the processes of the
            benchmark.
        report: makes tables of the results' data.
    """
    args.output = args.output.resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    with ended_by_sigterm(), tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        benchmark = make(args, Path(work), stack)
        try:
            benchmark.run()
        except BenchError as error:
            benchmark.results.failures.append(str(error))
        finally:
            print(report(benchmark.results.data))
    for failure in benchmark.results.failures:
        print(f"FAILED  {failure}")
    if section and args.into and not benchmark.results.failures:
        put_into(args.into, section, benchmark.results.data)
    return int(bool(benchmark.results.failures))


Summary = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""Makes figures of a list of updates."""


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarise a list of updates (BenchTrainer.sync): milliseconds by phase on both sides, speed,
    halt.
    """
    first_byte = [row["first_byte_to_verified"] for row in rows]
    moved = statistics.median(row["bytes_moved"] for row in rows)
    halted = [row["server"]["halted"] for row in rows]
    stalled = [row["server"]["stalled"] for row in rows if "stalled" in row["server"]]
    found = {
        "updates": len(rows),
        "bytes_moved": moved,
        "first_byte_to_verified_ms": spread_ms(first_byte),
        "gb_per_s": gigabytes_per_second(moved, statistics.median(first_byte)),
        "halted_ms": spread_ms(halted),
        "whole_update_ms": spread_ms([row["end"] - row["start"] for row in rows]),
        "phases_ms": spread_by_phase([row["seconds"] for row in rows]),
        "server_ms": spread_by_phase([row["server"] for row in rows]),
    }
    if stalled:
        found["stalled_ms"] = spread_ms(stalled)
    return found


INTO: Options = {
    "--into": {"type": Path, "help": "results file that gets the figures, if nothing failed"}
}


def common_options(name: str, shape: str = "") -> Options:
    """Return the options that all benchmarks have.

    Args:
        name: the default of --name; no such option if it is empty.
        shape: the default of --shape, which comes with --tiny; neither if it is empty.
    """
    options: Options = {
        "--output": {"type": Path, "required": True, "help": "folder for the results and the logs"},
        "--device": {"choices": ["cuda", "cpu"], "default": "cuda"},
    }
    if name:
        options["--name"] = {"default": name, "help": "of the results file, without .json"}
    if shape:
        tiny = "a tiny shape and short measurements, to try the script itself"
        options["--shape"] = {"choices": SHAPES, "default": shape}
        options["--tiny"] = {"action": "store_true", "help": tiny}
    return options


def load_options(concurrency: list[int], updates: int = 20) -> Options:
    """Return the options of updates under load."""
    pauses = "seconds between updates under load (twice that above 64)"
    ramp = "seconds from the load's start to the measurement's"
    return {
        "--updates": {"type": int, "default": updates, "help": "per measurement"},
        "--concurrency": {"type": int, "nargs": "+", "default": concurrency},
        "--interval": {"type": float, "default": 0.5, "help": pauses},
        "--ramp": {"type": float, "default": 3.0, "help": ramp},
    }


def shrink_if_tiny(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with the effect of --tiny."""
    if args.tiny:
        args.shape = tiny_of(args.shape)
        if "ramp" in args:
            args.updates = min(args.updates, 3)
            args.concurrency, args.interval, args.ramp = [4], 0.2, 0.5
    return args


class Sitting:
    """One run of a benchmark: its results, and processes that end with it."""

    def __init__(
        self, args: argparse.Namespace, work: Path, stack: ExitStack, **first: Any
    ) -> None:
        """
        Args:
            args: of `common_options`; `name` is that of the results file.
            work, stack: see run_and_report.
            first: the first entries of the results.
        """
        self.args, self.work, self.stack = args, work, stack
        self.on_gpu = args.device == "cuda"
        self.results = Results(args.output / f"{args.name}.json", **first)

    def describe(self, **facts: Any) -> None:
        """Put the machine and other facts into the results; where processes are started, after
        that, since it takes seconds.
        """
        self.results.put("machine", value=describe())
        for key, value in facts.items():
            self.results.put(key, value=value)

    def server(self, name: str, model: Path, gpus: str = "0", **options: Any) -> VllmServer:
        """Start vLLM; see ServerOptions for the options."""
        server = VllmServer(
            name, model, self.args.output, ServerOptions(gpus if self.on_gpu else "", **options)
        )
        self.stack.callback(server.stop)
        return server

    def ready(self, *servers: VllmServer) -> dict[str, float]:
        """Seconds until each of them samples."""
        seconds = wait_all({server.name: server.ready for server in servers}, READY_SECONDS)
        print(f"ready after {seconds}", flush=True)
        return seconds

    def worker(
        self,
        name: str,
        module: str,
        arguments: Sequence[str] = (),
        gpus: str = "0",
        ranks: int = 1,
        **environment: str,
    ) -> Worker:
        """Start a module that takes commands; with empty `gpus` it sees the GPUs that this program
        sees.
        """
        if gpus or not self.on_gpu:
            environment |= device_variables(not self.on_gpu, gpus)
        log = self.args.output / f"{name.replace(' ', '-')}.log"
        worker = Worker(name, module, arguments, log, environment, ranks)
        self.stack.callback(worker.stop)
        return worker

    def trainer(
        self, name: str, module: str, port: int, gpus: str = "0", ranks: int = 1, *flags: str
    ) -> Worker:
        """Start a trainer for the server at a port."""
        arguments = trainer_arguments(self.args.shape, port, self.args.device, TRAINER_TIMEOUT)
        return self.worker(name, module, [*arguments, *flags], gpus, ranks)


class LoadedSitting(Sitting):
    """A sitting that measures updates of a server while requests are in flight (`add_load`)."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        super().__init__(args, work, stack)
        self.lengths = {}
        if args.tiny:
            self.lengths = {"min_tokens": 8, "max_tokens": 24}
        self.load = self.worker("load", "bench.gpu.load", gpus="")

    @contextmanager
    def loaded(
        self, server: VllmServer, concurrency: int, ramp: float, load: Worker | None = None
    ) -> Iterator[dict[str, Any]]:
        """Keep so many requests in flight; yields a dictionary that holds what was seen once the
        block has ended.

        Args:
            ramp: seconds from their start until the block begins.
            load: the worker that sends the requests, if this sitting's own is busy with another
            server.
        """
        load = load or self.load
        seen: dict[str, Any] = {}
        vocab = SHAPES[self.args.shape]["vocab_size"]
        asked = {
            "port": server.port,
            "model": str(server.model),
            "concurrency": concurrency,
            "vocab": vocab,
            **self.lengths,
        }
        load.ask("start", timeout=30, observers=min(16, concurrency), **asked)
        try:
            time.sleep(ramp)
            yield seen
        finally:
            seen.update(load.ask("stop", timeout=60))
        if not seen["finished"] and not any(seen["streams"]):
            raise BenchError(f"the load got no answer: {seen['failures'][:3]}")

    def warm_up(self, server: VllmServer, concurrency: int) -> None:
        """Run the first batches of each size, which compile kernels, before any measurement."""
        with self.loaded(server, concurrency, 2 * self.args.ramp):
            pass

    def under_load(
        self, server: VllmServer, trainer: Worker, concurrency: int, command: str = "sync",
        summarise: Summary | None = None, first_steps: bool = False,
        steps: Path | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Figures of updates while requests are in flight, and how they show in the stream of
        tokens.

        Args:
            first_steps: also ask the server after each update when its engine went on.
            steps: where the server's engine notes its steps (engine_clock.STEPS_FILE), to see what
                it computes again.
        """
        args = self.args
        options: dict[str, Any] = {"count": args.updates}
        if command == "sync":
            options["interval"] = args.interval * (1 + (concurrency > 64))
        if first_steps:
            options["loaded"] = True
        with self.loaded(server, concurrency, args.ramp) as seen:
            rows = trainer.ask(command, timeout=ASK_SECONDS, **options)
            time.sleep(min(1.0, args.ramp))
        updates = [(row["start"], row["end"]) for row in rows]
        found = {
            "concurrency": concurrency,
            **(summarise or figures)(rows),
            **find_halts(seen["streams"], updates).to_json(),
        }
        if steps:
            anew = engine_clock.computed_anew(engine_clock.read_steps(steps), updates)
            middle = {
                key: statistics.median(row[key] for row in anew) for key in ("tokens", "steps")
            }
            found["computed_anew"] = {**middle, "ms": spread_ms([row["seconds"] for row in anew])}
        return {**found, "request_failures": seen["failures"]}

    def updates(
        self, server: VllmServer, trainer: Worker, *place: str, summarise: Summary | None = None,
        check: Callable[[Worker], Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Measure updates idle and under each load, and check what the server samples with then.

        Args:
            place: keys of the results.
            summarise: makes the figures of updates; by default `figures`.
            check: raises BenchError if the server has other weights.
            options: see under_load.
        """
        measure, count = partial(self.results.measure, *place), self.args.updates
        shown = summarise or figures
        measure("idle", run=lambda: shown(trainer.ask("sync", timeout=ASK_SECONDS, count=count)))
        if check:
            measure("check", run=partial(check, trainer))
        for concurrency in self.args.concurrency:
            loaded = partial(self.under_load, server, trainer, concurrency, summarise=shown)
            measure(f"load_{concurrency}", run=partial(loaded, **options))
        if check:
            measure("check_after_load", run=partial(check, trainer))

    def check(self, trainer: Worker) -> dict[str, Any]:
        """Raise BenchError unless the server samples with the weights that the trainer sent last."""
        found: dict[str, Any] = trainer.ask("check", timeout=ASK_SECONDS, seed=1)
        if not (
            found["checksums_equal"]
            and found["new_not_old"]
            and found["served"] == found["version"]
        ):
            raise BenchError(
                f"the weights that the server holds are not the ones that were sent: {found}"
            )
        return found


def tokens_per_second(server: VllmServer, work: Callable[[], Any]) -> tuple[float, float]:
    """Run `work` and return the tokens sampled per second by the server's own counter, and the
    seconds that it took.
    """
    before, started = server.generated_tokens(), time.monotonic()
    work()
    after, ended = server.generated_tokens(), time.monotonic()
    return (after - before) / (ended - started), ended - started
