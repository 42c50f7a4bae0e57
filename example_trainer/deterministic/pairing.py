"""Settings of a deterministic training, and the check of its servers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from example_trainer.config import TrainerConfig
from example_trainer.deterministic.parity import (
    PairingError,
    ParityCheck,
    ParityError,
    Provenance,
    require_same_kernels,
)
from example_trainer.errors import ConfigError
from example_trainer.models import Decoder
from example_trainer.models.ops import invariant
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal
from example_trainer.weight_bridge.fleet_updates import at_once
from example_trainer.weight_bridge.server import BridgeServer, configured_servers
from vllm_patching.batch_invariant.provenance import provenance, table_hash
from vllm_patching.batch_invariant.settings import SettingsError, enable_settings
from vllm_patching.weights.families import Geometry

logger = logging.getLogger(__name__)


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


class Pairing:
    """The kernels of this trainer, and the check that every vLLM server runs them.

    Attributes:
        kernels: of the trainer.
        theirs: of the server that was paired last; the trainer's before that.
        servers: address of each paired server -> its kernels, and its self-test's figures.
    """

    def __init__(self, kernels: Provenance) -> None:
        self.kernels, self.theirs = kernels, kernels
        self.servers: dict[str, dict[str, Any]] = {}

    def __call__(self, url: str, info: dict[str, Any]) -> None:
        """Check the server of an answer to /bridge/info. Raises PairingError."""
        self.servers.pop(url, None)
        self.theirs = pair(self.kernels, info, url)
        report = info["deterministic"]
        self.servers[url] = {
            "kernels": self.theirs,
            "checks": report.get("checks"),
            "seconds": report.get("seconds"),
        }

    def ask(self, config: TrainerConfig, stop: StopSignal | None = None) -> None:
        """Check the servers that are there. A server with other kernels is left out if
        --min-servers others are there. A server that is late is checked when it joins, and so is
        a server of a parameter server, by that one.

        Raises:
            PairingError: a server is not in deterministic mode, or runs other kernels, and too few
                are left.
            BridgeError: a server is not there.
        """
        if config.parameter_servers:
            return
        servers = {server.url: server for server in configured_servers(BridgeServer, config, stop)}
        try:
            calls = {url: server.wait_for_info for url, server in servers.items()}
            limit = config.service_timeout + config.bridge_timeout
            least = min(config.min_servers, len(servers))
            answers = at_once(
                calls, limit, config.server_patience, lambda there: len(there) >= least
            )
        finally:
            for server in servers.values():
                server.close()
        if len(answers.ok) < least:
            raise next(iter(answers.failed.values()))
        self._check_present(answers.ok, least)

    def _check_present(self, infos: Mapping[str, dict[str, Any]], least: int) -> None:
        refused: list[PairingError] = []
        for url, info in infos.items():
            try:
                self(url, info)
            except PairingError as error:
                refused.append(error)
        left = len(infos) - len(refused)
        if refused and left < max(1, least):
            raise refused[0]
        for refusal in refused:
            logger.warning("[Parity] %s; training begins with %d others", refusal, left)


def make_pairing(
    config: TrainerConfig,
    model: Decoder,
    stop: StopSignal | None = None,
    ranks: Ranks | None = None,
) -> Pairing | None:
    """Pair the trainer with its servers; None without --deterministic. Rank 0 asks them.
    Collective.

    Raises:
        PairingError, BridgeError: see Pairing.ask.
    """
    if not config.deterministic:
        return None
    ranks, pairing = ranks or Ranks(), Pairing(model_provenance(model))

    def ask() -> Provenance:
        pairing.ask(config, stop)
        return pairing.theirs

    limit = config.service_timeout + config.bridge_timeout + ranks.timeout
    pairing.theirs = ranks.on_main("comparing kernels", ask, limit)
    return pairing


def make_parity(
    config: TrainerConfig,
    pairing: Pairing | None,
    ranks: Ranks | None = None,
    same_tokens: bool = False,
) -> ParityCheck | None:
    """Return the comparison of the tokens of every step; None without --deterministic.

    Args:
        ranks, same_tokens: see ParityCheck.
    """
    if pairing is None:
        return None
    return ParityCheck(
        pairing.kernels,
        pairing.theirs,
        older=config.oldest_rollouts != 0,
        ranks=ranks,
        same_tokens=same_tokens,
    )


def pair(ours: Provenance, info: dict[str, Any], url: str) -> dict[str, str]:
    """The provenance of the server of /bridge/info, if it is that of this trainer.

    Raises:
        PairingError: it is another one, or the server is not in deterministic mode.
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
