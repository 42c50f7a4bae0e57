"""Choose the bridge for a configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import torch

from atroposlib.web.addresses import url_host
from example_trainer.api_keys import ServerKeys, revealed
from example_trainer.child_processes.processes import GUARD_MARGIN_SECONDS
from example_trainer.config import TrainerConfig
from example_trainer.errors import BridgeError
from example_trainer.models.lora.settings import base_model_name
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal
from example_trainer.weight_bridge.base import NoBridge, WeightBridge
from example_trainer.weight_bridge.broadcast import BroadcastBridge, ParameterServerBridge
from example_trainer.weight_bridge.foreign_server import ForeignServerBridge, server_answers
from example_trainer.weight_bridge.lora import LoraBridge, LoraServer
from example_trainer.weight_bridge.owned_server import STOP_SECONDS, is_this_machine
from example_trainer.weight_bridge.restart import RestartBridge
from example_trainer.weight_bridge.server import (
    BridgeServer,
    ParameterServer,
    configured_server,
    configured_servers,
    served_dtype,
)
from example_trainer.weight_bridge.server_record import end_left_over_server
from example_trainer.weight_bridge.service_board import ServiceBoard
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from vllm_patching.transport.shared_memory import gpu_uuid

logger = logging.getLogger(__name__)


def make_bridge(
    config: TrainerConfig,
    stop: StopSignal | None = None,
    ranks: Ranks | None = None,
    weight_epoch: int = 0,
    has_service: bool = True,
    device: torch.device | None = None,
) -> WeightBridge:
    """The bridge for --weight-bridge-mode, --use-shared-memory and --single-copy; connects to
    nothing but to choose.

    Args:
        config: the options.
        stop: set by a bridge with background work when training cannot go on, and checked while it
            waits.
        ranks: the trainer's processes, if it has several. Collective.
        weight_epoch: of the weights that this trainer will hand over; see ages.
        has_service: it trains for a rollout service, which shows its servers and names servers to
            join. Another run's may listen at the address that it would have.
        device: that this rank computes on. A single copy on another device than vLLM's is refused
            before the model is loaded.

    Raises:
        BridgeError: the mode cannot work here.
    """
    if config.weight_bridge_mode == "none":
        return _checkpoint_bridge(config, stop or StopSignal(), weight_epoch)
    if config.lora:
        return LoraBridge(
            configured_servers(LoraServer, config, stop, weight_epoch), config.lora, config.save_path,
            base_model_name(config.model_name),
        )  # fmt: skip
    if config.weight_bridge_mode == "parameter_server":
        return ParameterServerBridge(
            configured_servers(ParameterServer, config, stop, weight_epoch), ranks, config.min_servers, config.server_patience,
            config.push_every, config.training_steps, config.oldest_rollouts,
        )  # fmt: skip
    servers = configured_servers(BridgeServer, config, stop, weight_epoch)
    if config.single_copy or (
        not config.use_shared_memory and _chooses_single_copy(config, servers, ranks)
    ):
        return SingleCopyBridge(servers[0], ranks, config.colocate, device)
    keys = ServerKeys(
        bool(revealed(config.vllm_api_key)),
        [f"http://{host}:{port}" for host, port in config.vllm_addresses],
    )
    return BroadcastBridge(
        servers,
        config.weight_transfer,
        ranks,
        least=config.min_servers,
        patience=config.server_patience,
        hosts=int(os.environ.get("NUM_INFERENCE_NODES") or 0),
        make_server=lambda url: server_at(url, config, stop, weight_epoch),
        board=ServiceBoard(config.atropos_url, revealed(config.atropos_api_key), keys=keys)
        if has_service
        else None,
    )


def _chooses_single_copy(
    config: TrainerConfig, servers: Sequence[BridgeServer], ranks: Ranks | None
) -> bool:
    """Choose between single copy and broadcast where the options do not, and log the reason."""
    if ranks is not None and ranks.world_size > 1:
        logger.info(
            "[Bridge] Broadcast: the trainer has several ranks (--single-copy attaches each to one of vLLM's)"
        )
        return False
    single, why = False, f"there are {len(servers)} vLLM servers"
    info = servers[0].wait_for_info()
    if len(servers) == 1:
        single, why = prefers_single_copy(info)
    if single and config.several_updates:
        single, why = False, "a batch is for several updates, and vLLM must not sample between them"
    mode = "Broadcast"
    if single:
        mode = "Single copy"
    logger.info("[Bridge] %s: %s", mode, why)
    return single


def _checkpoint_bridge(config: TrainerConfig, stop: StopSignal, weight_epoch: int) -> WeightBridge:
    """The bridge of mode none: a server of the trainer's own, or one that it leaves alone.

    Raises:
        BridgeError: another trainer has the port, or a program that is not a vLLM server, or
            --vllm-host is an IPv6 address.
    """
    if not config.starts_vllm:
        logger.info(
            "[Bridge] --vllm-restart-interval 0: this trainer saves checkpoints, and neither starts nor restarts vLLM"
        )
        return NoBridge()
    if not is_this_machine(config.vllm_host):
        return ForeignServerBridge(config)
    end_left_over_server(config.vllm_port, STOP_SECONDS + GUARD_MARGIN_SECONDS, stop.wait)
    if server_answers(config, stop.wait):
        return ForeignServerBridge(config)
    if config.vllm_host.startswith("["):
        raise BridgeError(
            f"--vllm-host {config.vllm_host}: the vLLM server that this trainer starts listens on "
            "IPv4 only. Give --vllm-host localhost, or start the server yourself with --host and "
            "give --vllm-restart-interval 0"
        )
    return RestartBridge(config, stop, weight_epoch)


def server_at(
    url: str, config: TrainerConfig, stop: StopSignal | None, weight_epoch: int
) -> BridgeServer:
    """Return the client of a server that joins later. Nothing is sent to it. Arguments: see
    make_bridge.
    """
    place = urlsplit(url)
    host, port = url_host(str(place.hostname)), place.port or 80
    return configured_server(BridgeServer, host, port, config, stop, weight_epoch)


def prefers_single_copy(info: dict[str, Any], ranks: int = 1) -> tuple[bool, str]:
    """Choose between single copy and broadcast for a shared_vllm without either flag.

    Args:
        info: the server's /bridge/info.
        ranks: the trainer has so many, or can start so many.

    Returns:
        Return whether it is a single copy, and the reason.
    """
    if info.get("replicas", 1) != 1:
        return False, f"vLLM has {info['replicas']} replicas (--data-parallel-size)"
    if info["tp_degree"] > ranks:
        owner = "this trainer is one process" if ranks == 1 else f"this trainer has {ranks}"
        return False, f"vLLM has {info['tp_degree']} ranks and {owner}"
    if served_dtype(info) is torch.float16:
        return False, "vLLM holds float16, which the trainer does not compute in"
    if info["device"] == "cpu":
        if os.access(info["config_path"], os.R_OK) and info["hostname"] == os.uname().nodename:
            return True, "vLLM's weights are in this machine's memory"
        return False, f"vLLM runs on {info['hostname']}"
    mine = {gpu_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}
    if set(info["gpu_uuids"]) <= mine and info["tp_degree"] == 1:
        return True, "the trainer sees vLLM's GPU"
    if set(info["gpu_uuids"]) <= mine:
        return True, "the trainer sees all of vLLM's GPUs"
    return False, "the trainer is on other GPUs than vLLM"
