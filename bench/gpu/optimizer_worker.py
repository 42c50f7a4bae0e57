"""One choice of bench/optimizer_choices.py, in a process of its own: real steps, their seconds, and
the most memory in them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from bench.gpu.live_bytes import Meter
from bench.gpu.processes import answer_once
from bench.gpu.synthetic import Work, geometry_of, gradient_of, random_bin, random_weights
from example_trainer.config import TrainerConfig
from example_trainer.models.decoder import Decoder
from example_trainer.models.head import default_chunk
from example_trainer.models.ops import choose_table
from example_trainer.training.memory_choice import offload_seconds
from example_trainer.training.memory_plan import (
    MemoryRequest,
    OptimizerName,
    host_bytes,
    plan_memory,
)
from example_trainer.training.optimizer import make_optimizer

PROMPT = 16


@dataclass(frozen=True)
class Choice:
    """A training, and how it is measured.

    Attributes:
        shape: of bench.gpu.shapes.
        optimizer, offload, checkpointing: as the trainer's options.
        batch: sequences in a microbatch, each `length` tokens long.
        bins: microbatches of a step.
        warm_up, steps: steps before the timed ones, and the timed ones.
        seconds: time limit of the process.
        device: cuda or cpu.
    """

    name: str
    shape: str
    optimizer: OptimizerName = "adamw"
    offload: bool = False
    checkpointing: bool = False
    batch: int = 4
    length: int = 2048
    bins: int = 2
    warm_up: int = 2
    steps: int = 5
    seconds: int = 150
    device: str = "cuda"

    def request(self, device: torch.device) -> MemoryRequest:
        """The request to the memory plan, without a workspace: torch's allocator does not count
        that.
        """
        dtype = torch.bfloat16
        return MemoryRequest(
            geometry=geometry_of(self.shape),
            dtype=dtype,
            tokens_per_microbatch=self.batch * self.length,
            seq_len=self.length,
            table=choose_table(device, dtype),
            optimizer=self.optimizer,
            offload=self.offload,
            gradient_checkpointing=self.checkpointing,
            logprob_chunk=default_chunk(device),
        )


def measure(choice: Choice, device: torch.device) -> dict[str, Any]:
    """Take steps.

    Returns planned and measured bytes, of the device and of the host, and seconds of each part of a
    step.
    """
    request = choice.request(device)
    config = TrainerConfig(
        model_name=choice.shape,
        batch_size=choice.batch,
        gradient_accumulation_steps=choice.bins,
        seq_len=choice.length,
        optimizer=choice.optimizer,
        optimizer_offload=choice.offload,
    )
    with Meter(device) as meter:
        model = Decoder(request.geometry, request.dtype, device)
        random_weights(model, model.shards)
        model.gradient_checkpointing = choice.checkpointing
        before, begun = psutil.Process().memory_info().rss, time.perf_counter()
        optimizer = make_optimizer(config, model)
        made = time.perf_counter() - begun
        held = psutil.Process().memory_info().rss - before
        work = Work(choice.length, choice.batch * choice.length, PROMPT)
        bins = [
            random_bin(work, request.geometry.vocab_size, device, seed)
            for seed in range(choice.bins)
        ]
        found: dict[str, list[float]] = {"gradient": [], "update": [], "write_weights": []}
        for step in range(choice.warm_up + choice.steps):
            if step == choice.warm_up:
                meter.reset()
            timed(found["gradient"], device, lambda: gradient_of(model, optimizer, bins, config))
            timed(found["update"], device, optimizer.step)
            timed(found["write_weights"], device, optimizer.write_weights)
        peak = meter.peak
    return {
        "choice": asdict(choice),
        "bytes": {"planned": plan_memory(request).total, "measured": peak},
        "host_bytes": {"planned": host_bytes(request), "measured": held if choice.offload else 0},
        "seconds": {part: spread(values[choice.warm_up :]) for part, values in found.items()},
        "first_update_seconds": round(found["update"][0], 4),
        "optimizer_made_seconds": round(made, 3),
        "offload_seconds_planned": round(offload_seconds(request), 4) if choice.offload else 0.0,
        "trained_parameters": request.trained,
    }


def timed(into: list[float], device: torch.device, work: Any) -> None:
    """Do `work`, and note its seconds when the device has done it."""
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    into.append(time.perf_counter() - begun)


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {key: round(value, 5) for key, value in found.items()}


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """The choice's figures."""
    torch.manual_seed(0)
    choice = Choice(**asked)
    return measure(choice, torch.device(choice.device))


if __name__ == "__main__":
    answer_once(main)
