"""The base of a single copy on a GPU: the sums, and waiting for another process's writes. Half a
minute, needs no pytest:

python tests/gpu/check_single_copy_pieces.py [--json FILE]
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench.gpu.checks import run_checks
from vllm_patching.protocol.checksum import WeightSums
from vllm_patching.protocol.manifest import FlatSlice
from vllm_patching.transport.shared_memory import (
    export_cuda_ipc,
    open_event,
    open_handles,
    share_event,
)
from vllm_patching.weights.sharding import SourceSlice
from vllm_patching.worker.receiving import WeightUpdater

Result = tuple[bool, str]
"""The verdict of a check, and its observation."""
SIZES = (2, 8190, 8192, 16384, 16386, 50002, 3 * 8192 * 2)
WRITES = 200
"""Copies that one process enqueues, behind which the other must wait: tens of milliseconds of
work."""


def sums_equal_the_cpus(dtype: torch.dtype, rounded: torch.dtype | None) -> Result:
    """Random tensors of sizes about the block's, some with NaN and infinity, summed on both."""
    generator = torch.Generator().manual_seed(0)
    tensors = [(f"t{size}", torch.randn(size, generator=generator).to(dtype)) for size in SIZES]
    whole = WeightSums([(name, tensor.cuda()) for name, tensor in tensors], rounded)
    first = whole.all() == WeightSums(tensors, rounded).all()
    if rounded is torch.bfloat16:  # what only rounding makes infinite, and ties
        tensors[3][1][5], tensors[5][1][7] = 3.4e38, 1.00390625
    tensors[-1][1][-1] = float("inf")
    found = WeightSums([(name, tensor.cuda()) for name, tensor in tensors], rounded).all()
    expected = WeightSums(tensors, rounded).all()
    return first and found == expected and bool(
        found.not_finite
    ), f"{found} on the GPU, {expected} on the CPU"


def sums_of_what_is_written() -> Result:
    """The sums of masters, and of the bf16 weights that a copy makes of them on this GPU."""
    masters = [
        (f"m{i}", torch.randn(2048, 3072, device="cuda") * 10.0 ** (i - 3)) for i in range(6)
    ]
    written = [(name, torch.empty_like(m, dtype=torch.bfloat16).copy_(m)) for name, m in masters]
    one, other = WeightSums(masters, torch.bfloat16).all(), WeightSums(written).all()
    return one == other, f"{one.checksum} and {other.checksum}"


def speed() -> Result:
    """GB/s of the sums over 3.4 GB of bf16, and over the float32 that becomes them."""
    masters = [(f"m{i}", torch.randn(86_000_000, device="cuda")) for i in range(20)]
    weights = [(name, m.to(torch.bfloat16)) for name, m in masters]
    seen = []
    kinds = {
        "bf16": (WeightSums(weights), 2),
        "float32 as bf16": (WeightSums(masters, torch.bfloat16), 4),
    }
    for what, (sums, num_bytes) in kinds.items():
        sums.all()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            sums.reset()
            sums.add(0, len(masters))
        end.record()
        torch.cuda.synchronize()
        milliseconds = begin.elapsed_time(end) / 5
        seen.append(
            f"{what}: {milliseconds:.2f} ms, {num_bytes * 86e6 * 20 / milliseconds / 1e6:.0f} GB/s"
        )
    return True, "; ".join(seen)


def reader(pipe: Connection) -> None:
    """The other process: owns a tensor, and reads it behind the writer's event."""
    weights = torch.nn.Parameter(torch.zeros(64_000_000, device="cuda"), requires_grad=False)
    pipe.send(export_cuda_ipc({"w": weights}))
    event = open_event(pipe.recv(), weights.device)
    for _ in range(3):
        expected = pipe.recv()
        begun = time.monotonic()
        event.wait()
        lowest, highest = weights.aminmax()
        pipe.send((float(lowest), float(highest), expected, time.monotonic() - begun))
    pipe.recv()


def waits_for_the_writes() -> Result:
    """Enqueue writes, record the event, and let the other process read at once: it must see the
    last one, whole.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=reader, args=(theirs,), daemon=True)
    process.start()
    if not ours.poll(120):
        return False, "the other process did not start"
    weights = open_handles(ours.recv())["w"]
    event, handle = share_event(weights.device)
    ours.send(handle)
    seen = []
    for value in (1.0, 2.0, 3.0):
        begun = time.monotonic()
        for step in range(WRITES):
            weights.fill_(value if step == WRITES - 1 else -value)
        event.record()
        enqueued = time.monotonic() - begun
        ours.send(value)
        if not ours.poll(60):
            return False, "the other process did not answer"
        lowest, highest, expected, waited = ours.recv()
        seen.append(
            (
                lowest == highest == expected,
                f"enqueued in {1e3 * enqueued:.1f} ms, read after {1e3 * waited:.1f} ms",
            )
        )
    ours.send("done")
    process.join(30)
    return all(good for good, _ in seen), "; ".join(text for _, text in seen)


def staging_is_given_back() -> Result:
    """A server whose trainer needs no staging buffer any more: other processes on the GPU see its
    memory as free.
    """
    count = 1 << 30
    live = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    piece = SourceSlice("w", (count,), 0, (1,), 0)
    whole = FlatSlice("w", piece, (count,), torch.bfloat16, 0, live.nbytes)
    updater = WeightUpdater(0, [whole], live.nbytes, [("w", live)], logging.getLogger("check"))
    free = [torch.cuda.mem_get_info()[0]]
    for direct in (False, True):
        updater.aim(direct)
        free.append(torch.cuda.mem_get_info()[0])
    taken, back = free[0] - free[1], free[2] - free[1]
    seen = f"{taken / 1e6:.0f} MB taken, {back / 1e6:.0f} MB back, of {live.nbytes / 1e6:.0f} MB"
    return min(taken, back) >= 0.99 * live.nbytes, seen


def checks() -> dict[str, Callable[[], Result]]:
    """By name."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    cases = [(f32, None), (bf16, None), (f16, None), (f32, bf16), (f32, f16)]
    named: dict[str, Callable[[], Result]] = {
        f"sums of {dtype}" + (f" as {rounded}" if rounded else ""): lambda d=dtype, r=rounded: (
            sums_equal_the_cpus(d, r)
        )  # type: ignore[misc]
        for dtype, rounded in cases
    }
    return named | {
        "sums of what is written": sums_of_what_is_written,
        "another process waits for the writes": waits_for_the_writes,
        "a staging buffer is given back": staging_is_given_back,
        "speed": speed,
    }


def main() -> int:
    """Return the process's status."""
    return run_checks(__doc__, checks())


if __name__ == "__main__":
    sys.exit(main())
