"""How long does it take until a running server samples with another LoRA adapter?

    python bench/lora_swap.py --output DIR                        1 GPU
    python bench/lora_swap.py --output DIR --tiny --device cpu    everything but the figures, without a GPU

Exchanges adapters of rank 16 on all linear layers, idle and under load: from the trainer's call to the server's answer, by
phase on both sides, with the time to the first token of the next request. Prints a table and writes lora_swap.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench.gpu.processes import BenchError, Worker, wait_all
from bench.gpu.runs import ASK_SECONDS, Results, loaded, median_of, run_and_report, updates_under_load
from bench.gpu.shapes import SHAPES
from bench.gpu.summary import spread_by_phase, spread_ms, table
from bench.gpu.trainer import trainer_arguments
from bench.gpu.vllm_server import READY_SECONDS, ServerOptions, VllmServer

TRAINER_TIMEOUT = 60.0


class Benchmark:
    """The server, the trainer and the load of one run."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        self.args, self.work, self.stack = args, work, stack
        self.shape: str = args.shape
        self.lengths = {"min_tokens": 8, "max_tokens": 24} if args.tiny else {}
        self.results = Results(args.output / "lora_swap.json")
        self.load = Worker("load", "bench.gpu.load", [], args.output / "load.log", {})
        stack.callback(self.load.stop)

    def run(self) -> None:
        """Write the base model, start the server on it, and exchange adapters."""
        from bench.gpu.machine import describe

        args, results = self.args, self.results
        environment = {"CUDA_VISIBLE_DEVICES": "0"} if args.device == "cuda" else {"OMP_NUM_THREADS": "1"}
        arguments = trainer_arguments(self.shape, 1, args.device, TRAINER_TIMEOUT)
        trainer = Worker("trainer", "bench.gpu.lora_trainer", arguments, args.output / "trainer.log", environment)
        self.stack.callback(trainer.stop)
        model = self.work / "model"
        results.put("adapter", value=trainer.ask("save_base", timeout=180, folder=str(model)))
        flags = ("--enable-lora", "--max-lora-rank", "16")
        gpu = "0" if args.device == "cuda" else ""
        options = ServerOptions(gpu, shared=False, load_format="auto", flags=flags)
        self.server = server = VllmServer("vllm", model, args.output, options)
        self.stack.callback(server.stop)
        results.put("machine", value=describe())
        results.put("shape", value=self.shape)
        results.put("seconds_to_ready", value=wait_all({"vllm": server.ready}, READY_SECONDS)["vllm"])
        print(f"ready after {results.data['seconds_to_ready']} s", flush=True)
        connect = {"port": server.port, "base_model": str(model), "folder": str(self.work / "adapters")}
        if results.measure("connect", run=partial(trainer.ask, "connect_lora", timeout=120, **connect)) is None:
            return
        with loaded(self.load, server, self.shape, max(args.concurrency), 2 * args.ramp, self.lengths):
            pass  # the first batches of each size compile kernels
        trainer.ask("sync", timeout=ASK_SECONDS, count=3)
        results.measure("first_token_without_swaps", run=lambda: spread_ms(trainer.ask("first_tokens", 60, count=20)["all"]))
        results.measure("idle", run=lambda: swap_figures(trainer.ask("sync", timeout=ASK_SECONDS, count=args.swaps)))
        results.measure("check", run=lambda: self._check(trainer))
        for concurrency in args.concurrency:
            results.measure(f"load_{concurrency}", run=partial(self._under_load, trainer, concurrency))
            usual = partial(self._first_tokens_under_load, trainer, concurrency)
            results.measure(f"first_token_without_swaps, load_{concurrency}", run=usual)
        results.measure("check_after_load", run=lambda: self._check(trainer))
        results.put(
            "lora_status", value={k: server.get("/lora/status")[k] for k in ("swaps", "slots", "capacity", "last_error")}
        )

    def _under_load(self, trainer: Worker, concurrency: int) -> dict[str, Any]:
        args = self.args
        return updates_under_load(
            self.load,
            self.server,
            trainer,
            self.shape,
            concurrency,
            args.swaps,
            args.interval,
            args.ramp,
            lengths=self.lengths,
            summarise=swap_figures,
        )

    def _first_tokens_under_load(self, trainer: Worker, concurrency: int) -> dict[str, float]:
        with loaded(self.load, self.server, self.shape, concurrency, self.args.ramp, self.lengths):
            return spread_ms(trainer.ask("first_tokens", 60, count=20)["all"])

    def _check(self, trainer: Worker) -> dict[str, Any]:
        found: dict[str, Any] = trainer.ask("check_adapter", timeout=ASK_SECONDS)
        if not (found["new_not_old"] and found["weight_versions"] == [found["sent"]]):
            raise BenchError(f"the server does not sample with the adapter that was sent: {found}")
        return found


def swap_figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of exchanges: from the trainer's call to the answer, by phase on both sides, and the next first token."""
    return {
        "swaps": len(rows),
        "adapter_bytes": rows[0]["bytes_moved"],
        "swap_ms": spread_ms([row["end"] - row["start"] for row in rows]),
        "request_to_served_ms": spread_ms([row["seconds"]["load"] for row in rows]),
        "phases_ms": spread_by_phase([row["seconds"] for row in rows]),
        "server_ms": spread_by_phase([row["server"] for row in rows]),
        "first_token_after_swap_ms": spread_ms([row["first_token"] for row in rows]),
    }


def report(data: dict[str, Any]) -> str:
    """The tables of a results file."""
    lines = []
    rows = []
    for name in [key for key in data if key == "idle" or key.startswith("load_")]:
        row = data[name]
        usual = data.get("first_token_without_swaps" + ("" if name == "idle" else f", {name}"), {})
        if "swap_ms" in row:
            rows.append(
                [
                    name,
                    row["swaps"],
                    *(median_of(row, "swap_ms", what) for what in ("median", "p90", "max")),
                    median_of(row, "request_to_served_ms"),
                    median_of(row, "first_token_after_swap_ms"),
                    usual.get("median"),
                    median_of(row, "usual_gap_ms"),
                    median_of(row, "largest_gap_per_update_ms"),
                ]
            )
            for side in ("phases_ms", "server_ms"):
                lines.append(f"{name}, {side}: " + ", ".join(f"{k} {v['median']:.2f}" for k, v in row[side].items()))
    head = [
        "",
        "swaps",
        "swap: median ms",
        "p90",
        "max",
        "request to served ms",
        "first token after ms",
        "usual first token ms",
    ]
    return "\n".join([table([*head, "usual gap ms", "gap at a swap ms"], rows), *lines])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the results and the logs")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape and short measurements, to try the script itself")
    parser.add_argument("--swaps", type=int, default=20, help="per measurement")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64])
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between swaps under load")
    parser.add_argument("--ramp", type=float, default=3.0, help="seconds from the load's start to the measurement's")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.shape, args.concurrency = "tiny", [4]
        args.swaps, args.interval, args.ramp = min(args.swaps, 3), 0.3, 0.5
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    return run_and_report(args.output, lambda work, stack: Benchmark(args, work, stack), report)


if __name__ == "__main__":
    sys.exit(main())
