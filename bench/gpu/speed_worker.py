"""One case of bench/trainer_speed.py, in a process of its own (under torchrun, one for each rank):
passes and steps, timed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from bench.gpu.live_bytes import Meter
from bench.gpu.plain_decoder import PlainDecoder
from bench.gpu.processes import answer_once
from bench.gpu.shapes import PEAK_FLOPS, active_parameters, write_model_folder
from bench.gpu.synthetic import (
    Work,
    dtype_on,
    geometry_of,
    gradient_of,
    joined_group,
    random_bin,
    random_weights,
)
from example_trainer.batch.packing import PackedBin
from example_trainer.config import TrainerConfig
from example_trainer.models.decoder import Decoder
from example_trainer.models.ops import choose_operations, fast_attention
from example_trainer.observe.perf import matrix_elements, step_flops
from example_trainer.training.checkpoints import Checkpoints
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.runs import PREFIX, new_run
from vllm_patching.weights.families import Geometry

Arithmetic = Literal[
    "ours", "ours, deterministic", "transformers", "plain", "plain, layers compiled"
]


@dataclass(frozen=True)
class Case:
    """The measured case.

    Attributes:
        arithmetic: the implementation; see trainer_speed.py.
        shape: a key of SHAPES.
        length, tokens, prompt, group, share: of each bin, see synthetic.Work.
        checkpointing: each layer is computed again in the backward pass.
        offload: masters and moments are in the host's memory.
        ranks: processes, sharded by FSDP2, each with bins of its own.
        bins: of the whole steps that are timed after the single passes; 0: no step is taken.
        warm_up, repeats: passes before the timed ones, and the timed ones.
        saved_steps: whole steps without a checkpoint, and as many at least once one has begun; 0:
            none is written.
        seconds: time limit of the process.
    """

    arithmetic: Arithmetic
    shape: str = "qwen3-1.7b"
    length: int = 512
    tokens: int = 16384
    prompt: int = 1
    group: int = 1
    share: bool = False
    checkpointing: bool = False
    offload: bool = False
    ranks: int = 1
    bins: int = 8
    warm_up: int = 3
    repeats: int = 6
    saved_steps: int = 0
    seconds: int = 150
    device: str = "cuda"

    @property
    def work(self) -> Work:
        return Work(self.length, self.tokens, self.prompt, self.group, self.share)


def rates(
    g: Geometry, bin_: PackedBin, work: Work, seconds: float, passes: int, ranks: int
) -> dict[str, float]:
    """Tokens per second of all ranks, and shares of the peak.

    `mfu` is of 6 operations for each forwarded token and element of the matrices that it is
    multiplied with, the output's included. In a mixture only its experts' matrices count.
    `mfu_counted` is of the operations that observe/perf.py counts: the output matrix for trained
    tokens alone, and attention.
    """
    forwarded, peak = len(bin_.tokens), PEAK_FLOPS * seconds / passes
    counted = step_flops(g, forwarded, len(bin_.targets), bin_.packing.attended_pairs)
    return {
        "seconds": round(seconds, 5),
        "forwarded_tokens_per_second": round(ranks * passes * forwarded / seconds, 1),
        "sequence_tokens_per_second": round(
            ranks * passes * work.sequences * work.length / seconds, 1
        ),
        "mfu": round(6 * (matrix_elements(g) + g.vocab_size * g.hidden_size) * forwarded / peak, 4),
        "mfu_counted": round(counted / peak, 4),
    }


DETERMINISTIC = "ours, deterministic"
TRANSFORMERS = "transformers"


def through_transformers(folder: Path) -> Callable[[Geometry, torch.dtype, torch.device], Decoder]:
    """Return what makes the model of a checkpoint with transformers' class, whatever its family."""
    # Only here: it takes seconds to import transformers.
    from example_trainer.models.transformers_layout import transformers_geometry
    from example_trainer.models.transformers_model import TransformersModel

    return lambda _, dtype, device: TransformersModel(transformers_geometry(folder), dtype, device)


class Timer:
    """Seconds of calls, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, call: Callable[[], object]) -> float:
        self._wait()
        began = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def ours(
    case: Case, g: Geometry, dtype: torch.dtype, device: torch.device, config: TrainerConfig
) -> tuple[Any, Any]:
    """The trainer's model and optimizer, as a run makes them."""
    model = model_of(case, g, dtype, device)
    model.gradient_checkpointing = case.checkpointing
    optimizer = MasterAdamW(
        model,
        lr=config.lr,
        total_steps=config.training_steps,
        shards=model.shards,
        offload=case.offload,
        missing_is_zero=model.reaches_some,
    )
    model.arithmetic.sums = optimizer.sums
    return model, optimizer


def model_of(case: Case, g: Geometry, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The model of a case, with random weights."""
    deterministic = case.arithmetic == DETERMINISTIC
    table = choose_operations(device, dtype, deterministic)
    if case.ranks > 1:
        from example_trainer.parallel.fsdp import sharded_decoder  # takes a second to import

        model = sharded_decoder(g, dtype, device, world_size=case.ranks)
    elif case.arithmetic == TRANSFORMERS:
        with tempfile.TemporaryDirectory() as folder:
            write_model_folder(Path(folder), case.shape, g.max_positions)
            model = through_transformers(Path(folder))(g, dtype, device)
    else:
        model = Decoder(g, dtype, device, ops=table)
    random_weights(model, model.shards)
    model.prepare()
    return model


def measure(case: Case, device: torch.device, rank: int = 0) -> dict[str, Any]:
    """The figures of a case; of all ranks together, the memory this one's."""
    if case.arithmetic == DETERMINISTIC:  # before anything touches the GPU
        from vllm_patching.batch_invariant.settings import enable_settings

        enable_settings()
    g = geometry_of(case.shape, max(4096, case.length))
    dtype = dtype_on(device)
    config = TrainerConfig(
        model_name=case.shape, seq_len=case.length, gradient_checkpointing=case.checkpointing
    )
    bins = [
        random_bin(case.work, g.vocab_size, device, case.ranks * number + rank)
        for number in range(max(1, case.bins))
    ]
    timer, found = Timer(device), dict[str, Any]()
    with Meter(device) as meter:
        if case.arithmetic.startswith("plain"):
            plain = PlainDecoder(g, dtype, device, case.arithmetic.endswith("layers compiled"))
            random_weights(plain)
            gradient: Callable[[list[PackedBin]], object] = partial(plain_gradient, plain)
            found["arithmetic"], parameters = (
                case.arithmetic,
                sum(p.numel() for p in plain.parameters()),
            )
        else:
            model, optimizer = ours(case, g, dtype, device, config)
            gradient = lambda these: gradient_of(model, optimizer, these, config)  # noqa: E731
            found["arithmetic"] = f"ours, {model.arithmetic.ops.NAME}"
            if case.arithmetic == TRANSFORMERS:
                found["arithmetic"] = case.arithmetic
                found["attention"] = model.attention
                found["way"] = model.way
            elif model.arithmetic.ops.NAME == "fast":
                found["attention"] = fast_attention.library_name(device)
            parameters = sum(p.numel() for p in model.parameters())
        found |= {
            "parameters": parameters,
            "active_parameters": active_parameters(case.shape),
            "sequences": case.work.sequences,
        }
        for _ in range(case.warm_up):
            gradient(bins[:1])
        meter.reset()
        seconds = [timer(lambda: gradient(bins[:1])) for _ in range(case.repeats)]
        found["pass"] = rates(g, bins[0], case.work, min(seconds), 1, case.ranks)
        found["pass"] |= {
            "median_seconds": round(statistics.median(seconds), 5),
            "peak_bytes": meter.peak,
        }
        if case.bins and not case.arithmetic.startswith("plain"):
            stepper = Stepper(case, model, optimizer, config, bins, timer)
            found |= stepper.measure(g, meter)
    return found


@dataclass(frozen=True)
class Stepper:
    """Whole steps of a case: the gradient of its bins, the optimizer, and writing the weights."""

    case: Case
    model: Decoder
    optimizer: MasterAdamW
    config: TrainerConfig
    bins: list[PackedBin]
    timer: Timer

    def step(self) -> list[float]:
        """Take a step. Return the seconds of its three parts."""
        return [
            self.timer(lambda: gradient_of(self.model, self.optimizer, self.bins, self.config)),
            self.timer(self.optimizer.step),
            self.timer(self.optimizer.write_weights),
        ]

    def measure(self, geometry: Geometry, meter: Meter) -> dict[str, Any]:
        """Return the figures of the fastest step, and of a checkpoint if the case has one."""
        case = self.case
        self.optimizer.step()
        self.optimizer.write_weights()
        meter.reset()
        best = min((self.step() for _ in range(max(1, case.repeats // 2))), key=sum)
        step = rates(geometry, self.bins[0], case.work, sum(best), case.bins, case.ranks) | {
            "bins": case.bins,
            "optimizer_seconds": round(best[1], 5),
            "write_weights_seconds": round(best[2], 5),
            "peak_bytes": meter.peak,
        }
        if not case.saved_steps:
            return {"step": step}
        checkpoint = saving(
            case.saved_steps, self.model, self.optimizer, self.config, lambda: sum(self.step())
        )
        return {"step": step, "checkpoint": checkpoint}


def saving(
    count: int,
    model: Decoder,
    optimizer: MasterAdamW,
    config: TrainerConfig,
    whole_step: Callable[[], float],
) -> dict[str, Any]:
    """Measure the cost that a checkpoint, written in the background, adds to the steps beside it.

    Args:
        count: steps before the checkpoint; as many are taken after it began, and more until it is
            complete.
        whole_step: gives the seconds it took.

    Returns:
        `begin_seconds` stops training itself. `complete_seconds` counts from there until the folder
        has its name. `memory_seconds` is for taking the host memory for the copy, once in a run, in
        the background of its first steps.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as watcher:
        checkpoints = Checkpoints(
            Path(folder), new_run(config.model_name, Path(folder), PREFIX, int(time.time() * 1e3))
        )
        began = time.perf_counter()
        checkpoints.prepare(optimizer)
        copied = (
            checkpoints._memory is not None and checkpoints._memory.tensors() is not None
        )  # waits until it is taken
        memory_seconds = time.perf_counter() - began
        without = [whole_step() for _ in range(count)]
        began = time.perf_counter()
        path = checkpoints.begin(model, optimizer, config.shareable)
        begin_seconds = time.perf_counter() - began

        def complete() -> float:
            while checkpoints.writing:
                time.sleep(0.01)
            return time.perf_counter() - began

        ended, steps = watcher.submit(complete), list[float]()
        while len(steps) < count or not ended.done():
            steps.append(whole_step())
        checkpoints.wait()
        return {
            "copied_to_host_memory": copied,
            "memory_seconds": round(memory_seconds, 3),
            "begin_seconds": round(begin_seconds, 5),
            "complete_seconds": round(ended.result(), 3),
            "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
            "step_seconds_before": [round(seconds, 5) for seconds in without],
            "step_seconds_after": [round(seconds, 5) for seconds in steps],
        }


def plain_gradient(model: PlainDecoder, bins: list[PackedBin]) -> None:
    """Forward and backward of plain PyTorch; the gradients are dropped."""
    for one in bins:
        logprobs = model(one.tokens, tuple(one.lengths.tolist()), one.sources, one.targets)
        (logprobs * one.weights).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """The figures of a case; `out_of_memory` with the allocator's words if it does not fit."""
    case = Case(**asked)
    torch.manual_seed(0)
    with joined_group(case.ranks, torch.device(case.device)) as device:
        try:
            found = measure(case, device, dist.get_rank() if case.ranks > 1 else 0)
        except torch.OutOfMemoryError as error:
            if case.ranks > 1:
                raise
            found = {"out_of_memory": str(error).splitlines()[0]}
    return {"case": asdict(case), **found}


if __name__ == "__main__":
    answer_once(main)
