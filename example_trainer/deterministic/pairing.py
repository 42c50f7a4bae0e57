"""Settings of a deterministic training, and the check of its servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from example_trainer.config import TrainerConfig
from example_trainer.deterministic.parity import (
    ParityCheck,
    ParityError,
    Provenance,
    require_same_kernels,
)
from example_trainer.errors import ConfigError
from example_trainer.models import Decoder
from example_trainer.models.ops import invariant
from example_trainer.process import StopSignal
from example_trainer.weight_bridge.fleet_updates import at_once
from example_trainer.weight_bridge.server import BridgeServer, configured_servers
from vllm_patching.batch_invariant.provenance import provenance, table_hash
from vllm_patching.batch_invariant.settings import SettingsError, enable_settings
from vllm_patching.weights.families import Geometry


def pin_settings(config: TrainerConfig) -> None:
    """Pin what decides the order of sums in this process, if --deterministic asks for it; before
    anything uses a GPU.

    Raises:
        ConfigError: it is too late in this process.
    """
    if not config.deterministic:
        return
    try:
        enable_settings()
    except SettingsError as error:
        raise ConfigError(f"--deterministic: {error}") from error


def deterministic_decoder(
    geometry: Geometry, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Decoder:
    """A decoder whose forward pass is vLLM's and whose backward pass adds in a fixed order.

    Raises:
        ModelError: the invariant operations do not know its rope scaling.
    """
    return Decoder(geometry, dtype, device, ops=invariant)


def make_parity(
    config: TrainerConfig, model: Decoder, stop: StopSignal | None = None
) -> ParityCheck | None:
    """Return what compares the tokens of every step; None without --deterministic. Ask the servers
    which kernels they run.

    Raises:
        ParityError: a server is not in deterministic mode, or runs other kernels.
        BridgeError: a server is not there.
    """
    if not config.deterministic:
        return None
    ours, theirs = model_provenance(model), {}
    servers = {server.url: server for server in configured_servers(BridgeServer, config, stop)}
    try:
        calls = {url: server.wait_for_info for url, server in servers.items()}
        limit = config.service_timeout + config.bridge_timeout
        answers = at_once(
            calls, limit, config.server_patience, lambda there: len(there) >= config.min_servers
        )
        if len(answers.ok) < min(config.min_servers, len(servers)):
            raise next(iter(answers.failed.values()))
        for (
            url,
            info,
        ) in answers.ok.items():  # servers that are not there yet are checked when they join
            theirs = pair(ours, info, url)
    finally:
        for server in servers.values():
            server.close()
    return ParityCheck(ours, theirs, older=config.oldest_rollouts != 0)


def require_pairing(
    config: TrainerConfig, model: Decoder
) -> Callable[[str, dict[str, Any]], None] | None:
    """Return the check that a joining server must pass, for WeightBridge.require; None without
    --deterministic.
    """
    if not config.deterministic:
        return None
    ours = model_provenance(model)

    def check(url: str, info: dict[str, Any]) -> None:
        pair(ours, info, url)

    return check


def pair(ours: Provenance, info: dict[str, Any], url: str) -> dict[str, str]:
    """The provenance of the server of /bridge/info, if it is that of this trainer.

    Raises:
        ParityError: it is another one, or the server is not in deterministic mode.
    """
    report = info.get("deterministic")
    theirs = {**report["provenance"], "rotary_table": report["rotary_table"]} if report else None
    require_same_kernels(ours, theirs, url)
    return theirs or {}


def model_provenance(model: Decoder) -> dict[str, str]:
    """Which kernels this trainer runs, and by which angles it rotates.

    Raises:
        ParityError: the model is not a deterministic one.
    """
    if model.arithmetic.ops.NAME != invariant.NAME:
        raise ParityError(
            f"a model with the {model.arithmetic.ops.NAME} operations does not run vLLM's kernels; "
            "make it by deterministic_decoder"
        )
    return {**provenance(), "rotary_table": table_hash(model.rotary)}
