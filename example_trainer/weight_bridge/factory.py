"""Which bridge a configuration asks for."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from example_trainer.config import TrainerConfig
from example_trainer.weight_bridge.base import BridgeError, NoBridge, WeightBridge
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from vllm_patching.shared_memory import gpu_uuid

logger = logging.getLogger(__name__)


def make_bridge(config: TrainerConfig) -> WeightBridge:
    """The bridge for --weight-bridge-mode, --use-shared-memory and --single-copy; connects to nothing but to choose.

    Raises:
        BridgeError: the mode cannot work here.
    """
    if config.weight_bridge_mode == "none":
        if config.vllm_restart_interval is not None:
            raise BridgeError(
                "--vllm-restart-interval is not available yet: this trainer does not restart vLLM. Leave it out "
                "(checkpoints are saved every --checkpoint-interval steps), or use --weight-bridge-mode shared_vllm"
            )
        return NoBridge()
    if config.weight_bridge_mode == "lora_only":
        raise BridgeError("--weight-bridge-mode lora_only is not available yet; use shared_vllm, or none")
    server = BridgeServer(
        config.vllm_host, config.vllm_port, config.bridge_timeout, config.vllm_api_key, startup_timeout=config.service_timeout
    )
    if config.use_shared_memory:
        return BroadcastBridge(server)
    if config.single_copy:
        return SingleCopyBridge(server)
    single, why = prefers_single_copy(server.wait_for_info())
    logger.info("[Bridge] %s: %s", "Single copy" if single else "Broadcast", why)
    return SingleCopyBridge(server) if single else BroadcastBridge(server)


def prefers_single_copy(info: dict[str, Any]) -> tuple[bool, str]:
    """Choose for a shared_vllm without either flag. Returns the choice and the reason for it."""
    if info["tp_degree"] != 1:
        return False, f"vLLM has {info['tp_degree']} ranks and this trainer is one process"
    if info["device"] == "cpu":
        here = os.access(info["config_path"], os.R_OK) and info["hostname"] == os.uname().nodename
        return here, "vLLM's weights are in this machine's memory" if here else f"vLLM runs on {info['hostname']}"
    mine = {gpu_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}
    same = set(info["gpu_uuids"]) <= mine
    return same, "the trainer sees vLLM's GPU" if same else "the trainer is on other GPUs than vLLM"
