"""The number of a trainer's ranks, decided before anything is loaded.

A trainer that torchrun did not start uses every GPU that it sees: one rank for each, with FSDP2. A
single copy has one rank for each of vLLM's, so the server is asked first. Some modes train in one
process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.models.hf_checkpoint import find_checkpoint, read_geometry
from example_trainer.parallel.experts import require_expert_parallel
from example_trainer.parallel.launch import is_launched, place_of
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal
from example_trainer.training.checkpoints import checkpoint_prefix
from example_trainer.training.runs import is_complete
from example_trainer.weight_bridge.factory import prefers_single_copy
from example_trainer.weight_bridge.server import BridgeServer, configured_servers
from example_trainer.weight_bridge.single_copy import require_one_replica, require_ranks
from vllm_patching.transport.shared_memory import gpu_uuid

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankPlan:
    """The ranks that a trainer starts.

    Attributes:
        count: ranks; 1 for a trainer that stays one process.
        config: the options, with the device that a trainer of one process computes on.
        flags: follow the user's flags in the command of each rank.
    """

    count: int
    config: TrainerConfig
    flags: tuple[str, ...] = ()


def one_process_reason(config: TrainerConfig) -> str:
    """Why these options train in one process; empty if several ranks can."""
    if config.lora:
        return "--weight-bridge-mode lora_only trains in one process"
    if config.starts_vllm:
        return (
            "a trainer that restarts vLLM on checkpoints (--weight-bridge-mode none) trains in one process; with "
            "--weight-bridge-mode shared_vllm or --vllm-restart-interval 0 it can train in several"
        )
    return ""


def refuse_ranks(config: TrainerConfig, ranks: Ranks) -> None:
    """Refuse options that a trainer of several ranks cannot carry out.

    Raises:
        ConfigError: names the option.
    """
    if ranks.world_size > 1 and (reason := one_process_reason(config)):
        raise ConfigError(f"{reason}; start it without torchrun")


def visible_gpus(config: TrainerConfig) -> int:
    """GPUs that --device lets the trainer use; 0 on a CPU. No GPU is touched."""
    if config.device.startswith("cuda:"):
        return 1
    if config.device not in ("auto", "cuda"):
        return 0
    return torch.cuda.device_count()


def plan_ranks(
    config: TrainerConfig, stop: StopSignal, environment: Mapping[str, str] = os.environ
) -> RankPlan:
    """Decide how many ranks to start, and log it if that is not obvious. Waits for the vLLM server
    of a single copy.

    Args:
        config: the options.
        stop: ends the wait for the server.
        environment: variables, by which a rank that was started already is recognised.

    Raises:
        ConfigError: --ranks contradicts another option, this machine, or the vLLM server.
        BridgeError: the vLLM server of a single copy is not there, or has several replicas.
    """
    if is_launched(environment):
        require_launched_ranks(config, environment)
        return RankPlan(1, config)
    gpus = visible_gpus(config)
    require_possible(config, gpus)
    if reason := one_process_reason(config):
        _log_idle(gpus, reason)
        return RankPlan(1, config)
    if _is_complete(config):
        return RankPlan(1, config)
    several = gpus > 1 or config.ranks not in ("auto", 1)
    chooses = (
        config.weight_bridge_mode == "shared_vllm"
        and not config.use_shared_memory
        and len(config.vllm_addresses) == 1
    )
    keeps_choice = config.several_updates or config.expert_parallel > 1
    if config.single_copy or (several and chooses and not keeps_choice):
        return _beside_server(config, gpus, stop)
    return _spread(config, gpus, ())


def require_launched_ranks(config: TrainerConfig, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if --ranks is not the number of ranks that the launcher started."""
    place = place_of(environment)
    started = 1 if place is None else place[1]
    if config.ranks not in ("auto", started):
        raise ConfigError(
            f"--ranks {config.ranks}, but the launcher started {started} rank(s) (WORLD_SIZE): leave --ranks out under torchrun"
        )


def require_possible(config: TrainerConfig, gpus: int) -> None:
    """Raise ConfigError if --ranks asks for more than the options or the machine allow."""
    if config.ranks in ("auto", 1):
        return
    if reason := one_process_reason(config):
        raise ConfigError(f"--ranks {config.ranks}: {reason}; leave --ranks out")
    if config.device.startswith("cuda:"):
        raise ConfigError(
            f"--ranks {config.ranks} and --device {config.device} exclude each other: each rank has a GPU of its own; give "
            "--device cuda and set CUDA_VISIBLE_DEVICES"
        )
    if gpus and int(config.ranks) > gpus:
        raise ConfigError(
            f"--ranks {config.ranks}, but this trainer sees {gpus} GPU(s), one for each rank: lower --ranks, or set "
            "CUDA_VISIBLE_DEVICES"
        )


def _beside_server(config: TrainerConfig, gpus: int, stop: StopSignal) -> RankPlan:
    """The ranks of a trainer whose vLLM server decides: of a single copy, or of a choice between
    that and a broadcast.
    """
    server = configured_servers(BridgeServer, config, stop)[0]
    with closing(server):
        info = server.wait_for_info()
    if not config.single_copy:
        single, reason = prefers_single_copy(info, _asked_ranks(config, gpus))
        if single and config.ranks not in ("auto", info["tp_degree"]):
            single, reason = (
                False,
                f"vLLM has {info['tp_degree']} rank(s) and --ranks is {config.ranks}",
            )
        names = {True: "Single copy", False: "Broadcast"}
        logger.info("[Bridge] %s: %s", names[single], reason)
        if not single:
            return _spread(config, gpus, ("--use-shared-memory",))
    require_one_replica(info, server.url)
    count = int(info["tp_degree"])
    if config.ranks not in ("auto", count):
        require_ranks(info, int(config.ranks), f"--ranks is {config.ranks}", "leave --ranks out")
    if gpus and count > gpus:
        require_ranks(
            info, gpus, f"this trainer sees {gpus} GPU(s)", "set CUDA_VISIBLE_DEVICES as for vLLM"
        )
    if count > 1:
        logger.info("[Ranks] Starting %d ranks, one for each of vLLM's at %s", count, server.url)
        return RankPlan(count, config, ("--ranks", str(count), "--single-copy"))
    _log_idle(gpus, f"a single copy has one rank for each of vLLM's, and {server.url} has one")
    device = config.device
    if gpus > 1:
        device = _device_of(info, config.device)
    return RankPlan(1, config.model_copy(update={"device": device, "single_copy": True}))


def _spread(config: TrainerConfig, gpus: int, flags: tuple[str, ...]) -> RankPlan:
    count = max(1, _asked_ranks(config, gpus))
    if config.expert_parallel > 1:  # refused here, or every rank would write the same error
        geometry = read_geometry(find_checkpoint(config.model_name))[0]
        require_expert_parallel(config.expert_parallel, count, geometry)
    if count == 1:
        _log_idle(gpus, "--ranks is 1")
        if flags:
            config = config.model_copy(update={"use_shared_memory": True})
        return RankPlan(1, config)
    why = f"--ranks {count}"
    if count == gpus:
        why = "one for each GPU that this trainer sees (--ranks 1: one GPU)"
    logger.info("[Ranks] Starting %d ranks with FSDP2: %s", count, why)
    return RankPlan(count, config, ("--ranks", str(count), *flags))


def _asked_ranks(config: TrainerConfig, gpus: int) -> int:
    if config.ranks == "auto":
        return gpus
    return int(config.ranks)


def _device_of(info: Mapping[str, Any], otherwise: str) -> str:
    """The GPU of a vLLM of one rank, as this process calls it; `otherwise` if it does not see that
    GPU.
    """
    for index in range(torch.cuda.device_count()):
        if gpu_uuid(torch.device("cuda", index)) in info["gpu_uuids"]:
            return f"cuda:{index}"
    return otherwise


def _log_idle(gpus: int, reason: str) -> None:
    if gpus > 1:
        logger.info("[Ranks] This trainer uses one of the %d GPUs that it sees: %s", gpus, reason)


def _is_complete(config: TrainerConfig) -> bool:
    now_ms, prefix, steps = (
        time.time_ns() // 10**6,
        checkpoint_prefix(config),
        config.training_steps,
    )
    return is_complete(config.resume, config.save_path, config.model_name, now_ms, prefix, steps)
