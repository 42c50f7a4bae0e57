"""The way to train that fits: masters and moments on the GPU or in host memory, layers kept or
computed again.

None of these ways changes the optimizer's arithmetic, nor a bit of a deterministic run's weights.
So any of them may be taken by itself. `--optimizer` is never changed here.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from example_trainer.batch.reader import CPU_TOKENS_PER_MICROBATCH
from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError, ModelError
from example_trainer.models.head import default_chunk
from example_trainer.models.hf_checkpoint import find_checkpoint, read_geometry
from example_trainer.models.ops import choose_table
from example_trainer.models.transformers_activations import Activations, measure_activations
from example_trainer.models.transformers_layout import TransformersGeometry
from example_trainer.models.transformers_model import TransformersModel
from example_trainer.parallel.ranks import Ranks
from example_trainer.training.memory_plan import (
    FLOAT32,
    OUTSIDE_SHARE,
    PLANNED_SHARE,
    MemoryRequest,
    MemoryShortage,
    Room,
    free_memory,
    host_bytes,
    parameter_count,
    plan_memory,
    require_memory,
    token_budget,
)
from example_trainer.training.optimizer import free_host_memory
from example_trainer.weight_bridge.base import WeightBridge
from example_trainer.weight_bridge.server_gpus import (
    GpuMemory,
    ServerFlags,
    ServerGpus,
    memory_of_gpus,
)
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from vllm_patching.weights.families import Geometry

# The share of GPU memory that a vLLM server gets which the trainer starts: arithmetic before
# anything is loaded.
#
# On the trainer's own GPU vLLM gets what the training's plan leaves, and the plan leaves at least
# what vLLM needs. On other GPUs vLLM gets its default share, or less where other programs have some
# of the memory.

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
        card = memory.get(gpu)
        if card is None:
            continue
        if card.free < needs.share + OUTSIDE_SHARE:
            raise MemoryShortage(
                f"the vLLM server needs about {needs} on GPU {gpu}, where {card.free / 2**30:.2f} of "
                f"{card.total / 2**30:.2f} GiB are free. Name other GPUs with --vllm-gpus, end the "
                "programs that use this one "
                '(nvidia-smi), or give --vllm-args "--max-model-len N" for shorter sequences'
            )
        if card.free < DEFAULT_SHARE * card.total:
            share = min(share, share_of(card.free, card.total))
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


GPU_WORKSPACE = 1 << 30
"""Bytes that matrix kernels, NCCL's buffers and the allocator's rounding take on a GPU."""
CPU_WORKSPACE = 300 << 20
"""Bytes that torch's thread pools, the HTTP client and TensorBoard take in RAM after the
imports."""
BUS_BYTES_PER_SECOND = 50e9
"""Rate of an offloaded update over the bus, each way. Measured on an H200: "8B, one GPU, offloaded"
in trainer_speed.json."""


@dataclass(frozen=True)
class MemoryChoice:
    """The way to train that fits.

    Attributes:
        offload: masters and moments are in host memory.
        gradient_checkpointing: layers are computed again in the backward pass.
        tokens_per_microbatch: most tokens of one forward and backward pass, unless one sequence is
            longer.
    """

    offload: bool
    gradient_checkpointing: bool
    tokens_per_microbatch: int

    def applied_to(self, config: TrainerConfig) -> TrainerConfig:
        """The options with the choice in place of "auto"."""
        chosen = {
            "optimizer_offload": self.offload,
            "gradient_checkpointing": self.gradient_checkpointing,
        }
        return config.model_copy(update=chosen)


def choose_memory(
    config: TrainerConfig,
    bridge: WeightBridge,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks | None = None,
) -> MemoryChoice:
    """Choose the first way to train that fits on every rank, and log it. Reads config.json, loads
    nothing. Collective.

    Raises:
        MemoryShortage: none fits, and --skip-memory-check was not given.
        ModelError: the model cannot be found or is not supported.
    """
    ranks = ranks or Ranks()
    request = memory_request(config, bridge, dtype, device)
    server = plan_server(config, bridge, request, device)
    room = free_room(bridge, device, server)
    ways = candidates(request, config, room)
    mine = [
        [room.holds(way, PLANNED_SHARE), room.holds(way), way.tokens_per_microbatch] for way in ways
    ]
    rows = ranks.gather(mine, "planning memory")
    number = first_that_fits([[(roomy, fits) for roomy, fits, _ in rank] for rank in rows])
    if number is None:
        refusal = refuse(ways, config, room, ranks)
        if not config.skip_memory_check:
            raise refusal
        logger.warning("Going on because of --skip-memory-check: %s", refusal)
        number = ranks.broadcast(ways.index(smallest(ways, room)), "planning memory")
    tokens = min(rank[number][2] for rank in rows)
    way = replace(ways[number], tokens_per_microbatch=tokens)
    if ranks.is_main:
        _report(way, ways[0], room)
    if server is not None:
        server.start_beside(way, room)
    return MemoryChoice(way.offload, way.gradient_checkpointing, tokens)


def free_room(bridge: WeightBridge, device: torch.device, server: ServerPlan | None = None) -> Room:
    """The memory that is free now, but for the part of a server that the trainer will start on the
    same GPU.
    """
    free, total = free_memory(device)
    ranks_here = _ranks("LOCAL_WORLD_SIZE")
    if device.type == "cpu":
        free //= ranks_here  # the ranks share this machine's memory
    reserved = 0
    if server is not None:
        reserved = server.reserved(total)
    free += bridge.lent_bytes - reserved
    host, lent = free_host_memory()[0], bridge.lent_bytes
    return Room(device, free, total, host, ranks_here, lent, reserved, bridge.server_share)


def candidates(request: MemoryRequest, config: TrainerConfig, room: Room) -> list[MemoryRequest]:
    """The ways to train that the options leave open, the preferred ones first, each with its
    largest microbatch.

    A smaller microbatch comes before offloading, and offloading before recomputing. A microbatch of
    one sequence still keeps a GPU busy. An offloaded update costs the same seconds however long the
    batch is. Recomputing costs a third of every forward and backward pass.
    """
    on_gpu = room.device.type == "cuda"
    offload = _values(config.optimizer_offload, on_gpu and request.lora is None)
    recompute = _values(config.gradient_checkpointing, on_gpu)
    ways = [
        replace(request, offload=o, gradient_checkpointing=r)
        for r, o in product(recompute, offload)
    ]
    if _chooses_tokens(request, config, room):
        return [replace(way, tokens_per_microbatch=token_budget(way, room.free)) for way in ways]
    return ways


def _chooses_tokens(request: MemoryRequest, config: TrainerConfig, room: Room) -> bool:
    """Return whether the memory decides how many tokens a microbatch has.

    Deterministic ranks of FSDP2 add their gradients after each microbatch, and rollouts that share
    a prefix add theirs within one. The size of a microbatch then decides bits, and the free memory
    must not.
    """
    repeats = config.deterministic and (request.sharded or request.share_prefixes)
    return config.tokens_per_microbatch is None and room.device.type == "cuda" and not repeats


def _values(option: object, open_on_this_device: bool) -> list[bool]:
    """The values of an option that may be tried: the chosen value, or both."""
    if isinstance(option, bool):
        return [option]
    if not open_on_this_device:
        return [False]
    return [False, True]


def first_that_fits(ranks: Sequence[Sequence[tuple[bool, bool]]]) -> int | None:
    """The number of the first way that fits on every rank; None if there is none.

    A way that leaves some memory free goes before a way that needs all of it.

    Args:
        ranks: for each rank, for each way: whether it leaves some memory free, and whether it fits
            at all.
    """
    for column in (0, 1):
        for way in range(len(ranks[0])):
            if all(rank[way][column] for rank in ranks):
                return way
    return None


def smallest(ways: Sequence[MemoryRequest], room: Room) -> MemoryRequest:
    """The way that needs least of the device, among the ways for which the host has enough memory
    if there are any.
    """
    return min(ways, key=lambda way: (room.host_needed(way) > room.host, plan_memory(way).total))


def refuse(
    ways: Sequence[MemoryRequest], config: TrainerConfig, room: Room, ranks: Ranks
) -> MemoryShortage:
    """The reason why no way fits, the same on every rank. Collective."""
    on_device = [way for way in ways if plan_memory(way).total <= room.free]
    reported = on_device[-1] if on_device else min(ways, key=lambda way: plan_memory(way).total)
    if _chooses_tokens(ways[0], config, room):
        reported = replace(reported, tokens_per_microbatch=reported.longest)
    try:
        ranks.together("planning memory", lambda: require_memory(reported, room))
    except MemoryShortage as error:
        return error
    return MemoryShortage(
        "no way to train fits on every rank: give every rank a GPU with as much free memory; "
        "--skip-memory-check tries it all the same"
    )


def _report(way: MemoryRequest, asked: MemoryRequest, room: Room) -> None:
    """Log what was chosen and its cost in one line, then the plan as a table."""
    plan = plan_memory(way)
    logger.info("%s", choice_line(way, asked, room))
    logger.info(
        "Memory of %s, at most, with %.2f GiB free:\n%s",
        room.device,
        room.free / 2**30,
        plan.table(),
    )
    if plan.total > room.free:
        logger.warning(
            "Microbatches of %d tokens would not fit; if they come, the machine runs out of memory",
            way.tokens,
        )


def choice_line(way: MemoryRequest, asked: MemoryRequest, room: Room) -> str:
    """The chosen way to train, what it needs, and what it costs.

    Args:
        asked: the way without offloading or recomputing, where the options leave both open.
    """
    needs = f"{plan_memory(way).total / 2**30:.2f} of {room.free / 2**30:.2f} GiB on {room.device}"
    place = f"{way.offloadable} on {room.device}"
    costs = []
    if way.offload:
        place = f"{way.offloadable} in host memory"
        needs += (
            f", {room.host_needed(way) / 2**30:.2f} of {room.host / 2**30:.2f} GiB of host memory"
        )
        if room.device.type == "cuda":
            costs.append(f"each update takes about {offload_seconds(way):.1f} s longer")
    layers = "layers kept"
    if way.gradient_checkpointing:
        layers = "layers computed again in the backward pass"
        costs.append("each microbatch has a third more to compute")
    words = [
        f"{way.optimizer}, {place}, {layers}",
        f"microbatches of at most {way.tokens} tokens",
        needs,
        *costs,
    ]
    if (way.offload, way.gradient_checkpointing) != (asked.offload, asked.gradient_checkpointing):
        words.append(
            f"chosen because {plan_memory(asked).total / 2**30:.2f} GiB would be needed otherwise"
        )
    return "Memory plan: " + "; ".join(words)


def offload_seconds(request: MemoryRequest) -> float:
    """Seconds of an offloaded update: all of its state passes over the bus, and masters that are
    not the parameters once more for the weights.
    """
    masters = 0 if request.trains_masters else FLOAT32 * request.trained // request.world_size
    return (host_bytes(request) + masters) / BUS_BYTES_PER_SECOND


def memory_request(
    config: TrainerConfig, bridge: WeightBridge, dtype: torch.dtype, device: torch.device
) -> MemoryRequest:
    """A training with these options on this rank's device, as far as no choice is needed.

    Without --tokens-per-microbatch it has as many tokens as on a CPU.
    """
    geometry, _ = read_geometry(find_checkpoint(config.model_name))
    lora = config.weight_bridge_mode == "lora_only"
    return MemoryRequest(
        geometry=geometry,
        dtype=dtype,
        tokens_per_microbatch=config.tokens_per_microbatch or CPU_TOKENS_PER_MICROBATCH,
        seq_len=config.seq_len,
        table=choose_table(device, dtype, config.deterministic),
        share_prefixes=config.shares_prefixes,
        optimizer=config.optimizer,
        logprob_chunk=config.logprob_chunk or default_chunk(device),
        single_copy=isinstance(bridge, SingleCopyBridge),
        layouts=bridge.layouts(),
        packs=bridge.packs(device),
        reference=config.loads_reference,
        lora=(config.lora_r, tuple(config.lora_target_modules)) if lora else None,
        world_size=_ranks("WORLD_SIZE"),
        expert_parallel=config.expert_parallel,
        workspace=GPU_WORKSPACE if device.type == "cuda" else CPU_WORKSPACE,
        activations=_measured(geometry, dtype, device),
    )


def _measured(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Activations | None:
    """Measure the activations of a model of transformers; None for a decoder of ours."""
    if not isinstance(geometry, TransformersGeometry):
        return None
    model = TransformersModel(geometry, dtype)  # refuses what the load would refuse
    try:
        return measure_activations(model, device)
    except (LookupError, ModelError, RuntimeError, TypeError, ValueError) as error:
        logger.warning(
            "The activations of %s cannot be measured (%s): they are planned as a dense decoder's",
            geometry.architecture,
            " ".join(str(error).split()),
        )
        return None


def _ranks(variable: str) -> int:
    return max(1, int(os.environ.get(variable, "1")))
