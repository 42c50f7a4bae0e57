"""What a training will keep in memory, computed from the model's config.json before a weight is loaded.

`plan_memory` puts together the items that `memory_items` counts; `check_memory` compares their sum with what is free and
refuses what cannot fit.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from example_trainer.config import TrainerConfig
from example_trainer.errors import TrainerError
from example_trainer.models.hf_checkpoint import find_checkpoint, read_geometry
from example_trainer.training.host_memory import free_host_memory
from example_trainer.training.memory_items import ACTIVATIONS, ALL_PROJECTIONS, MemoryRequest, lasting_items, moments
from example_trainer.weight_bridge.base import WeightBridge
from example_trainer.weight_bridge.single_copy import SingleCopyBridge

logger = logging.getLogger(__name__)

GPU_WORKSPACE = 1 << 30
"""Bytes that matrix kernels, NCCL's buffers and the allocator's rounding take on a GPU."""
CPU_WORKSPACE = 300 << 20
"""Bytes that torch's thread pools, the HTTP client and TensorBoard take in RAM after the imports."""


class MemoryShortage(TrainerError):
    """The training would not fit. The message names the largest items, what is free, and what to change."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by what they are for.

    Attributes:
        lasting: what is there all the time.
        moments: by the name of a moment, what is there in it beside that.
    """

    lasting: Mapping[str, int]
    moments: Mapping[str, Mapping[str, int]]

    @property
    def greatest(self) -> str:
        """The moment of a step in which the most is there."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def items(self) -> tuple[tuple[str, int], ...]:
        """What exists together in the greatest moment, the largest first."""
        found = {**self.lasting, **self.moments[self.greatest]}
        return tuple(sorted(((name, size) for name, size in found.items() if size), key=lambda item: -item[1]))

    @property
    def total(self) -> int:
        """Bytes in the greatest moment."""
        return sum(size for _, size in self.items)

    @property
    def certain(self) -> int:
        """What is taken however long the sequences turn out to be."""
        rests = [sum(size for name, size in items.items() if name != ACTIVATIONS) for items in self.moments.values()]
        return sum(self.lasting.values()) + max(rests)

    def table(self) -> str:
        """One line an item, for the log."""
        rows = [f"  {size / 2**30:8.2f} GiB  {name}" for name, size in self.items]
        return "\n".join([*rows, f"  {self.total / 2**30:8.2f} GiB  in all, in the {self.greatest}"])


def plan_memory(request: MemoryRequest) -> MemoryPlan:
    """The bytes of each part of a training on one device."""
    return MemoryPlan(lasting_items(request), moments(request))


def free_memory(device: torch.device, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Bytes free and in all: of the GPU, or of RAM within the limit of this process's control group."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    return free_host_memory(proc, cgroup)


def remedies(request: MemoryRequest, free: int, total: int, device: torch.device) -> list[str]:
    """What makes room, with the GiB needed then; what suffices by itself comes first, and nothing else if anything does."""
    now = plan_memory(request).total
    changes: list[tuple[str, MemoryRequest]] = []
    if not request.gradient_checkpointing:
        changes.append(("--gradient-checkpointing", replace(request, gradient_checkpointing=True)))
    if request.batch_size > 1:
        changes.append((f"--batch-size {request.batch_size // 2}", replace(request, batch_size=request.batch_size // 2)))
    if not request.gradient_checkpointing and request.batch_size > 1:
        changes.append(("--gradient-checkpointing --batch-size 1", replace(request, gradient_checkpointing=True, batch_size=1)))
    if device.type == "cuda" and request.lora is None and not request.single_copy:
        for ranks in (2, 4, 8, 16, 32, 64):
            spread = replace(request, world_size=ranks * request.world_size, gradient_checkpointing=True)
            if plan_memory(spread).total <= free:
                changes.append((f"{spread.world_size} GPUs (torchrun) and --gradient-checkpointing", spread))
                break
    if request.lora is None:
        adapters = replace(request, lora=(16, ALL_PROJECTIONS), single_copy=False, gradient_checkpointing=True)
        changes.append(("--weight-bridge-mode lora_only --gradient-checkpointing", adapters))
    found = [(text, plan_memory(changed).total) for text, changed in changes]
    enough = [(text, size) for text, size in found if size <= free]
    said = [f"{text} ({size / 2**30:.2f} GiB then)" for text, size in enough or found if size < now]
    share = math.floor(100 * (total - now) / total) / 100
    if device.type == "cuda" and request.single_copy and share >= 0.05:
        said.insert(0, f"start vLLM with --gpu-memory-utilization {share:.2f} or less")
    return said or ["a device with more memory"]


def require_memory(request: MemoryRequest, free: int, total: int, device: torch.device) -> MemoryPlan:
    """The plan, if it fits.

    On a GPU everything must fit. On a CPU it is enough that the part does which is certain: RAM is taken page by page as
    sequences really get long, and few of them are as long as they may be.

    Raises:
        MemoryShortage: it does not fit into the free bytes.
    """
    plan = plan_memory(request)
    if (plan.total if device.type == "cuda" else plan.certain) > free:
        ways = remedies(request, free, total, device)
        biggest = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in plan.items[:3])
        raise MemoryShortage(
            f"the training needs about {plan.total / 2**30:.2f} GiB and {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free "
            f"on {device}; the largest items are {biggest}; what helps: {', or '.join(ways)}; "
            "--skip-memory-check tries it all the same"
        )
    return plan


def _ranks(variable: str) -> int:
    return max(1, int(os.environ.get(variable, "1")))


def check_memory(config: TrainerConfig, bridge: WeightBridge, dtype: torch.dtype, device: torch.device) -> None:
    """Log what the training will take, and refuse it if that is more than is free. Reads config.json, loads nothing.

    Raises:
        MemoryShortage: it does not fit, and --skip-memory-check was not given.
        ModelError: the model cannot be found or is not supported.
    """
    geometry, _ = read_geometry(find_checkpoint(config.model_name))
    lora = config.weight_bridge_mode == "lora_only"
    request = MemoryRequest(
        geometry=geometry,
        dtype=dtype,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        gradient_checkpointing=config.gradient_checkpointing,
        logprob_chunk=config.logprob_chunk,
        single_copy=isinstance(bridge, SingleCopyBridge),
        receivers=bridge.receivers(),
        reference=bool(config.kl_coef) and not (lora and config.reference_model is None),
        lora=(config.lora_r, tuple(config.lora_target_modules)) if lora else None,
        world_size=_ranks("WORLD_SIZE"),
        workspace=GPU_WORKSPACE if device.type == "cuda" else CPU_WORKSPACE,
    )
    free, total = free_memory(device)
    if device.type == "cpu":
        free //= _ranks("LOCAL_WORLD_SIZE")  # the ranks share this machine's memory
    try:
        plan = require_memory(request, free, total, device)
    except MemoryShortage as error:
        if not config.skip_memory_check:
            raise
        logger.warning("Going on because of --skip-memory-check: %s", error)
        return
    logger.info("Memory of %s, at most, with %.2f GiB free:\n%s", device, free / 2**30, plan.table())
    if plan.total > free:
        logger.warning(
            "Micro-batches of %d sequences of %d tokens would not fit; if they come, the machine runs out of memory",
            config.batch_size, config.seq_len,
        )  # fmt: skip
