"""The share of GPU memory that a vLLM server gets which the trainer starts: arithmetic before
anything is loaded.

On the trainer's own GPU vLLM gets what the training's plan leaves, and the plan leaves at least
what vLLM needs. On other GPUs vLLM gets its default share, or less where other programs have some
of the memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.training.memory_items import MemoryRequest, parameter_count
from example_trainer.training.memory_plan import (
    OUTSIDE_SHARE,
    PLANNED_SHARE,
    MemoryShortage,
    Room,
    plan_memory,
)
from example_trainer.weight_bridge.base import WeightBridge
from example_trainer.weight_bridge.server_gpus import (
    GpuMemory,
    ServerFlags,
    ServerGpus,
    memory_of_gpus,
)
from vllm_patching.weights.families import Geometry

logger = logging.getLogger(__name__)

DEFAULT_SHARE = 0.92
"""vLLM's default of --gpu-memory-utilization."""
WORKSPACE = 3 << 30
"""Bytes of vLLM's share for the activations of its largest batch and for sampling."""
SEQUENCES = 32
"""Sequences of --seq-len whose keys and values fit at once, at least."""


@dataclass(frozen=True)
class ServerNeeds:
    """Bytes that a server needs at least on each of its GPUs."""

    weights: int
    cache: int

    @property
    def share(self) -> int:
        """The part that --gpu-memory-utilization counts."""
        return self.weights + self.cache + WORKSPACE

    def __str__(self) -> str:
        parts = (self.share + OUTSIDE_SHARE, self.weights, self.cache)
        total, weights, cache = (f"{size / 2**30:.2f} GiB" for size in parts)
        return f"{total} ({weights} of weights, {cache} of keys and values)"


def server_needs(
    geometry: Geometry,
    dtype: torch.dtype,
    degree: int,
    seq_len: int,
    max_model_len: int | None = None,
) -> ServerNeeds:
    """Count what a server needs: its weights, and keys and values of the longest sequence or of
    SEQUENCES of --seq-len.

    Args:
        dtype: of weights, keys and values.
        degree: ranks that share them; keys of fewer heads than ranks are repeated.
        max_model_len: the server's longest sequence; None for the model's.
    """
    longest = min(max_model_len or geometry.max_positions, geometry.max_positions)
    tokens = max(longest, SEQUENCES * min(seq_len, longest))
    heads = max(1, geometry.num_kv_heads // degree)
    per_token = 2 * geometry.num_layers * heads * geometry.head_dim * dtype.itemsize
    return ServerNeeds(dtype.itemsize * parameter_count(geometry) // degree, tokens * per_token)


def reserved_bytes(needs: ServerNeeds, total: int, given: float | None = None) -> int:
    """Bytes of the trainer's GPU that the training's plan leaves to the server.

    Args:
        total: of the GPU. A share is rounded down to a hundredth of it.
        given: --gpu-memory-utilization of --vllm-args, which is taken as it is.
    """
    if given is None:
        return OUTSIDE_SHARE + needs.share + total // 100
    return OUTSIDE_SHARE + math.ceil(given * total)


def share_of(left: int, total: int) -> float:
    """The --gpu-memory-utilization with which a server stays within `left` bytes, in hundredths."""
    hundredths = math.floor(100 * (left - OUTSIDE_SHARE) / total)
    return min(DEFAULT_SHARE, max(0, hundredths) / 100)


def left_by(request: MemoryRequest, free: int, reserved: int) -> int:
    """Bytes that a training leaves: all but its plan and the margin of error, and never less than
    what was reserved.

    Args:
        free: bytes free for the training and the server together.
    """
    return max(reserved, free - math.ceil(plan_memory(request).total / PLANNED_SHARE))


def share_elsewhere(
    gpus: Sequence[str], memory: Mapping[str, GpuMemory], needs: ServerNeeds
) -> float:
    """The share on GPUs that the trainer does not use: the default, or what other programs leave of
    it.

    Args:
        memory: by GPU; a GPU that is not in it is taken to be free.

    Raises:
        MemoryShortage: one of the GPUs has less than the server needs.
    """
    share = DEFAULT_SHARE
    for gpu in gpus:
        found = memory.get(gpu)
        if found is None:
            continue
        if found.free < needs.share + OUTSIDE_SHARE:
            raise MemoryShortage(
                f"the vLLM server needs about {needs} on GPU {gpu}, of which {found.free / 2**30:.2f} of "
                f"{found.total / 2**30:.2f} GiB are free: name other GPUs with --vllm-gpus, end the programs that use this one "
                '(nvidia-smi), or give --vllm-args "--max-model-len N" for shorter sequences'
            )
        if found.free < DEFAULT_SHARE * found.total:
            share = min(share, share_of(found.free, found.total))
    return share


def server_flags(place: ServerGpus, given: ServerFlags, share: float) -> tuple[str, ...]:
    """The flags of `vllm serve` that a server is started with beside the user's, which win."""
    flags: list[str] = []
    if not place.degree_is_given and place.tensor_parallel > 1:
        flags += ["--tensor-parallel-size", str(place.tensor_parallel)]
    if given.utilization is None and share < DEFAULT_SHARE:
        flags += ["--gpu-memory-utilization", f"{share:.2f}"]
    return tuple(flags)


@dataclass(frozen=True)
class ServerPlan:
    """A server that the trainer will start on GPUs.

    Attributes:
        bridge: starts it.
        place: its GPUs.
        given: the user's flags.
        needs: bytes on each of its GPUs.
        memory: of this machine's GPUs.
    """

    bridge: WeightBridge
    place: ServerGpus
    given: ServerFlags
    needs: ServerNeeds
    memory: Mapping[str, GpuMemory]

    def reserved(self, total: int) -> int:
        """Bytes of the trainer's GPU that the training leaves to the server; 0 if the server has
        GPUs of its own.
        """
        if not self.place.beside_trainer:
            return 0
        return reserved_bytes(self.needs, total, self.given.utilization)

    def start_beside(self, request: MemoryRequest, room: Room) -> None:
        """Give the server its flags, and log them.

        Args:
            request: the training that was chosen.
            room: in which it was chosen.

        Raises:
            MemoryShortage: another GPU has less than the server needs.
        """
        share = DEFAULT_SHARE
        if self.given.utilization is None:
            others = [
                gpu
                for gpu in self.place.gpus
                if not self.place.beside_trainer or gpu != self.place.trainer
            ]
            share = share_elsewhere(others, self.memory, self.needs)
            if self.place.beside_trainer:
                left = left_by(request, room.free + room.server, room.server)
                share = min(share, share_of(left, room.total))
        flags = server_flags(self.place, self.given, share)
        where = "which the trainer does not use"
        if self.place.beside_trainer:
            where = "beside the trainer"
        logger.info(
            "[Bridge] vLLM will run on GPU %s, %s; it needs at least %s there and gets %s",
            self.place.listed, where, self.needs, " ".join(flags) or "the share that its flags or its defaults give",
        )  # fmt: skip
        self.bridge.add_server_flags(flags)


def plan_server(
    config: TrainerConfig, bridge: WeightBridge, request: MemoryRequest, device: torch.device
) -> ServerPlan | None:
    """The server that the bridge will start on GPUs; None if it starts none there.

    Raises:
        ConfigError: the server cannot have the GPUs that the options name.
    """
    place = bridge.place_server(device, request.geometry)
    if place is None:
        return None
    given, memory = (
        ServerFlags.of(config.vllm_args),
        {} if config.skip_memory_check else memory_of_gpus(),
    )
    absent = [
        gpu
        for gpu in (config.vllm_gpus or "").split(",")
        if gpu and memory and str(int(gpu)) not in memory
    ]
    if absent:
        present = ", ".join(gpu for gpu in memory if gpu.isdigit())
        raise ConfigError(
            f"--vllm-gpus {config.vllm_gpus}: GPU {absent[0]} is not there; nvidia-smi lists {present}"
        )
    needs = server_needs(
        request.geometry, request.dtype, place.tensor_parallel, config.seq_len, given.max_model_len
    )
    return ServerPlan(bridge, place, given, needs, memory)
