"""The way to train that fits: masters and moments on the GPU or in host memory, layers kept or
computed again.

None of these ways changes the optimizer's arithmetic, nor a bit of a deterministic run's weights,
so any of them may be taken without being asked for. `--optimizer` is never changed here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from example_trainer.batch.reader import CPU_TOKENS_PER_MICROBATCH
from example_trainer.config import TrainerConfig
from example_trainer.models.head import default_chunk
from example_trainer.models.hf_checkpoint import find_checkpoint, read_geometry
from example_trainer.models.ops import choose_table
from example_trainer.parallel.ranks import Ranks
from example_trainer.training.host_memory import free_host_memory
from example_trainer.training.memory_items import FLOAT32, MemoryRequest, host_bytes
from example_trainer.training.memory_plan import (
    PLANNED_SHARE,
    MemoryShortage,
    Room,
    free_memory,
    plan_memory,
    require_memory,
    token_budget,
)
from example_trainer.training.server_share import ServerPlan, plan_server
from example_trainer.weight_bridge.base import WeightBridge
from example_trainer.weight_bridge.single_copy import SingleCopyBridge

logger = logging.getLogger(__name__)

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

    A smaller microbatch comes before offloading, and offloading before recomputing: a microbatch of
    one sequence still keeps a GPU busy, an offloaded update costs the same seconds however long the
    batch is, and recomputing costs a third of every forward and backward pass.
    """
    on_gpu = room.device.type == "cuda"
    offload = _values(config.optimizer_offload, on_gpu and request.lora is None)
    recompute = _values(config.gradient_checkpointing, on_gpu)
    ways = [
        replace(request, offload=o, gradient_checkpointing=r)
        for r, o in product(recompute, offload)
    ]
    if config.tokens_per_microbatch is None and on_gpu:
        return [replace(way, tokens_per_microbatch=token_budget(way, room.free)) for way in ways]
    return ways


def _values(option: object, open_on_this_device: bool) -> list[bool]:
    """The values of an option that may be tried: the one that was chosen, or both."""
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
    if config.tokens_per_microbatch is None and room.device.type == "cuda":
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
        workspace=GPU_WORKSPACE if device.type == "cuda" else CPU_WORKSPACE,
    )


def _ranks(variable: str) -> int:
    return max(1, int(os.environ.get(variable, "1")))
