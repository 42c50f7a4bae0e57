"""How fast does a full set of weights get from the trainer's GPU into vLLM, and what does
generation lose by it?

    python bench/weight_sync.py --output DIR                                     2 GPUs: vLLM on 0, the trainer on 1
    python bench/weight_sync.py --output DIR --shape qwen2.5-14b --tp 2          4 GPUs: vLLM on 0 and 1, the trainer on 2
    python bench/weight_sync.py --output DIR --shape qwen2.5-14b --tp 2 --trainer-ranks 2 --crossed --parts ceiling bridge
                                                     2 GPUs: a rank of both on each, and each sends to the other GPU
    python bench/weight_sync.py --output DIR --tiny --device cpu                 everything but the figures, without a GPU

In one run and on the same GPUs: NCCL's own ceiling, this project's broadcast bridge (each way of
transfer), and vLLM's own NCCL weight-transfer engine. Prints tables and writes
weight_sync_SHAPE.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench.command_line import add_options
from bench.gpu import ceiling
from bench.gpu.processes import Worker, crossed_gpus
from bench.gpu.runs import (
    ASK_SECONDS,
    LoadedSitting,
    add_load,
    command_line,
    figures,
    run_and_report,
    shrink_if_tiny,
    tokens_per_second,
)
from bench.gpu.shapes import model_bytes, write_model_folder
from bench.gpu.summary import (
    alternate,
    find_halts,
    phases_line,
    result_table,
    summary_of_pairs,
    updates_of,
)
from bench.gpu.vllm_server import VllmServer

PARTS = ("ceiling", "bridge", "engine", "throughput")
"""throughput: with both settings of --inflight-cache, the second on a server of its own."""


class Benchmark(LoadedSitting):
    """The servers, the trainers and the load of one run."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        super().__init__(args, work, stack, args.name or f"weight_sync_{args.shape}")
        self.model = write_model_folder(work / "model", args.shape)

    def run(self) -> None:
        """Everything that was asked for."""
        args, results = self.args, self.results
        server = self._start("vllm", mirrored=False)
        second: VllmServer | None = None
        # Trainers import what they need while the servers start, and make their models afterwards.
        first = (
            self._trainer("trainer recompute", self._module(), server, mirrored=False)
            if self._bridge_first()
            else None
        )
        engine: Worker | None = None
        # A second server starts at the same time, mirrored: its workers where our trainer will be,
        # and the other way round.
        if "engine" in args.parts and self.on_gpu:
            second = self._start_engine()
            engine = self._trainer(
                "trainer of vllm own engine", "bench.gpu.vllm_engine_trainer", second, mirrored=True
            )
        elif "throughput" in args.parts:
            second = self._start("vllm keep", mirrored=True, flags=("--inflight-cache", "keep"))
        self.describe(
            shape=args.shape, tensor_parallel_size=args.tp, trainer_ranks=args.trainer_ranks, crossed=args.crossed,
            model_bytes=model_bytes(args.shape),
        )  # fmt: skip
        results.put(
            "seconds_to_ready", value=self.ready(*(s for s in (server, second) if s is not None))
        )
        if "ceiling" in args.parts:
            ranks = args.trainer_ranks if args.crossed else 1
            senders, receivers = (
                self._trainer_gpus(ranks, mirrored=False),
                self._server_gpus(mirrored=False),
            )
            gpus = [*senders, *receivers] if self.on_gpu else ["cpu"] * (ranks + args.tp)
            options = {"gibibyte": 1 << 30 if self.on_gpu else 1 << 20, "pairs": args.crossed}
            results.measure(
                "ceiling",
                run=lambda: ceiling.measure(args.shape, gpus, args.output, args.updates, **options),
            )
        if first is not None:
            self._measure_bridge(server, "recompute", first)
        if engine is not None and second is not None:
            self._measure_engine(second, engine)
            second.stop()
            second = None
        if "throughput" in args.parts:
            if second is None:
                second = self._start("vllm keep", mirrored=True, flags=("--inflight-cache", "keep"))
                self.ready(second)
            self._measure_bridge(
                second, "keep", self._trainer("trainer keep", self._module(), second, mirrored=True)
            )

    # -- processes

    def _start(self, name: str, mirrored: bool, **options: Any) -> VllmServer:
        return self.server(
            name, self.model, ",".join(self._server_gpus(mirrored)), tp=self.args.tp, **options
        )

    def _start_engine(self) -> VllmServer:
        flags = ("--weight-transfer-config", '{"backend": "nccl"}')
        environment = (("VLLM_SERVER_DEV_MODE", "1"),)
        return self._start(
            "vllm own engine", mirrored=True, shared=False, flags=flags, environment=environment
        )

    def _server_gpus(self, mirrored: bool) -> list[str]:
        """The GPUs of a server's ranks; the mirrored one's are behind those of the first."""
        first = self.args.tp if mirrored else 0
        return [str(first + rank) for rank in range(self.args.tp)]

    def _trainer_gpus(self, ranks: int, mirrored: bool) -> list[str]:
        """The GPUs of a trainer's ranks: behind the server's or (mirrored) before; crossed, those
        of the server's next rank.
        """
        if self.args.crossed:
            return crossed_gpus(ranks)
        first = 0 if mirrored else self.args.tp
        return [str(first + rank) for rank in range(ranks)]

    def _trainer(self, name: str, module: str, server: VllmServer, mirrored: bool) -> Worker:
        ranks = self.args.trainer_ranks if module == "bench.gpu.spread_trainer" else 1
        return self.trainer(
            name, module, server.port, ",".join(self._trainer_gpus(ranks, mirrored)), ranks
        )

    # -- measurements

    def _bridge_first(self) -> bool:
        """Whether our bridge is measured, with the first server."""
        return not {"bridge", "throughput"}.isdisjoint(self.args.parts)

    def _module(self) -> str:
        return "bench.gpu.trainer" if self.args.trainer_ranks == 1 else "bench.gpu.spread_trainer"

    def _measure_bridge(self, server: VllmServer, inflight: str, trainer: Worker) -> None:
        """Our bridge to one server: updates idle and under load (recompute alone), and what
        generation loses.
        """
        args, results = self.args, self.results
        results.put("trainer", value=trainer.ask("load", timeout=180, spare=True))
        self.warm_up(server, max(self.args.throughput_concurrency, *self.args.concurrency))
        for transfer in args.transfers:
            ask = partial(trainer.ask, "connect", timeout=120, kind="broadcast", transfer=transfer)
            if results.measure("bridge", transfer, f"connect, {inflight}", run=ask) is None:
                continue
            if "bridge" in args.parts and inflight == "recompute":
                self._measure_updates(server, trainer, transfer)
            if "throughput" in args.parts:
                results.measure(
                    "throughput",
                    f"{transfer}, {inflight}",
                    run=partial(self._steady, server, trainer),
                )
        trainer.stop()

    def _measure_updates(self, server: VllmServer, trainer: Worker, transfer: str) -> None:
        count = self.args.updates
        measure = partial(self.results.measure, "bridge", transfer)
        measure("idle", run=lambda: figures(trainer.ask("sync", timeout=ASK_SECONDS, count=count)))
        measure("check", run=lambda: self.check(trainer))
        for concurrency in self.args.concurrency:
            measure(
                f"load_{concurrency}",
                run=partial(self.under_load, server, trainer, concurrency, first_steps=True),
            )
        measure("check_after_load", run=lambda: self.check(trainer))

    def _measure_engine(self, server: VllmServer, trainer: Worker) -> None:
        """vLLM's own NCCL weight-transfer engine, with the same model, weights and load."""
        measure = partial(self.results.measure, "vllm_engine")
        measure("model", run=lambda: trainer.ask("load", timeout=180, spare=True))
        self.warm_up(server, max(self.args.throughput_concurrency, *self.args.concurrency))
        if measure("join", run=lambda: trainer.ask("join", timeout=180)) is None:
            return
        measure(
            "idle",
            run=lambda: figures(trainer.ask("sync", timeout=ASK_SECONDS, count=self.args.updates)),
        )
        measure("check", run=lambda: trainer.ask("check", timeout=ASK_SECONDS))
        for concurrency in self.args.concurrency:
            measure(
                f"load_{concurrency}", run=partial(self.under_load, server, trainer, concurrency)
            )
        trainer.stop()

    def _steady(self, server: VllmServer, trainer: Worker) -> dict[str, Any]:
        """Tokens per second with and without an update every so often, in turn."""
        args = self.args
        rows: list[dict[str, Any]] = []

        def spell(updates: bool) -> float:
            def work() -> None:
                ends = time.monotonic() + args.update_every
                if updates:
                    rows.extend(
                        trainer.ask("sync", timeout=args.update_every + ASK_SECONDS, count=1)
                    )
                time.sleep(max(0.0, ends - time.monotonic()))

            return tokens_per_second(server, work)[0]

        pairs = max(2, round(args.throughput_seconds / args.update_every))
        method = f"{pairs} pairs of neighbouring spells of {args.update_every:g} s, with and without an update"
        self.results.put("method", value=method)
        with self.loaded(server, args.throughput_concurrency, 2 * args.ramp) as seen:
            found = summary_of_pairs(alternate(spell, pairs))
        halts = find_halts(seen["streams"], [(row["start"], row["end"]) for row in rows])
        return {
            "concurrency": args.throughput_concurrency,
            "seconds_between_updates": args.update_every,
            **found,
            **halts.to_json(),
            "halted_ms": figures(rows)["halted_ms"],
            "request_failures": seen["failures"],
        }


UPDATE_COLUMNS = {
    "updates": "updates",
    "the trainer waits: median ms": "whole_update_ms/median",
    "max": "whole_update_ms/max",
    "gap at an update: median ms": "largest_gap_per_update_ms/median",
    "max ": "largest_gap_per_update_ms/max",
    "usual gap ms": "usual_gap_ms/median",
    "halted: median ms": "halted_ms/median",
    "max  ": "halted_ms/max",
    "to the first step ms": "stalled_ms/median",
    "first byte to verified: median ms": "first_byte_to_verified_ms/median",
    "p90": "first_byte_to_verified_ms/p90",
    "max   ": "first_byte_to_verified_ms/max",
    "GB/s": "gb_per_s",
    "the bytes alone: ms": "phases_ms/transfer/median",
}
THROUGHPUT_COLUMNS = {
    "pairs": "pairs",
    "tokens/s without": "tokens_per_s_without_updates",
    "with updates": "tokens_per_s",
    "ratio": "ratio",
    "of single pairs": "ratios",
    "usual gap ms": "usual_gap_ms/median",
    "gap at an update ms": "largest_gap_per_update_ms/median",
}


def report(data: dict[str, Any]) -> str:
    """Format the tables of a results file."""
    ceilings = data.get("ceiling") or {}
    lines = [
        f"{data.get('shape')}, {data.get('model_bytes', 0) / 1e9:.2f} GB, vLLM on {data.get('tensor_parallel_size')} rank(s)"
    ]
    for name, row in (ceilings.get("patterns") or {}).items():
        rate = f"{row['gb_per_s']} GB/s, {row['ms']['median']:.2f} ms"
        lines.append(f"  {ceilings['backend']} {name}: {rate}")
    sides = {f"bridge, {name}": part for name, part in data.get("bridge", {}).items()}
    if "vllm_engine" in data:
        sides["vLLM's engine"] = data["vllm_engine"]
    lines += result_table(updates_of(sides), UPDATE_COLUMNS)
    for side, part in sides.items():
        lines += _details(side, part)
    steady = data.get("throughput", {})
    return "\n".join([*lines, *result_table(steady, THROUGHPUT_COLUMNS, "generation")])


def _details(side: str, part: dict[str, Any]) -> list[str]:
    """Return the lines on one side's phases, check and mapping."""
    idle, check = part.get("idle", {}), part.get("check", {})
    lines = phases_line(f"{side}, idle", idle.get("phases_ms", {}))
    lines += phases_line(f"{side}, idle, server", idle.get("server_ms", {}))
    if "mean_logprob_difference_to_new_weights" in check:
        lines.append(
            f"  logprobs differ by {check['mean_logprob_difference_to_new_weights']:.3f} from the new weights' and "
            f"{check['mean_logprob_difference_to_old_weights']:.3f} from the old ones'; checksums equal: "
            f"{check.get('checksums_equal', 'not known')}"
        )
    for name, row in part.items():
        if name.startswith("connect") and "params_mapped" in row:
            lines.append(f"  mapped {row['params_mapped']}/{row['params_total']} parameters")
            break
    return lines


OPTIONS: dict[str, dict[str, Any]] = {
    "--name": {"help": "of the results file, without .json"},
    "--tp": {"type": int, "default": 1, "help": "vLLM's tensor-parallel degree"},
    "--trainer-ranks": {
        "type": int,
        "default": 1,
        "help": "processes of the trainer (torchrun, FSDP2)",
    },
    "--parts": {"nargs": "+", "choices": PARTS, "default": list(PARTS)},
    "--transfers": {"nargs": "+", "default": ["direct", "overlapped"]},
    "--throughput-seconds": {
        "type": float,
        "default": 30.0,
        "help": "with updates; as many without",
    },
    "--throughput-concurrency": {"type": int, "default": 256},
    "--update-every": {
        "type": float,
        "default": 5.0,
        "help": "seconds, when throughput is measured",
    },
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, "qwen3-1.7b")
    add_options(parser, OPTIONS)
    crossed = "each rank of the trainer on the GPU of one of vLLM's that another sends to"
    parser.add_argument("--crossed", action="store_true", help=crossed)
    add_load(parser, [64, 256], 0.5)
    args = parser.parse_args(arguments)
    if args.crossed and (
        args.tp < 2
        or args.trainer_ranks != args.tp
        or not {"ceiling", "bridge"}.issuperset(args.parts)
    ):
        parser.error(
            "--crossed needs --tp 2 or more, as many --trainer-ranks, and --parts ceiling bridge (or one of them)"
        )
    if args.tiny:
        args.throughput_concurrency, args.update_every = 4, 1.0
        args.throughput_seconds = min(args.throughput_seconds, 2.0)
    return shrink_if_tiny(args)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    return run_and_report(args.output, lambda work, stack: Benchmark(args, work, stack), report)


if __name__ == "__main__":
    sys.exit(main())
