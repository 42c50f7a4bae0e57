"""One copy of the weights for trainer and vLLM on the same GPU: is it one, and how long does
generation stand still?

    python bench/single_copy.py --output DIR                                      1 GPU
    python bench/single_copy.py --output DIR --shape qwen2.5-14b --tp 2           2 GPUs: two ranks of vLLM, two of the trainer
    python bench/single_copy.py --output DIR --tiny --device cpu                  everything but the figures, without a GPU

Proves by the GPU's memory, by writing on one side and reading on the other, and by bytes moved that
there is one copy; then measures the pause of updates, idle and under load, also (with one rank)
with a real optimizer. Writes single_copy.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import math
import statistics
from functools import partial
from typing import Any

from bench.gpu.processes import BenchError, Worker
from bench.gpu.runs import (
    ASK_SECONDS,
    LoadedSitting,
    add_load,
    command_line,
    figures,
    run_and_report,
    shrink_if_tiny,
)
from bench.gpu.shapes import model_bytes, write_model_folder
from bench.gpu.summary import phases_line, result_table, spread_ms

ONE_COPY_SHARE = 0.05
"""Largest share of the model's bytes that joining may add to the GPU's memory; a second copy would
add all of them."""


class Benchmark(LoadedSitting):
    """The server, the trainer and the load of one run."""

    def run(self) -> None:
        """Everything, in the order in which a reader wants to believe it."""
        results, args = self.results, self.args
        gpus = ",".join(map(str, range(args.tp)))
        server = self.vllm = self.server(
            "vllm", write_model_folder(self.work / "model", args.shape), gpus, tp=args.tp
        )
        self.describe(
            shape=args.shape, tensor_parallel_size=args.tp, model_bytes=model_bytes(args.shape)
        )
        results.put("seconds_to_ready", value=self.ready(server)["vllm"])
        module, flags = (
            ("bench.gpu.trainer", ())
            if args.tp == 1
            else ("bench.gpu.spread_trainer", ("--split",))
        )
        trainer = self.trainer("trainer", module, server.port, gpus, args.tp, *flags)
        if results.measure("one_copy", run=lambda: self._one_copy(trainer)) is None:
            return
        results.measure("read_on_the_other_side", run=lambda: self._write_here_read_there(trainer))
        results.measure(
            "idle",
            run=lambda: pause_figures(trainer.ask("sync", timeout=ASK_SECONDS, count=args.updates)),
        )
        results.measure("check", run=lambda: self.check(trainer))
        for concurrency in args.concurrency:
            results.measure(
                f"load_{concurrency}", run=partial(self._loaded, trainer, concurrency, "sync")
            )
        results.measure("check_after_load", run=lambda: self.check(trainer))
        if args.tp > 1:
            # the masters and moments of a model that needs several GPUs would not fit beside two
            # sets of weights
            return
        results.measure("optimizer, idle", run=partial(self._optimizer, trainer))
        for concurrency in args.concurrency:
            run = partial(self._loaded, trainer, concurrency, "sync_with_optimizer")
            results.measure(f"optimizer, load_{concurrency}", run=run)

    def _one_copy(self, trainer: Worker) -> dict[str, Any]:
        """Load, join, and account for the (first) GPU's memory: what loading took must come back
        when the server's is used.
        """
        tp = self.args.tp
        before = trainer.ask("memory", timeout=60)
        loaded = trainer.ask("load", timeout=180, optimizer=tp == 1)
        with_own_copy = trainer.ask("memory", timeout=60)
        connected = trainer.ask("connect", timeout=180, kind="single_copy")
        joined = trainer.ask("memory", timeout=60)
        moved = connected["first_update"]["bytes_moved"]
        answer = {
            "params_mapped": connected["params_mapped"],
            "params_total": connected["params_total"],
            "model_bytes": loaded["model_bytes"] // tp,
            "bytes_moved_by_an_update": moved,
            "gpu_bytes_used": {
                "before_loading": before,
                "model_loaded": with_own_copy,
                "joined": joined,
            },
        }
        # The optimizer's masters and the two sets to write from stay; the model's own copy goes.
        freed = with_own_copy["gpu_bytes_used"] - joined["gpu_bytes_used"]
        answer["gpu_bytes_freed_by_joining"] = freed
        if moved:
            raise BenchError(f"an update of a single copy moved {moved} bytes")
        if self.args.device == "cuda" and freed < (1 - ONE_COPY_SHARE) * answer["model_bytes"]:
            raise BenchError(
                f"joining freed {freed} bytes of the {answer['model_bytes']} that the trainer's own copy took"
            )
        return answer

    def _write_here_read_there(self, trainer: Worker) -> dict[str, Any]:
        """Zeros in the last norm, without a message to the server: every token must become equally
        likely.
        """
        trainer.ask("sync", timeout=ASK_SECONDS, count=1)
        _, before = self.vllm.greedy([5, 6, 7], max_tokens=1)
        vocab = trainer.ask("flatten_head", timeout=30)["vocab"]
        try:
            _, flat = self.vllm.greedy([8, 9, 10], max_tokens=1)
        finally:
            trainer.ask("flatten_head", timeout=30, undo=True)
        _, again = self.vllm.greedy([11, 6, 7], max_tokens=1)
        expected = -math.log(vocab)
        found = {
            "before": before[0],
            "zeroed": flat[0],
            "expected_when_zeroed": expected,
            "restored": again[0],
        }
        if (
            abs(flat[0] - expected) > 0.01
            or min(abs(v[0] - expected) for v in (before, again)) < 0.1
        ):
            raise BenchError(f"vLLM does not read what the trainer writes: {found}")
        return found

    def _loaded(self, trainer: Worker, concurrency: int, command: str) -> dict[str, Any]:
        return self.under_load(
            self.vllm, trainer, concurrency, command, summarise=pause_figures, first_steps=True
        )

    def _optimizer(self, trainer: Worker) -> dict[str, Any]:
        rows = trainer.ask("sync_with_optimizer", timeout=ASK_SECONDS, count=self.args.updates)
        return {**pause_figures(rows), "loss": [row["loss"] for row in rows]}


def pause_figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of updates, and how much longer than the write itself the engine stood still.

    Its end is the answer to resume (`pause_beyond_write_ms`) and, with requests in flight, also the
    first step of the worker (`stalled_beyond_write_ms`), which may come before that answer.
    """
    found = figures(rows)
    found["write_ms"] = spread_ms([row["write"] for row in rows])
    for name, end in (("pause", "halted"), ("stalled", "stalled")):
        beyond = [row["server"][end] - row["write"] for row in rows if end in row["server"]]
        if beyond:
            found[f"{name}_beyond_write_ms"] = spread_ms(beyond)
    if "optimizer_step" in rows[0]:
        found["optimizer_step_ms"] = spread_ms([row["optimizer_step"] for row in rows])
        found["median_seconds_per_training_step"] = round(
            statistics.median(
                row["forward_backward"] + row["optimizer_step"] + row["end"] - row["start"]
                for row in rows
            ),
            4,
        )
    return found


COLUMNS = {
    "updates": "updates",
    "the trainer waits: median ms": "whole_update_ms/median",
    "max": "whole_update_ms/max",
    "gap at an update: median ms": "largest_gap_per_update_ms/median",
    "max ": "largest_gap_per_update_ms/max",
    "usual gap ms": "usual_gap_ms/median",
    "pause beyond the write: median ms": "pause_beyond_write_ms/median",
    "p90": "pause_beyond_write_ms/p90",
    "max  ": "pause_beyond_write_ms/max",
    "to the first step: median ms": "stalled_beyond_write_ms/median",
    "max   ": "stalled_beyond_write_ms/max",
    "halted ms": "halted_ms/median",
    "write ms": "write_ms/median",
    "optimizer step ms": "optimizer_step_ms/median",
}


def report(data: dict[str, Any]) -> str:
    """The tables of a results file."""
    lines = []
    one = data.get("one_copy", {})
    if "gpu_bytes_used" in one:
        used = {name: row["gpu_bytes_used"] / 1e6 for name, row in one["gpu_bytes_used"].items()}
        lines.append(
            f"GPU memory in use, MB: {used['before_loading']:.0f} before, {used['model_loaded']:.0f} with the trainer's own "
            f"copy, {used['joined']:.0f} after joining; {one['gpu_bytes_freed_by_joining'] / 1e6:.0f} freed of "
            f"{one['model_bytes'] / 1e6:.0f} MB of weights; mapped {one['params_mapped']}/{one['params_total']}, "
            f"{one['bytes_moved_by_an_update']} bytes moved by an update"
        )
    read = data.get("read_on_the_other_side", {})
    if "zeroed" in read:
        lines.append(
            f"logprob served: {read['before']:.3f}, {read['zeroed']:.3f} once the trainer has zeroed the last norm "
            f"(-log of the vocabulary: {read['expected_when_zeroed']:.3f}), {read['restored']:.3f} once it has put it back"
        )
    lines += result_table(
        {
            name: row
            for name, row in data.items()
            if isinstance(row, dict) and "pause_beyond_write_ms" in row
        },
        COLUMNS,
    )
    for name in ("idle", "optimizer, idle"):
        part = data.get(name, {})
        lines += phases_line(f"{name}, trainer", part.get("phases_ms", {}))
        lines += phases_line(f"{name}, server", part.get("server_ms", {}))
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, "qwen3-1.7b", "single_copy")
    parser.add_argument("--tp", type=int, default=1, help="vLLM's ranks, and the trainer's")
    add_load(parser, [64], 0.5)
    return shrink_if_tiny(parser.parse_args(arguments))


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    return run_and_report(
        args.output, lambda work, stack: Benchmark(args, work, stack, args.name), report
    )


if __name__ == "__main__":
    sys.exit(main())
