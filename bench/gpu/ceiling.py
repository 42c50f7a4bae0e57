"""Rates that NCCL itself reaches between the same GPUs: the ceiling of an update.

The sender is rank 0. Patterns: a broadcast of 1 GiB; the model's parameters broadcast one by one in
one coalesced launch (one receiver). With several receivers, each gets its own shards, sent point to
point in one coalesced launch.

In pairs, as many senders as receivers, all at once: 1 GiB from each sender, and each receiver's
shards. Each pair has a group of its own, so a GPU may hold the sender of one and the receiver of
another.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu.processes import Task, all_stopped, answer_once
from bench.gpu.shapes import shard_shapes
from bench.gpu.summary import gigabytes_per_second, spread_ms

WARMUP = 5


def measure(
    shape: str,
    gpus: list[str],
    output: Path,
    repeats: int = 20,
    seconds: float = 90.0,
    gibibyte: int = 1 << 30,
    pairs: bool = False,
) -> dict[str, Any]:
    """Run the patterns on these GPUs and return their figures.

    Args:
        shape: a key of SHAPES.
        gpus: the sender's first, then the receivers'; in pairs all senders' first. `cpu` for a CPU
            process.
        pairs: the first half of the GPUs sends to the second. The rates are then the sums over the
            pairs.

    Raises:
        BenchError: a process failed or took too long; the message ends with its log.
    """
    asked = {"shape": shape, "gpus": gpus, "repeats": repeats, "gibibyte": gibibyte, "pairs": pairs}
    task = Task("ceiling", "bench.gpu.ceiling", asked, output, seconds, len(gpus))
    with all_stopped(task):
        return task.answer()


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure on one of the ranks that torchrun has started."""
    gpu, pairs = asked["gpus"][int(os.environ["RANK"])], asked["pairs"]
    backend, device, extra = "gloo", torch.device("cpu"), dict[str, Any]()
    if gpu != "cpu":
        backend, device = "nccl", torch.device("cuda", int(gpu))
        torch.cuda.set_device(device)
    if gpu != "cpu" and not pairs:
        extra["device_id"] = device
    everyone = backend
    if pairs:
        # NCCL refuses a group with two ranks on one GPU: all of the pairs' processes together have
        # a Gloo group alone.
        everyone = "gloo"
    dist.init_process_group(everyone, timeout=timedelta(seconds=60), **extra)
    patterns = [_from_one, _in_pairs][pairs](asked, backend, device)
    results: dict[str, Any] = {}
    for name, num_bytes, transfer in patterns:
        seconds = [_timed(transfer, device) for _ in range(WARMUP + asked["repeats"])][WARMUP:]
        slowest: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(slowest, seconds)
        worst = [max(values) for values in zip(*slowest, strict=True)]
        results[name] = {
            "bytes": num_bytes,
            "ms": spread_ms(worst),
            "gb_per_s": gigabytes_per_second(num_bytes, statistics.median(worst)),
        }
    dist.barrier()
    dist.destroy_process_group()
    of_model = [row["gb_per_s"] for name, row in results.items() if name != "broadcast_1gib"]
    return {
        "backend": backend,
        "patterns": results,
        "broadcast_gb_per_s": results["broadcast_1gib"]["gb_per_s"],
        "model_gb_per_s": max(of_model, default=None),
    }


Pattern = tuple[str, int, Callable[[], None]]
"""Its name, the bytes that all receivers get together, and this rank's part of it."""


def _from_one(asked: dict[str, Any], backend: str, device: torch.device) -> Iterator[Pattern]:
    """Rank 0 sends to all others."""
    block = [_block(asked["gibibyte"], device)]
    yield "broadcast_1gib", asked["gibibyte"], lambda: dist.broadcast(block[0], 0)
    block.clear()
    receivers = dist.get_world_size() - 1
    shards = [_shards(asked["shape"], rank, receivers, device) for rank in range(receivers)]
    num_bytes = sum(map(_num_bytes, shards))
    mine = shards if dist.get_rank() == 0 else [shards[dist.get_rank() - 1]]
    if receivers == 1:

        def broadcast_parameters() -> None:
            if backend == "gloo":
                for tensor in mine[0]:
                    dist.broadcast(tensor, 0)
                return
            with dist._coalescing_manager(device=device, async_ops=True) as coalesced:
                for tensor in mine[0]:
                    dist.broadcast(tensor, 0, async_op=True)
            coalesced.wait()

        yield "parameters_broadcast_coalesced", num_bytes, broadcast_parameters
    peers = [1 + index if dist.get_rank() == 0 else 0 for index in range(len(mine))]
    yield (
        "shards_sent_coalesced",
        num_bytes,
        lambda: _send(list(zip(mine, peers, strict=True)), dist.get_rank() == 0),
    )


def _in_pairs(asked: dict[str, Any], backend: str, device: torch.device) -> Iterator[Pattern]:
    """The first half of the ranks sends, each to one of the second."""
    half = dist.get_world_size() // 2
    groups = [dist.new_group([pair, half + pair], backend=backend) for pair in range(half)]
    pair, sends = dist.get_rank() % half, dist.get_rank() < half
    group, peer = groups[pair], (dist.get_rank() + half) % dist.get_world_size()
    block = [_block(asked["gibibyte"], device)]
    yield "broadcast_1gib", half * asked["gibibyte"], lambda: dist.broadcast(block[0], pair, group)
    block.clear()
    shard = _shards(asked["shape"], pair, half, device)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, _num_bytes(shard))
    yield "shards_sent_coalesced", sum(held[:half]), lambda: _send([(shard, peer)], sends, group)


def _send(shards: Sequence[tuple[list[torch.Tensor], int]], sends: bool, group: Any = None) -> None:
    """Send each list of tensors to its rank, or receive them from there, all in one launch."""
    step = dist.isend if sends else dist.irecv
    operations = [
        dist.P2POp(step, tensor, peer, group) for shard, peer in shards for tensor in shard
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _block(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)


def _shards(shape: str, rank: int, ranks: int, device: torch.device) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [torch.randn(s, device=device, dtype=dtype) for s in shard_shapes(shape, rank, ranks)]


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _timed(transfer: Callable[[], None], device: torch.device) -> float:
    """Seconds from a point at which every rank has arrived until this rank's part is complete."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    dist.barrier()
    synchronize()
    started = time.perf_counter()
    transfer()
    synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    answer_once(run)
