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

from example_trainer.batch.reader import CPU_TOKENS_PER_MICROBATCH
from example_trainer.config import TrainerConfig
from example_trainer.errors import TrainerError
from example_trainer.models.head import default_chunk
from example_trainer.models.hf_checkpoint import find_checkpoint, read_geometry
from example_trainer.models.ops import choose_table
from example_trainer.training.host_memory import free_host_memory
from example_trainer.training.memory_items import (
    ACTIVATIONS,
    ALL_PROJECTIONS,
    MemoryRequest,
    host_bytes,
    lasting_items,
    moments,
)
from example_trainer.weight_bridge.base import WeightBridge
from example_trainer.weight_bridge.single_copy import SingleCopyBridge

logger = logging.getLogger(__name__)

GPU_WORKSPACE = 1 << 30
"""Bytes that matrix kernels, NCCL's buffers and the allocator's rounding take on a GPU."""
CPU_WORKSPACE = 300 << 20
"""Bytes that torch's thread pools, the HTTP client and TensorBoard take in RAM after the imports."""

BUDGETS = (32768, 24576, 16384, 12288, 8192, 6144, 4096, 3072, 2048, 1536, 1024)
"""Tokens per microbatch to choose from: beyond the first a GPU is no faster, below the last its products are small."""
_PLANNED_SHARE = 0.92
"""Of the free memory: the plan is right within a few per cent, and the allocator's blocks do not fit into each other."""


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
    fewer = max(request.longest, request.tokens // 2)
    if fewer < request.tokens:
        changes.append((f"--tokens-per-microbatch {fewer}", replace(request, tokens_per_microbatch=fewer)))
        if not request.gradient_checkpointing:
            least = replace(request, gradient_checkpointing=True, tokens_per_microbatch=request.longest)
            changes.append((f"--gradient-checkpointing --tokens-per-microbatch {request.longest}", least))
    if device.type == "cuda" and request.lora is None and not request.offload:
        changes.append(("--optimizer-offload", replace(request, offload=True)))
        if not request.gradient_checkpointing:
            both = replace(request, offload=True, gradient_checkpointing=True)
            changes.append(("--optimizer-offload --gradient-checkpointing", both))
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


def token_budget(request: MemoryRequest, free: int) -> int:
    """What --tokens-per-microbatch is if it is not given: the largest of BUDGETS whose plan leaves room, and no less than the
    longest sequence, which is a bin of its own whatever is said here."""
    fitting = (b for b in BUDGETS if plan_memory(replace(request, tokens_per_microbatch=b)).total <= _PLANNED_SHARE * free)
    return max(request.longest, next(fitting, BUDGETS[-1]))


def require_host_memory(request: MemoryRequest, free: int, ranks_here: int) -> None:
    """Refuse to offload more than there is room for.

    Args:
        free: bytes of the host's memory.
        ranks_here: processes that share it.

    Raises:
        MemoryShortage: it does not fit.
    """
    needed = host_bytes(request) * ranks_here
    if needed > free:
        raise MemoryShortage(
            f"--optimizer-offload keeps {needed / 2**30:.2f} GiB of masters and moments in the host's memory, of which "
            f"{free / 2**30:.2f} are free; leave it out, spread the ranks over more machines, or train adapters "
            "(--weight-bridge-mode lora_only); --skip-memory-check tries it all the same"
        )


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


def require_between_turns(plan: MemoryPlan, free: int, lent: int) -> None:
    """Refuse what would leave vLLM no room for its keys and values between the trainer's turns.

    Args:
        free: bytes that are free beside them.
        lent: bytes of keys and values that vLLM gives in a turn; 0 without turns.

    Raises:
        MemoryShortage: what lasts does not fit beside them.
    """
    lasting = sum(plan.lasting.values())
    if lent and lasting > free:
        raise MemoryShortage(
            f"between its turns (--colocate) the training keeps {lasting / 2**30:.2f} GiB, and beside vLLM's keys and values "
            f"only {free / 2**30:.2f} are free; add --optimizer-offload, or start vLLM with a lower --gpu-memory-utilization; "
            "--skip-memory-check tries it all the same"
        )


def _ranks(variable: str) -> int:
    return max(1, int(os.environ.get(variable, "1")))


def check_memory(config: TrainerConfig, bridge: WeightBridge, dtype: torch.dtype, device: torch.device) -> int:
    """Log what the training will take, and refuse it if that is more than is free. Reads config.json, loads nothing.

    Returns:
        --tokens-per-microbatch; if it is not given, what memory allows.

    Raises:
        MemoryShortage: it does not fit, and --skip-memory-check was not given.
        ModelError: the model cannot be found or is not supported.
    """
    free, total = free_memory(device)
    outside_turns, free = free, free + bridge.lent_bytes
    host, ranks_here = free_host_memory()[0], _ranks("LOCAL_WORLD_SIZE")
    if device.type == "cpu":
        free //= ranks_here  # the ranks share this machine's memory
    request = memory_request(config, bridge, dtype, device)
    if config.tokens_per_microbatch is None and device.type == "cuda":
        request = replace(request, tokens_per_microbatch=token_budget(request, free))
        logger.info("Microbatches of at most %d tokens (--tokens-per-microbatch)", request.tokens)
    try:
        plan = require_memory(request, free, total, device)
        require_between_turns(plan, outside_turns, bridge.lent_bytes)
        require_host_memory(request, host, ranks_here)
    except MemoryShortage as error:
        if not config.skip_memory_check:
            raise
        logger.warning("Going on because of --skip-memory-check: %s", error)
        return request.tokens_per_microbatch
    logger.info("Memory of %s, at most, with %.2f GiB free:\n%s", device, free / 2**30, plan.table())
    if plan.total > free:
        logger.warning("Microbatches of %d tokens would not fit; if they come, the machine runs out of memory", request.tokens)
    return request.tokens_per_microbatch


def memory_request(config: TrainerConfig, bridge: WeightBridge, dtype: torch.dtype, device: torch.device) -> MemoryRequest:
    """What the options ask of this rank's device. Without --tokens-per-microbatch: as many as on a CPU."""
    geometry, _ = read_geometry(find_checkpoint(config.model_name))
    lora = config.weight_bridge_mode == "lora_only"
    return MemoryRequest(
        geometry=geometry,
        dtype=dtype,
        tokens_per_microbatch=config.tokens_per_microbatch or CPU_TOKENS_PER_MICROBATCH,
        seq_len=config.seq_len,
        table=choose_table(device, dtype, config.deterministic),
        share_prefixes=config.shares_prefixes,
        offload=config.optimizer_offload,
        gradient_checkpointing=config.gradient_checkpointing,
        logprob_chunk=config.logprob_chunk or default_chunk(device),
        single_copy=isinstance(bridge, SingleCopyBridge),
        layouts=bridge.layouts(),
        packs=bridge.packs(device),
        reference=config.loads_reference,
        lora=(config.lora_r, tuple(config.lora_target_modules)) if lora else None,
        world_size=_ranks("WORLD_SIZE"),
        workspace=GPU_WORKSPACE if device.type == "cuda" else CPU_WORKSPACE,
    )
