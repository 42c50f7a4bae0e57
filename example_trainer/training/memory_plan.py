"""The memory that a training needs, computed from the model's config.json before a weight is
loaded.

`plan_memory` puts together the items that `memory_items` counts. `require_memory` refuses a sum
that is more than what is free, and names the flags with which the training fits; `memory_choice`
takes the first way to train that fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from example_trainer.errors import TrainerError
from example_trainer.training.host_memory import free_host_memory
from example_trainer.training.memory_items import (
    ACTIVATIONS,
    MemoryRequest,
    host_bytes,
    lasting_items,
    moments,
    parameter_count,
)
from vllm_patching.weights.families import PROJECTIONS

LEAST_SERVER_WORKSPACE = 2 << 30
"""Bytes that a vLLM server needs beside its weights, for keys, values and activations."""
GPU_WORKSPACE = 1 << 30
"""Bytes that matrix kernels, NCCL's buffers and the allocator's rounding take on a GPU."""
CPU_WORKSPACE = 300 << 20
"""Bytes that torch's thread pools, the HTTP client and TensorBoard take in RAM after the
imports."""

BUDGETS = (32768, 24576, 16384, 12288, 8192, 6144, 4096, 3072, 2048, 1536, 1024)
"""Tokens per microbatch to choose from: beyond the first a GPU is no faster, below the last its
products are small."""
OUTSIDE_SHARE = 2 << 30
"""Bytes that a vLLM process takes beyond its --gpu-memory-utilization: the CUDA context and
captured graphs."""
PLANNED_SHARE = 0.92
"""Of the free memory: the plan is right within a few per cent, and the allocator's blocks do not
fit into each other."""


class MemoryShortage(TrainerError):
    """The training would not fit.

    The message names the largest items, what is free, and what to change.
    """


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
        """The items that exist together in the greatest moment, the largest first."""
        found = {**self.lasting, **self.moments[self.greatest]}
        return tuple(
            sorted(
                ((name, size) for name, size in found.items() if size), key=lambda item: -item[1]
            )
        )

    @property
    def total(self) -> int:
        """Bytes in the greatest moment."""
        return sum(size for _, size in self.items)

    @property
    def certain(self) -> int:
        """Bytes that are taken however long the sequences turn out to be."""
        rests = [
            sum(size for name, size in items.items() if name != ACTIVATIONS)
            for items in self.moments.values()
        ]
        return sum(self.lasting.values()) + max(rests)

    def table(self) -> str:
        """One line an item, for the log."""
        rows = [f"  {size / 2**30:8.2f} GiB  {name}" for name, size in self.items]
        return "\n".join(
            [*rows, f"  {self.total / 2**30:8.2f} GiB  in all, in the {self.greatest}"]
        )


def plan_memory(request: MemoryRequest) -> MemoryPlan:
    """The bytes of each part of a training on one device."""
    return MemoryPlan(lasting_items(request), moments(request))


def free_memory(
    device: torch.device, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """Bytes free and in all: of the GPU, or of RAM within the limit of this process's control
    group.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    return free_host_memory(proc, cgroup)


@dataclass(frozen=True)
class Room:
    """Memory that is free for a training, in bytes.

    Attributes:
        device: of the parameters.
        free, total: of the device. Memory that vLLM lends in a turn counts as free.
        host: free memory of this machine, which all its ranks share.
        ranks_here: ranks of this trainer on this machine.
        lent: the part of `free` that vLLM takes back between turns; 0 without turns.
        server: memory of the device that is left to a vLLM server which the trainer will start
            there. It is not in `free`.
        server_share: --gpu-memory-utilization of a vLLM server that runs on the device; None if
            that is not known.
    """

    device: torch.device
    free: int
    total: int
    host: int
    ranks_here: int = 1
    lent: int = 0
    server: int = 0
    server_share: float | None = None

    def holds(self, request: MemoryRequest, share: float = 1.0) -> bool:
        """Return whether a training fits into `share` of the free memory, of the device and of the
        host.
        """
        plan = plan_memory(request)
        on_device = (
            plan.total if self.device.type == "cuda" else plan.certain
        ) <= share * self.free
        between_turns = not self.lent or sum(plan.lasting.values()) <= self.free - self.lent
        return on_device and between_turns and self.host_needed(request) <= share * self.host

    def host_needed(self, request: MemoryRequest) -> int:
        """Bytes of host memory that all ranks on this machine take together."""
        return host_bytes(request) * self.ranks_here


def remedies(request: MemoryRequest, room: Room) -> list[str]:
    """Flags and devices with which the training fits, and the GiB needed then.

    If nothing makes it fit, the flags that lower the need.
    """
    changes = _flag_changes(request, room)
    enough = [(flags, changed) for flags, changed in changes if room.holds(changed)]
    shortest = [
        (flags, changed)
        for flags, changed in enough
        if not any(set(other) < set(flags) for other, _ in enough)
    ]
    found = [(" ".join(flags), changed, room) for flags, changed in shortest[:3]] + _larger_changes(
        request, room
    )
    if room.server:
        alone = replace(room, free=room.free + room.server, server=0)
        if alone.holds(request):
            found.insert(0, ("--vllm-gpus with the number of another GPU", request, alone))
    lower = _lower_share(request, room)
    if not found and not lower:
        now = plan_memory(request).total
        single = [(flags[0], changed, room) for flags, changed in changes if len(flags) == 1]
        found = [one for one in single if plan_memory(one[1]).total < now]
    lines = lower + [f"{text} ({_needs(changed, where)})" for text, changed, where in found]
    return lines or ["a device with more memory"]


def _lower_share(request: MemoryRequest, room: Room) -> list[str]:
    """The share of the GPU with which vLLM leaves enough for a training in its memory; empty if
    there is none.
    """
    if (
        room.device.type != "cuda"
        or not request.single_copy
        or room.host_needed(request) > room.host
    ):
        return []
    share = fitting_server_share(request, room)
    if share is None:
        return []
    return [f"start vLLM with --gpu-memory-utilization {share:.2f} or less"]


def fitting_server_share(request: MemoryRequest, room: Room) -> float | None:
    """The largest --gpu-memory-utilization of vLLM beside which a single copy fits, in hundredths.

    The server's present share is lowered by what is missing now. This counts what other programs
    and vLLM itself take beyond that share. Without a present share, the plan gets the rest of the
    device.

    Returns:
        None if the rest would not hold vLLM's weights, and some keys and values.
    """
    needed = plan_memory(request).total
    share = (room.total - needed - OUTSIDE_SHARE) / room.total
    if room.server_share is not None:
        share = room.server_share - (needed - room.free) / room.total
    share = (
        math.floor(100 * share + 1e-6) / 100
    )  # the decimal fraction that was given may lie below its hundredth
    weights = request.dtype.itemsize * parameter_count(request.geometry) / request.world_size
    if share * room.total <= weights + LEAST_SERVER_WORKSPACE:
        return None
    return share


def _flag_changes(
    request: MemoryRequest, room: Room
) -> list[tuple[tuple[str, ...], MemoryRequest]]:
    """Every combination of flags that lower the need, those of the fewest flags first."""
    single: list[tuple[str, dict[str, Any]]] = []
    if not request.gradient_checkpointing:
        single.append(("--gradient-checkpointing", {"gradient_checkpointing": True}))
    fewer = max(request.longest, request.tokens // 2)
    if fewer < request.tokens:
        single.append((f"--tokens-per-microbatch {fewer}", {"tokens_per_microbatch": fewer}))
    if room.device.type == "cuda" and request.lora is None:
        if not request.offload:
            single.append(("--optimizer-offload on", {"offload": True}))
        if request.optimizer == "adamw":
            single.append(("--optimizer adamw-8bit", {"optimizer": "adamw-8bit"}))
    return [
        (
            tuple(flag for flag, _ in chosen),
            replace(request, **{key: value for _, one in chosen for key, value in one.items()}),
        )
        for count in range(1, len(single) + 1)
        for chosen in combinations(single, count)
    ]


def _larger_changes(request: MemoryRequest, room: Room) -> list[tuple[str, MemoryRequest, Room]]:
    """The smallest number of GPUs that suffices, fewer with 8-bit moments, and adapters in place of
    all weights.
    """
    found: list[tuple[str, MemoryRequest, Room]] = []
    if (
        room.device.type == "cuda"
        and request.lora is None
        and not request.single_copy
        and not room.server
    ):
        in_8_bits = replace(request, optimizer="adamw-8bit")
        spread = [
            _spread(request, room),
            _spread(in_8_bits, room) if request.optimizer == "adamw" else None,
        ]
        if spread[0] is not None:
            found.append((f"{spread[0][0].world_size} GPUs", *spread[0]))
        if spread[1] is not None and (
            spread[0] is None or spread[1][0].world_size < spread[0][0].world_size
        ):
            found.append((f"{spread[1][0].world_size} GPUs and --optimizer adamw-8bit", *spread[1]))
    if request.lora is None:
        adapters = replace(request, lora=(16, PROJECTIONS), single_copy=False, offload=False)
        if room.holds(adapters):
            found.append(("--weight-bridge-mode lora_only", adapters, room))
    return found


def _spread(request: MemoryRequest, room: Room) -> tuple[MemoryRequest, Room] | None:
    """The training over the smallest number of GPUs like this one on which it fits; None if there
    is none up to 64 times.
    """
    for times in (2, 4, 8, 16, 32, 64):
        wider = replace(room, ranks_here=times * room.ranks_here)
        wide = replace(request, world_size=times * request.world_size)
        for offload in sorted({False, request.offload}):
            if wider.holds(way := replace(wide, offload=offload)):
                return way, wider
    return None


def _needs(request: MemoryRequest, room: Room) -> str:
    """`100.61 GiB then`, or both sizes if host memory is needed too."""
    size = f"{plan_memory(request).total / 2**30:.2f} GiB then"
    host = room.host_needed(request)
    if not host:
        return size
    return f"{size}, and {host / 2**30:.2f} GiB of host memory"


def token_budget(request: MemoryRequest, free: int) -> int:
    """The value of --tokens-per-microbatch if it is not given: the largest of BUDGETS whose plan
    leaves some memory free.

    It is at least the longest sequence, which has a microbatch of its own anyway.
    """
    fitting = (
        b
        for b in BUDGETS
        if plan_memory(replace(request, tokens_per_microbatch=b)).total <= PLANNED_SHARE * free
    )
    return max(request.longest, next(fitting, BUDGETS[-1]))


def require_memory(request: MemoryRequest, room: Room) -> MemoryPlan:
    """The plan, if it fits.

    On a GPU everything must fit. On a CPU it is enough that the certain part does: RAM is taken
    page by page as sequences really get long, and few of them are as long as they may be.

    Raises:
        MemoryShortage: it does not fit into the memory of the device or of the host.
    """
    plan, needed = plan_memory(request), room.host_needed(request)
    if (plan.total if room.device.type == "cuda" else plan.certain) > room.free:
        biggest = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in plan.items[:3])
        raise MemoryShortage(
            f"the training needs about {plan.total / 2**30:.2f} GiB{_saved_already(request)} and "
            f"{room.free / 2**30:.2f} of {room.total / 2**30:.2f} GiB are free on {room.device}{_beside(room)}; the largest "
            f"items are {biggest}; what helps: {', or '.join(remedies(request, room))}; --skip-memory-check tries it all the "
            "same"
        )
    require_between_turns(plan, room.free - room.lent, room.lent)
    if needed > room.host:
        on_gpu = plan_memory(replace(request, offload=False)).total
        raise MemoryShortage(
            f"{request.offloadable} in host memory (--optimizer-offload) need "
            f"{needed / 2**30:.2f} GiB, of which "
            f"{room.host / 2**30:.2f} are free; with them on {room.device} the training needs "
            f"{on_gpu / 2**30:.2f} GiB, of which {room.free / 2**30:.2f} are free; what helps: "
            f"{', or '.join(remedies(request, room))}; --skip-memory-check tries it all the same"
        )
    return plan


def _beside(room: Room) -> str:
    """The memory that a server of the trainer's needs, if it shares the device."""
    if not room.server:
        return ""
    return f" beside the {room.server / 2**30:.2f} GiB that the vLLM server needs there"


def _saved_already(request: MemoryRequest) -> str:
    """The ways to save memory that a need counts already."""
    ways = [f"{request.offloadable} in host memory"] * request.offload
    ways += ["layers computed again in the backward pass"] * request.gradient_checkpointing
    if not ways:
        return ""
    return f" ({', '.join(ways)})"


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
            f"only {free / 2**30:.2f} are free; add --optimizer-offload on, or start vLLM with a lower "
            "--gpu-memory-utilization; --skip-memory-check tries it all the same"
        )
