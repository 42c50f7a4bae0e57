"""One case of bench/gpu/exact_lengths.py, in a process of its own: a pass of the trainer, timed, and
the kernels that take its time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch

from bench.gpu.live_bytes import Meter
from bench.gpu.processes import answer_once
from bench.gpu.speed_worker import DETERMINISTIC, Case, Timer, ours, rates
from bench.gpu.synthetic import dtype_on, geometry_of, gradient_of, joined_group, random_bin
from example_trainer.config import TrainerConfig
from vllm_patching.protocol.checksum import weights_checksum

Way = Literal["ordinary", "exact"]
MOST_KERNELS = 25


@dataclass(frozen=True)
class ProfiledCase:
    """The measured case.

    Attributes:
        way: the trainer's fast operations, or its exact ones.
        shape: a key of SHAPES.
        length, tokens: of a sequence, and of the packed bin.
        warm_up, repeats: passes before the timed ones, and the timed ones.
        seconds: time limit of the process.
    """

    way: Way
    shape: str = "qwen3-1.7b"
    length: int = 512
    tokens: int = 16384
    warm_up: int = 2
    repeats: int = 4
    seconds: int = 150
    device: str = "cuda"


def kernels_of(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Profile a call: the longest kernels, [name, launches, seconds], and the seconds of all."""
    activity, column = torch.profiler.ProfilerActivity.CPU, "self_cpu_time_total"
    if device.type == "cuda":
        activity, column = torch.profiler.ProfilerActivity.CUDA, "self_device_time_total"
    with torch.profiler.profile(activities=[activity]) as profile:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = profile.key_averages()
    rows = [[event.key[:120], event.count, getattr(event, column) / 1e6] for event in events]
    rows = sorted((row for row in rows if row[2]), key=lambda row: -row[2])
    busy = sum(seconds for *_, seconds in rows)
    shown = [[name, count, round(seconds, 6)] for name, count, seconds in rows[:MOST_KERNELS]]
    return {"busy_seconds": round(busy, 6), "kernels": shown}


def checksum_of(model: Any) -> str:
    """Take the sums of gradients, and return their checksum."""
    return weights_checksum(sorted(model.arithmetic.sums.take().items()))


def measure(case: ProfiledCase, device: torch.device) -> dict[str, Any]:
    """The figures of a case: the pass, its kernels, and whether its bits repeat."""
    exact = case.way != "ordinary"
    if exact:  # before anything touches the GPU
        from vllm_patching.batch_invariant.settings import enable_settings

        enable_settings()
    arithmetic: Any = "ours"
    if exact:
        arithmetic = DETERMINISTIC
    speed = Case(arithmetic, case.shape, case.length, case.tokens, device=case.device)
    geometry = geometry_of(case.shape, max(4096, case.length))
    config = TrainerConfig(model_name=case.shape, seq_len=case.length)
    model, optimizer = ours(speed, geometry, dtype_on(device), device, config)
    bins = [random_bin(speed.work, geometry.vocab_size, device)]
    gradient, timer = partial(gradient_of, model, optimizer, bins, config), Timer(device)
    figures: dict[str, Any] = {"arithmetic": model.arithmetic.ops.NAME}
    with Meter(device) as meter:
        for _ in range(case.warm_up):
            gradient()
        meter.reset()
        gradient()
        peak = meter.peak
    if exact:
        figures["repeats"] = repeats(gradient, model)
    seconds = [timer(gradient) for _ in range(case.repeats)]
    figures["pass"] = rates(geometry, bins[0], speed.work, min(seconds), 1, 1)
    figures["pass"] |= {
        "median_seconds": round(statistics.median(seconds), 5),
        "peak_bytes": peak,
    }
    return figures | kernels_of(gradient, device)


def repeats(gradient: Callable[[], object], model: Any) -> bool:
    """Return whether two passes over one bin give gradients with the same bits."""
    checksum_of(model)  # of the passes before
    checksums = []
    for _ in range(2):
        gradient()
        checksums.append(checksum_of(model))
    return checksums[0] == checksums[1]


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """The figures of a case; `out_of_memory` with the reason if there are none."""
    case = ProfiledCase(**asked)
    torch.manual_seed(0)
    with joined_group(1, torch.device(case.device)) as device:
        try:
            figures = measure(case, device)
        except torch.OutOfMemoryError as error:
            figures = {"out_of_memory": str(error).splitlines()[0]}
    return {"case": asdict(case), **figures}


if __name__ == "__main__":
    answer_once(main)
