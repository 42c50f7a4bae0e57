"""How long does it take until a running server samples with another LoRA adapter?

    python bench/lora_swap.py --output DIR                        1 GPU
    python bench/lora_swap.py --output DIR --tiny --device cpu    everything but the figures, without a GPU

Exchanges adapters of rank 16 on all linear layers, idle and under load: from the trainer's call to
the server's answer, by phase on both sides, with the time to the first token of the next request.
Prints a table and writes lora_swap.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
from functools import partial
from typing import Any

from bench.gpu.processes import BenchError, Worker
from bench.gpu.runs import (
    ASK_SECONDS,
    LoadedSitting,
    add_load,
    command_line,
    run_and_report,
    shrink_if_tiny,
)
from bench.gpu.summary import phases_line, result_table, spread_by_phase, spread_ms


class Benchmark(LoadedSitting):
    """The server, the trainer and the load of one run."""

    def run(self) -> None:
        """Write the base model, start the server on it, and exchange adapters."""
        args, results = self.args, self.results
        trainer = self.trainer("trainer", "bench.gpu.lora_trainer", 1)
        model = self.work / "model"
        results.put("adapter", value=trainer.ask("save_base", timeout=180, folder=str(model)))
        flags = ("--enable-lora", "--max-lora-rank", "16")
        server = self.vllm = self.server(
            "vllm", model, shared=False, load_format="auto", flags=flags
        )
        self.describe(shape=args.shape)
        results.put("seconds_to_ready", value=self.ready(server)["vllm"])
        connect = {
            "port": server.port,
            "base_model": str(model),
            "folder": str(self.work / "adapters"),
        }
        if (
            results.measure(
                "connect", run=partial(trainer.ask, "connect_lora", timeout=120, **connect)
            )
            is None
        ):
            return
        self.warm_up(server, max(args.concurrency))
        trainer.ask("sync", timeout=ASK_SECONDS, count=3)
        results.measure(
            "first_token_without_swaps",
            run=lambda: spread_ms(trainer.ask("first_tokens", 60, count=20)["all"]),
        )
        results.measure(
            "idle",
            run=lambda: swap_figures(trainer.ask("sync", timeout=ASK_SECONDS, count=args.updates)),
        )
        results.measure("check", run=lambda: self._check(trainer))
        for concurrency in args.concurrency:
            swaps = partial(self.under_load, server, trainer, concurrency, summarise=swap_figures)
            results.measure(f"load_{concurrency}", run=swaps)
            usual = partial(self._first_tokens_under_load, trainer, concurrency)
            results.measure(f"first_token_without_swaps, load_{concurrency}", run=usual)
        results.measure("check_after_load", run=lambda: self._check(trainer))
        results.put(
            "lora_status",
            value={
                k: server.get("/lora/status")[k]
                for k in ("swaps", "slots", "capacity", "last_error")
            },
        )

    def _first_tokens_under_load(self, trainer: Worker, concurrency: int) -> dict[str, float]:
        with self.loaded(self.vllm, concurrency, self.args.ramp):
            return spread_ms(trainer.ask("first_tokens", 60, count=20)["all"])

    def _check(self, trainer: Worker) -> dict[str, Any]:
        found: dict[str, Any] = trainer.ask("check_adapter", timeout=ASK_SECONDS)
        if not (found["new_not_old"] and found["weight_versions"] == [found["sent"]]):
            raise BenchError(f"the server does not sample with the adapter that was sent: {found}")
        return found


def swap_figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of exchanges: from the trainer's call to the answer, by phase on both sides, and
    the next first token.
    """
    return {
        "swaps": len(rows),
        "adapter_bytes": rows[0]["bytes_moved"],
        "swap_ms": spread_ms([row["end"] - row["start"] for row in rows]),
        "request_to_served_ms": spread_ms([row["seconds"]["load"] for row in rows]),
        "phases_ms": spread_by_phase([row["seconds"] for row in rows]),
        "server_ms": spread_by_phase([row["server"] for row in rows]),
        "first_token_after_swap_ms": spread_ms([row["first_token"] for row in rows]),
    }


COLUMNS = {
    "swaps": "swaps",
    "swap: median ms": "swap_ms/median",
    "p90": "swap_ms/p90",
    "max": "swap_ms/max",
    "request to served ms": "request_to_served_ms/median",
    "first token after ms": "first_token_after_swap_ms/median",
    "usual gap ms": "usual_gap_ms/median",
    "gap at a swap ms": "largest_gap_per_update_ms/median",
}


def report(data: dict[str, Any]) -> str:
    """Format the tables of a results file."""
    rows = {name: row for name, row in data.items() if isinstance(row, dict) and "swap_ms" in row}
    usual = {
        name: row for name, row in data.items() if name.startswith("first_token_without_swaps")
    }
    lines = result_table(rows, COLUMNS)
    lines += result_table(usual, {"median ms": "median", "p90": "p90", "max": "max"})
    for name, row in rows.items():
        lines += phases_line(name, row["phases_ms"])
        lines += phases_line(f"{name}, server", row["server_ms"])
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, "qwen3-1.7b")
    add_load(parser, [64], 2.0, "--swaps")
    return shrink_if_tiny(parser.parse_args(arguments))


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    return run_and_report(
        args.output, lambda work, stack: Benchmark(args, work, stack, "lora_swap"), report
    )


if __name__ == "__main__":
    sys.exit(main())
