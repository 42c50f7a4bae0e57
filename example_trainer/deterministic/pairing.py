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
from example_trainer.weight_bridge.fleet_updates import call_all
from example_trainer.weight_bridge.server import (
    BridgeServer,
    ParameterServer,
    configured_servers,
)
from vllm_patching.batch_invariant.plan import PARTS, SumPlan, plan_of
from vllm_patching.batch_invariant.provenance import provenance, table_hash
from vllm_patching.batch_invariant.settings import SettingsError, enable_settings
from vllm_patching.weights.families import Geometry
from vllm_patching.weights.sharding import undividable

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
    geometry: Geometry,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    plan: SumPlan | None = None,
) -> Decoder:
    """A decoder whose forward pass is vLLM's and whose backward pass adds in a fixed order.

    Args:
        plan: of the servers that it is compared with; not given: vLLM on one GPU.

    Raises:
        ModelError: the invariant operations do not know its rope scaling.
    """
    return Decoder(geometry, dtype, device, ops=invariant, plan=plan)


def agreed_plan(
    config: TrainerConfig, geometry: Geometry, ranks: Ranks, stop: StopSignal | None = None
) -> SumPlan:
    """Return the sum plan of the servers, before a model is loaded; one part without
    --deterministic. Collective.

    The first configured server that answers decides, or the first behind a parameter server.
    Servers with another plan are refused when they are paired with.

    Args:
        geometry: of the model.

    Raises:
        PairingError: this trainer cannot follow the plan, or a server is not in deterministic mode.
        BridgeError: no server answers.
    """
    if not config.deterministic:
        return SumPlan()

    def ask() -> int:
        if config.parameter_servers:
            url, info = _server_behind(config, stop)
        else:
            url, info = next(iter(_present_servers(config, stop).items()))
        tensor_ranks = 1
        if config.single_copy:
            tensor_ranks = ranks.world_size
        return followed_plan(info, url, geometry, tensor_ranks).parts

    limit = config.service_timeout + config.bridge_timeout + ranks.timeout
    return SumPlan(ranks.on_main("asking the servers for their sum plan", ask, limit))


def followed_plan(info: dict[str, Any], url: str, geometry: Geometry, tensor_ranks: int) -> SumPlan:
    """Return the sum plan of a server, if the trainer can follow it.

    Args:
        info: the server's answer to /bridge/info.
        tensor_ranks: trainer ranks that each hold a part of every layer; 1 with FSDP2.

    Raises:
        PairingError: the model or the trainer's ranks do not fit. The message has the layouts that
            do.
    """
    report = info.get("deterministic") or {"provenance": {}}
    try:
        plan = plan_of(report["provenance"])
    except ValueError as error:
        raise PairingError(
            f"the vLLM server at {url} sums in another way than this trainer: {error}; install the "
            "same version of both"
        ) from error
    if obstacles := undividable(geometry, plan.parts):
        fitting = [parts for parts in PARTS if not undividable(geometry, parts)]
        raise PairingError(
            f"the vLLM server at {url} sums {plan.parts} parts, and {', '.join(obstacles)} of "
            "this trainer's model cannot be split so. Start vLLM with --tensor-parallel-size "
            f"{_either(fitting)}, or give both the same model"
        )
    if plan.parts % tensor_ranks:
        raise PairingError(
            f"the vLLM server at {url} sums {plan.parts} part(s), which {tensor_ranks} "
            "tensor-parallel trainer ranks cannot share. Train with "
            f"{_either(plan.trainer_ranks())} such ranks, or start vLLM with "
            f"--tensor-parallel-size {_either([n for n in PARTS if n % tensor_ranks == 0])}"
        )
    return plan


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers)) or "another number"


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
        """Check the servers that answer. A server with other kernels is left out if --min-servers
        others are there. A late server is checked when it joins. A parameter server checks its own
        servers.

        Raises:
            PairingError: a server is not in deterministic mode, or runs other kernels, and too few
                are left.
            BridgeError: a server is not there.
        """
        if config.parameter_servers:
            return
        least = min(config.min_servers, len(config.vllm_addresses))
        self._check_present(_present_servers(config, stop), least)

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


def _present_servers(config: TrainerConfig, stop: StopSignal | None) -> dict[str, dict[str, Any]]:
    """Return /bridge/info of the servers that are there, by address in the order of the options.

    Raises:
        BridgeError: fewer than --min-servers are there.
    """
    servers = {server.url: server for server in configured_servers(BridgeServer, config, stop)}
    try:
        calls = {url: server.wait_for_info for url, server in servers.items()}
        limit = config.service_timeout + config.bridge_timeout
        least = min(config.min_servers, len(servers))
        answers = call_all(calls, limit, config.server_patience, lambda there: len(there) >= least)
    finally:
        for server in servers.values():
            server.close()
    if len(answers.ok) < least:
        raise next(iter(answers.failed.values()))
    return {url: answers.ok[url] for url in servers if url in answers.ok}


def _server_behind(config: TrainerConfig, stop: StopSignal | None) -> tuple[str, dict[str, Any]]:
    """Return the address and the report, as in /bridge/info, of a vLLM server that gets its weights
    from a parameter server.

    Raises:
        BridgeError: no parameter server names one.
    """
    servers = {server.url: server for server in configured_servers(ParameterServer, config, stop)}
    try:
        calls = {url: server.wait_for_report for url, server in servers.items()}
        limit = config.service_timeout + config.bridge_timeout
        answers = call_all(calls, limit, config.server_patience)
    finally:
        for server in servers.values():
            server.close()
    if not answers.ok:
        raise next(iter(answers.failed.values()))
    report = next(answers.ok[url] for url in servers if url in answers.ok)
    return str(report["server"]), {"deterministic": report}


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
        servers=pairing.servers,
    )


def pair(ours: Provenance, info: dict[str, Any], url: str) -> dict[str, str]:
    """Return a server's provenance, from its answer to /bridge/info, if it equals the trainer's.

    Raises:
        PairingError: they differ, or the server is not in deterministic mode.
    """
    report = info.get("deterministic")
    theirs = {**report["provenance"], "rotary_table": report["rotary_table"]} if report else None
    require_same_kernels(ours, theirs, url)
    return theirs or {}


def model_provenance(model: Decoder) -> dict[str, str]:
    """Return this trainer's kernels, its sum plan and the hash of its rotary table.

    Raises:
        ParityError: the model is not a deterministic one.
    """
    if model.arithmetic.ops.NAME != invariant.NAME:
        raise ParityError(
            f"a model with the {model.arithmetic.ops.NAME} operations does not run vLLM's kernels; "
            "make it by deterministic_decoder"
        )
    return {**provenance(model.arithmetic.plan), "rotary_table": table_hash(model.rotary)}
