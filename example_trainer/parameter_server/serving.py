"""A parameter server from its start to its end."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
from collections.abc import Sequence

import torch

from example_trainer.api_keys import revealed
from example_trainer.errors import ModelError
from example_trainer.models.hf_checkpoint import checkpoint_dtype, find_checkpoint, read_geometry
from example_trainer.parallel.ranks import Ranks, join_ranks
from example_trainer.parameter_server.handing import Handing, Order
from example_trainer.parameter_server.held import (
    COPIES,
    HeldMemoryShortage,
    HeldWeights,
    held_manifest,
)
from example_trainer.parameter_server.options import ParameterServerOptions
from example_trainer.parameter_server.receiving import ReceivingServer
from example_trainer.parameter_server.shards import Shards
from example_trainer.process import StopSignal
from example_trainer.training.model import choose_device
from example_trainer.training.optimizer import free_host_memory
from example_trainer.weight_bridge.stream import buffer_bytes
from vllm_patching.protocol.manifest import Manifest, flat_layout
from vllm_patching.server.access import Door
from vllm_patching.server.state import Weights
from vllm_patching.weights.families import FAMILIES

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
PROCESS_BYTES = 300 << 20
"""Memory of torch's thread pools and the HTTP server, beside the weights."""


def serve(options: ParameterServerOptions, stop: StopSignal) -> None:
    """Hold weights and hand them out until a signal comes.

    Raises:
        ConfigError: an option does not go with this machine.
        HeldMemoryShortage: the copies do not fit.
        TrainerError: see its message.
    """
    level = logging.INFO
    if os.environ.get("RANK", "0") != "0":
        level = logging.WARNING
    logging.getLogger("vllm.lockstep").setLevel(level)
    device = choose_device(options.device, options.num_threads)
    folder = find_checkpoint(options.model_name)
    geometry, _ = read_geometry(folder)
    if geometry.architecture not in FAMILIES:
        raise ModelError(
            f"--model-name {options.model_name} is a {geometry.architecture}, and a parameter server holds models with a "
            f"decoder of the trainer's own ({', '.join(FAMILIES)}); send the weights without one"
        )
    if options.dtype != "auto":
        dtype = getattr(torch, options.dtype)
    elif torch.cuda.is_available():
        dtype = checkpoint_dtype(folder)
    else:
        dtype = torch.float32
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(join_ranks(options.rank_timeout, device))
        manifests = tuple(
            held_manifest(geometry, dtype, device, r, ranks.world_size)
            for r in range(ranks.world_size)
        )
        require_room(options.model_name, manifests, ranks, dtype, device)
        held = HeldWeights(geometry, dtype, device, ranks.rank, ranks.world_size)
        shards = Shards(held, ranks)
        server = receiving_server(options, shards) if ranks.is_main else None
        if server is not None:
            server.start()
            stack.callback(server.stop)
        ranks.barrier("listening", options.rank_timeout)
        handing = Handing(options, held, device, ranks, stop.wait)
        stack.callback(handing.bridge.close)
        if server is not None:
            server.fleet, server.sampling = handing.table, lambda: handing.sampling.mode
            server.report, handing.kernels.trainer_kernels = handing.report, server.trainer_kernels
        num_bytes = sum(flat_layout(manifest)[1] for manifest in manifests)
        logger.info(
            "[ParameterServer] ready on port %d: %d parameters of %s in %s, %d copies of %.2f GB "
            "on %s, %d shard(s). Waits for the trainer's first push",
            options.port, len(held.manifest.entries), options.model_name, str(dtype).removeprefix("torch."), COPIES,
            num_bytes / 1e9, device, ranks.world_size,
        )  # fmt: skip
        stop.defer()
        while True:
            shards.check()
            if server is not None:
                hand_out(server, handing)
                stop.wait(LOOK_SECONDS)
            else:
                follow(held, handing)
                stop.check()


def receiving_server(options: ParameterServerOptions, shards: Shards) -> ReceivingServer:
    """Make the server that the trainer speaks with."""
    keys = tuple(filter(None, [revealed(options.vllm_api_key)]))
    return ReceivingServer(
        shards.call,
        options.model_name,
        options.dtype,
        options.bridge_timeout,
        options.log_dir / f"parameter_server-{options.port}",
        options.address,
        options.port,
        Door(keys, options.address, frozenset(map(str.lower, options.allow_host))),
        {"pull_every": options.pull_every},
    )


def hand_out(server: ReceivingServer, handing: Handing) -> None:
    """Do what is due, if anything is."""
    server.check()
    assert server.bridge is not None
    order = handing.due(server.bridge.held)
    if order is None:
        return
    try:
        pinned = server.ask(HeldWeights.held_pin)
        if any(Weights(one["weight_epoch"], one["version"]) != order.weights for one in pinned):
            return  # it is being replaced; the next one is due soon
        server.ask(HeldWeights.held_order, *order.weights, order.everyone)
        reason = handing.carry_out(order)
        if reason:
            logger.error("[ParameterServer] %s", reason)
            server.condemn(reason)
    finally:
        server.ask(HeldWeights.held_unpin)


def follow(held: HeldWeights, handing: Handing) -> None:
    """On the other shards: do what rank 0 has ordered, if anything comes soon."""
    try:
        epoch, version, everyone = held.orders.get(timeout=LOOK_SECONDS)
    except queue.Empty:
        return
    handing.carry_out(Order(Weights(epoch, version), everyone))


def require_room(
    model: str,
    manifests: tuple[Manifest, ...],
    ranks: Ranks,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Refuse what does not fit, before anything is taken.

    Raises:
        HeldMemoryShortage: names bytes needed and free.
    """
    here: Sequence[Manifest] = manifests  # shards on CPUs share this machine's memory
    process_bytes, free = PROCESS_BYTES, free_host_memory()[0]
    remedy = "use a machine with more memory, or several with torchrun"
    if device.type == "cuda":
        here, process_bytes = [manifests[ranks.rank]], 0
        free = torch.cuda.mem_get_info(device)[0]
        remedy = "give more --shards (each on a GPU of its own), or a smaller model"
    copies = COPIES * sum(flat_layout(manifest)[1] for manifest in here)
    # However they travel.
    sending = buffer_bytes(manifests, ranks.world_size, dtype, packs=True).total
    needed = copies + len(here) * (2 * sending + process_bytes)
    if needed > free:
        raise HeldMemoryShortage(
            f"a parameter server of {model} needs {needed / 2**30:.2f} GiB on {device} ({COPIES} copies "
            f"of {copies / COPIES / 2**30:.2f} GiB, and buffers); {free / 2**30:.2f} GiB are free; {remedy}"
        )
