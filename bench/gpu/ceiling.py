"""Rates that NCCL itself reaches between the same GPUs: the ceiling of an update.

    python -m bench.gpu.ceiling …      one process for each GPU; started by `measure`

The sender is rank 0. Patterns: a broadcast of 1 GiB; the model's parameters broadcast one by one in
one coalesced launch (one receiver); each receiver its own shards, sent point to point in one
coalesced launch (several receivers).

In pairs, as many senders as receivers, all at once: 1 GiB from each sender, and each receiver's
shards. Each pair has a group of its own, so a GPU may hold the sender of one and the receiver of
another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu.processes import BenchError, Child, free_port
from bench.gpu.shapes import SHAPES, shard_shapes
from bench.gpu.summary import gigabytes_per_second, spread_ms
from example_trainer.launcher import roles

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
    result_file = output / "ceiling.json"
    result_file.unlink(missing_ok=True)
    common = roles.flags(
        world=len(gpus), port=free_port(), shape=shape, repeats=repeats, gibibyte=gibibyte,
        result=result_file, pairs=pairs,
    )  # fmt: skip
    children = [_started(rank, gpu, common, output) for rank, gpu in enumerate(gpus)]
    deadline = time.monotonic() + seconds
    try:
        for child in children:
            child.wait_for_guard(max(0.1, deadline - time.monotonic()))
            if child.poll() is None:
                raise BenchError(f"{child.name} has not ended")
            if child.poll():
                raise child.ended()
    except BenchError as error:
        if not result_file.exists():
            raise BenchError(
                f"the ceiling was not measured within {seconds:g} s: {error}"
            ) from error
        return _read(result_file) | {"not_measured": str(error).splitlines()[0]}
    finally:
        for child in children:
            child.stop()
    return _read(result_file)


def _started(rank: int, gpu: str, common: Sequence[str], output: Path) -> Child:
    """Start one rank on a GPU, or on the CPU."""
    device, environment = "cuda", {"CUDA_VISIBLE_DEVICES": gpu}
    if gpu == "cpu":
        device, environment = "cpu", {}
    command = [sys.executable, "-u", "-m", "bench.gpu.ceiling", *common]
    command += ["--rank", str(rank), "--device", device]
    return Child(f"ceiling rank {rank}", command, output / f"ceiling-{rank}.log", environment)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def run(args: argparse.Namespace) -> None:
    """One rank."""
    backend = "gloo" if args.device == "cpu" else "nccl"
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    where = f"tcp://127.0.0.1:{args.port}"
    # NCCL refuses a group with two ranks on one GPU: all of the pairs' processes together have a
    # Gloo group alone.
    extra: dict[str, Any] = (
        {"device_id": device} if args.device == "cuda" and not args.pairs else {}
    )
    everyone = "gloo" if args.pairs else backend
    dist.init_process_group(
        everyone,
        init_method=where,
        rank=args.rank,
        world_size=args.world,
        timeout=timedelta(seconds=60),
        **extra,
    )
    if args.device == "cuda":
        torch.cuda.set_device(device)
    patterns = _in_pairs(args, backend, device) if args.pairs else _from_one(args, backend, device)
    results: dict[str, Any] = {}
    for name, num_bytes, transfer in patterns:
        seconds = [_timed(transfer, device) for _ in range(WARMUP + args.repeats)][WARMUP:]
        slowest: list[Any] = [None] * args.world
        dist.all_gather_object(slowest, seconds)
        worst = [max(values) for values in zip(*slowest, strict=True)]
        results[name] = {
            "bytes": num_bytes,
            "ms": spread_ms(worst),
            "gb_per_s": gigabytes_per_second(num_bytes, statistics.median(worst)),
        }
        if args.rank == 0:  # after each, so that a pattern which fails loses no other
            of_model = [
                row["gb_per_s"] for pattern, row in results.items() if pattern != "broadcast_1gib"
            ]
            broadcast = results["broadcast_1gib"]["gb_per_s"]
            summary = {"backend": backend, "patterns": results, "broadcast_gb_per_s": broadcast}
            summary["model_gb_per_s"] = max(of_model, default=None)
            Path(args.result).write_text(json.dumps(summary))
    dist.barrier()
    dist.destroy_process_group()


Pattern = tuple[str, int, Callable[[], None]]
"""Its name, the bytes that all receivers get together, and this rank's part of it."""


def _from_one(args: argparse.Namespace, backend: str, device: torch.device) -> Iterator[Pattern]:
    """Rank 0 sends to all others."""
    block = [_block(args.gibibyte, device)]
    yield "broadcast_1gib", args.gibibyte, lambda: dist.broadcast(block[0], 0)
    block.clear()
    receivers = args.world - 1
    shards = [_shards(args.shape, rank, receivers, device) for rank in range(receivers)]
    num_bytes = sum(map(_num_bytes, shards))
    mine = shards if args.rank == 0 else [shards[args.rank - 1]]
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
    peers = [1 + index if args.rank == 0 else 0 for index in range(len(mine))]
    yield (
        "shards_sent_coalesced",
        num_bytes,
        lambda: _send(list(zip(mine, peers, strict=True)), args.rank == 0),
    )


def _in_pairs(args: argparse.Namespace, backend: str, device: torch.device) -> Iterator[Pattern]:
    """The first half of the ranks sends, each to one of the second."""
    half = args.world // 2
    groups = [dist.new_group([pair, half + pair], backend=backend) for pair in range(half)]
    pair, sends = args.rank % half, args.rank < half
    group, peer = groups[pair], (args.rank + half) % args.world
    block = [_block(args.gibibyte, device)]
    yield "broadcast_1gib", half * args.gibibyte, lambda: dist.broadcast(block[0], pair, group)
    block.clear()
    shard = _shards(args.shape, pair, half, device)
    held: list[Any] = [None] * args.world
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
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    transfer()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--gibibyte", type=int, default=1 << 30)
    parser.add_argument("--result", required=True)
    parser.add_argument("--pairs", action="store_true")
    run(parser.parse_args())
