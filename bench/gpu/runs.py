"""What several benchmarks do alike: updates idle and under load, results that survive a failure, figures from rows."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from bench.gpu.processes import BenchError, Worker, end_on_sigterm
from bench.gpu.shapes import SHAPES
from bench.gpu.summary import find_halts, gigabytes_per_second, spread_by_phase, spread_ms
from bench.gpu.vllm_server import VllmServer
from bench.measured import measured

ASK_SECONDS = 120.0


class Results:
    """A JSON file that is written after every measurement, so that one which fails or is cut off loses nothing else.

    The file and each row of it carry `measured`: commit, date and run.
    """

    def __init__(self, path: Path, **first: Any) -> None:
        self.path, self.failures = path, list[str]()
        self.data: dict[str, Any] = {"measured": measured(), **first}
        path.parent.mkdir(parents=True, exist_ok=True)

    def put(self, *keys: str, value: Any) -> None:
        """Store under nested keys and write the file."""
        place = self.data
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        self.path.write_text(json.dumps(self.data, indent=1))

    def measure(self, *keys: str, run: Callable[[], Any]) -> Any:
        """Store what `run` returns; None (and a line in `failures`) if it fails."""
        name = " ".join(keys)
        started = time.monotonic()
        try:
            value = run()
        except (BenchError, OSError, ValueError, KeyError, RuntimeError) as error:
            self.failures.append(f"{name}: {error}")
            self.put(*keys, value={"failed": str(error).splitlines()[0][:500]})
            print(f"FAILED  {name}: {error}", flush=True)
            return None
        self.put(*keys, value={**value, "measured": measured()} if isinstance(value, dict) else value)
        print(f"{time.monotonic() - started:6.1f} s  {name}", flush=True)
        return value


class Benchmark(Protocol):
    """What `run_and_report` needs: `run` measures and puts what it finds into `results`."""

    results: Results

    def run(self) -> None: ...


def run_and_report(output: Path, make: Callable[[Path, ExitStack], Benchmark], report: Callable[[dict[str, Any]], str]) -> int:
    """Run a benchmark, print its tables and what failed, also when it is cut short. Returns the exit status.

    Args:
        output: folder for the results and the logs.
        make: given a folder for files that are not kept, and a stack that ends what the benchmark has started.
        report: makes tables of the results' data.
    """
    end_on_sigterm()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        benchmark = make(Path(work), stack)
        try:
            benchmark.run()
        except BenchError as error:
            benchmark.results.failures.append(str(error))
        finally:
            print(report(benchmark.results.data))
    for failure in benchmark.results.failures:
        print(f"FAILED  {failure}")
    return 1 if benchmark.results.failures else 0


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a list of updates (BenchTrainer.sync) comes to: milliseconds by phase on both sides, speed, halt."""
    first_byte = [row["first_byte_to_verified"] for row in rows]
    moved = statistics.median(row["bytes_moved"] for row in rows)
    halted = [row["server"]["halted"] for row in rows]
    stood_still = [row["server"]["stood_still"] for row in rows if "stood_still" in row["server"]]
    return {
        "updates": len(rows),
        "bytes_moved": moved,
        "first_byte_to_verified_ms": spread_ms(first_byte),
        "gb_per_s": gigabytes_per_second(moved, statistics.median(first_byte)),
        "halted_ms": spread_ms(halted),
        **({"stood_still_ms": spread_ms(stood_still)} if stood_still else {}),
        "whole_update_ms": spread_ms([row["end"] - row["start"] for row in rows]),
        "phases_ms": spread_by_phase([row["seconds"] for row in rows]),
        "server_ms": spread_by_phase([row["server"] for row in rows]),
    }


@contextmanager
def loaded(load: Worker, server: VllmServer, shape: str, concurrency: int, ramp: float, lengths: Mapping[str, int]) -> Any:
    """Keep `concurrency` requests in flight; yields a dictionary that holds what was seen once the block has ended."""
    seen: dict[str, Any] = {}
    load.ask(
        "start",
        timeout=30,
        port=server.port,
        model=str(server.model),
        concurrency=concurrency,
        observers=min(16, concurrency),
        vocab=SHAPES[shape]["vocab_size"],
        **lengths,
    )
    try:
        time.sleep(ramp)
        yield seen
    finally:
        seen.update(load.ask("stop", timeout=60))
    if not seen["finished"] and not any(seen["streams"]):
        raise BenchError(f"the load got no answer: {seen['failures'][:3]}")


def updates_under_load(
    load: Worker,
    server: VllmServer,
    trainer: Worker,
    shape: str,
    concurrency: int,
    count: int,
    interval: float,
    ramp: float = 3.0,
    command: str = "sync",
    lengths: Mapping[str, int] = MappingProxyType({}),
    summarise: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None,
    first_steps: bool = False,
) -> dict[str, Any]:
    """Figures of `count` updates while `concurrency` requests are in flight, and how they show in the stream of tokens.

    Args:
        first_steps: also ask the server after each update when its engine went on.
    """
    arguments = {"count": count, **({"interval": interval} if command == "sync" else {})}
    arguments |= {"loaded": True} if first_steps else {}
    with loaded(load, server, shape, concurrency, ramp, lengths) as seen:
        rows = trainer.ask(command, timeout=ASK_SECONDS, **arguments)
        time.sleep(min(1.0, ramp))
    halts = find_halts(seen["streams"], [(row["start"], row["end"]) for row in rows])
    return {
        "concurrency": concurrency,
        **(summarise or figures)(rows),
        **halts.to_json(),
        "request_failures": seen["failures"],
    }


def tokens_per_second(server: VllmServer, work: Callable[[], Any]) -> tuple[float, float]:
    """Run `work` and return (tokens sampled per second meanwhile by the server's own counter, seconds it took)."""
    before, started = server.generated_tokens(), time.monotonic()
    work()
    after, ended = server.generated_tokens(), time.monotonic()
    return (after - before) / (ended - started), ended - started


def median_of(result: dict[str, Any] | None, key: str, what: str = "median") -> float | None:
    """A figure out of a result, or None where the measurement failed."""
    if not result or key not in result:
        return None
    value = result[key].get(what)
    return None if value is None else float(value)
