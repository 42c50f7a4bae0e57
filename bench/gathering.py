"""Time for which the trainer's ranks gather the buckets of an update, apart from sending them.

    python bench/gathering.py --output DIR --ranks 2 4          one GPU for each rank
    python bench/gathering.py --output DIR --ranks 2 --device cpu --tiny

Each rank of a trainer that FSDP2 spreads packs rows for the others, and NCCL brings what this rank
sends. No server takes part: the gathers of all rounds run one after the other, as an update
enqueues them. Measured for vLLM of as many ranks as the trainer has. The figures are the whole
pass, the time in which the CPU enqueues it, and the packing alone.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.gpu.processes import Task, all_stopped, answer_once
from bench.gpu.runs import Sitting, common_options, run_and_report, shrink_if_tiny
from bench.gpu.shapes import SHAPES
from bench.gpu.summary import gigabytes_per_second, spread_ms, table
from bench.measured import Options, command_line
from example_trainer.parallel.fsdp import sharded_decoder
from example_trainer.parallel.ranks import Ranks, join_ranks
from example_trainer.weight_bridge.stream import SendPlan, WeightStream
from vllm_patching.protocol.manifest import Manifest, ManifestEntry, dtype_name
from vllm_patching.protocol.messages import Route
from vllm_patching.weights.families import Geometry
from vllm_patching.weights.sharding import plan_shards

WARMUP = 3
RUN_SECONDS = 240.0
"""Deadline of one number of ranks."""


class Benchmark(Sitting):
    """One number of ranks after the other."""

    def run(self) -> None:
        """Measure each number of ranks by processes of its own."""
        args = self.args
        self.describe(shape=args.shape)
        asked = {"shape": args.shape, "device": args.device, "repeats": args.repeats}
        for ranks in args.ranks:
            name = f"ranks{ranks}"
            task = Task(name, "bench.gathering", asked, args.output, RUN_SECONDS, ranks)
            with all_stopped(task):
                self.results.measure("rows", str(ranks), run=task.answer)
        rows = [row for row in self.results.data["rows"].values() if "ranks" in row]
        self.results.put("rows", value=rows)


def manifests_of(geometry: Geometry, ranks: int, dtype: torch.dtype) -> list[Manifest]:
    """The manifests of a server of so many tensor-parallel ranks."""
    return [
        Manifest(
            rank,
            ranks,
            tuple(
                ManifestEntry(spec, dtype_name(dtype), "cpu")
                for spec in plan_shards(geometry, rank, ranks)
            ),
        )
        for rank in range(ranks)
    ]


def work(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure on one of the ranks that torchrun has started."""
    device, route = torch.device("cpu"), Route.GLOO
    if asked["device"] == "cuda":
        device, route = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), Route.NCCL
        torch.cuda.set_device(device)
    dtype = torch.bfloat16
    geometry = Geometry.from_config(SHAPES[asked["shape"]])
    with join_ranks(120.0, device) as ranks:
        model = sharded_decoder(geometry, dtype, device, ranks.world_size)
        plan = SendPlan(ranks.world_size, ranks.world_size)
        manifests = manifests_of(geometry, ranks.world_size, dtype)
        stream = WeightStream(model, manifests, plan, ranks, device, route)
        return figures(stream, ranks, device, asked["repeats"])


def figures(
    stream: WeightStream, ranks: Ranks, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Time the gathers of one update with and without the exchange between the ranks."""
    own = [
        transfer
        for steps in stream._steps
        for step in steps
        for transfer in step
        if transfer.owner == ranks.rank != transfer.sender
    ]
    whole = passes(stream, ranks, device, repeats)
    with mock.patch.object(torch.distributed, "batch_isend_irecv", return_value=[]):
        packing = passes(stream, ranks, device, repeats)
    seconds = statistics.median(whole["seconds"])
    handed = stream.num_bytes * (ranks.world_size - 1) / ranks.world_size
    return {
        "ranks": ranks.world_size,
        "model_bytes": stream.num_bytes,
        "rounds": len(stream._steps),
        "steps": sum(len(steps) for steps in stream._steps),
        "transfers_to_others": len(own),
        "gather_ms": spread_ms(whole["seconds"]),
        "enqueue_ms": spread_ms(whole["enqueued"]),
        "packing_ms": spread_ms(packing["seconds"]),
        "packing_enqueue_ms": spread_ms(packing["enqueued"]),
        "handed_gb_per_s": gigabytes_per_second(handed, seconds),
    }


def passes(
    stream: WeightStream, ranks: Ranks, device: torch.device, repeats: int
) -> dict[str, list[float]]:
    """Gather all rounds `repeats` times. Returns this rank's seconds of each pass."""
    taken: dict[str, list[float]] = {"seconds": [], "enqueued": []}
    synchronize = torch.get_device_module(device).synchronize
    for number in range(WARMUP + repeats):
        ranks.gather(number, "starting a pass")
        synchronize()
        began = time.perf_counter()
        with stream._gathering(None):
            for step in range(len(stream._steps)):
                stream._gather(step)()
        enqueued = time.perf_counter()
        synchronize()
        if number >= WARMUP:
            taken["seconds"].append(time.perf_counter() - began)
            taken["enqueued"].append(enqueued - began)
    return taken


def report(data: dict[str, Any]) -> str:
    """A table with one row for each number of ranks."""
    columns = ("gather_ms", "enqueue_ms", "packing_ms", "packing_enqueue_ms")
    return table(
        ["ranks", "rounds", "steps", "transfers", *columns, "GB/s handed over, all ranks"],
        [
            [
                *(row[name] for name in ("ranks", "rounds", "steps", "transfers_to_others")),
                *(row[name]["median"] for name in columns),
                row["handed_gb_per_s"],
            ]
            for row in data.get("rows", [])
        ],
    )


OPTIONS: Options = {
    "--ranks": {"type": int, "nargs": "+", "default": [2, 4]},
    "--repeats": {"type": int, "default": 20},
}


def main(arguments: list[str] | None = None) -> int:
    options = common_options("gathering", "qwen2.5-14b") | OPTIONS
    args = shrink_if_tiny(command_line(__doc__, options).parse_args(arguments))
    return run_and_report(args, Benchmark, report)


if __name__ == "__main__":
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
        answer_once(work)  # one of the ranks
    else:
        sys.exit(main())
