"""The check that vLLM's logprobs belong to the distribution that it samples from.

A rollout's logprobs are divided into the trainer's own, token by token, so both must be of the same
distribution. Started with `--logprobs-mode processed_logprobs`, vLLM hands out logprobs of the
distribution that it samples from. The trainer computes its own at the temperature of each sequence.
By vLLM's own default they belong to the model itself, whatever temperature it samples at
(`raw_logprobs`). They are right for tokens sampled at temperature 1 alone, and the rest is refused.

The same answer of a server lists the fields of /generate, by which --router-replay finds a server
without experts before the first batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from example_trainer.api_keys import revealed
from example_trainer.batch.groups import TAKEN_ON_TRUST, SamplerLogprobs
from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.parallel.ranks import Ranks
from example_trainer.vllm_client import QUICK_SECONDS, VLLMClient
from example_trainer.weight_bridge.fleet_updates import call_all

logger = logging.getLogger(__name__)

RAW, PROCESSED = "raw_logprobs", "processed_logprobs"


def check_logprobs(
    config: TrainerConfig, ranks: Ranks, urls: Callable[[], Sequence[str]] = tuple
) -> SamplerLogprobs:
    """Ask every vLLM server which logprobs it hands out. Collective. Call it when the servers are
    there.

    A server may not answer: another program, or none where the options name one. It is taken to
    hand out logprobs of its own distribution, which is logged if that is not temperature 1.

    Args:
        urls: of the servers that rollouts come from, called on rank 0; none: the servers that the
            options name.

    Returns:
        servers whose logprobs belong to what they sample from, servers whose logprobs do not, and
        servers for which this is unknown: see BatchReader.use_server_modes.

    Raises:
        ConfigError: a server's logprobs are not of the distribution that the trainer computes; the
            message has the remedy.
    """
    longest = 2 * QUICK_SECONDS + ranks.timeout
    found: dict[str, list[str]] = ranks.on_main(
        "asking vLLM for its logprobs", lambda: _check(config, urls()), longest
    )
    return SamplerLogprobs(**{name: tuple(urls) for name, urls in found.items()})


def require_fitting_logprobs(config: TrainerConfig) -> Callable[[str, dict[str, Any]], None]:
    """Return the check of a joining server, for WeightBridge.require."""

    def check(url: str, info: dict[str, Any]) -> None:
        with closing(VLLMClient(url, QUICK_SECONDS, revealed(config.vllm_api_key))) as server:
            answer = server.look("/sampling") or {}
        mode = answer.get("logprobs_mode")
        if isinstance(mode, str):
            require_fitting(url, mode, config.temperature)
            require_experts(url, answer, config)

    return check


def _check(config: TrainerConfig, urls: Sequence[str]) -> dict[str, list[str]]:
    """Addresses by the names of SamplerLogprobs."""
    raw: list[str] = []
    processed: list[str] = []
    unknown: list[str] = []
    named = [f"http://{host}:{port}" for host, port in config.vllm_addresses]
    servers = {
        url: VLLMClient(url, QUICK_SECONDS, revealed(config.vllm_api_key)) for url in urls or named
    }
    answers = call_all(
        {url: partial(server.look, "/sampling") for url, server in servers.items()},
        2 * QUICK_SECONDS,
    )
    for url, server in servers.items():
        server.close()
        answer = answers.ok.get(url) or {}
        mode = answer.get("logprobs_mode")
        if isinstance(mode, str):
            require_fitting(url, mode, config.temperature)
            require_experts(url, answer, config)
            (raw if mode == RAW else processed).append(url)
            continue
        unknown.append(url)
        if config.temperature != 1.0:
            logger.warning(TAKEN_ON_TRUST, url, config.temperature)
    return {"raw": raw, "unknown": unknown, "processed": processed}


def require_fitting(url: str, mode: str, temperature: float) -> None:
    """Refuse a mode of vLLM's that does not go with --temperature.

    Raises:
        ConfigError: it does not.
    """
    if mode not in (RAW, PROCESSED):
        raise ConfigError(
            f"{url} hands out {mode}, which are not logprobs; start it with --logprobs-mode {RAW} "
            f"or {PROCESSED}"
        )
    if mode == RAW and temperature != 1.0:
        raise ConfigError(
            f"--temperature {temperature:g}, but the logprobs of {url} are those before any "
            f"temperature ({RAW}), so that training would go in a wrong direction. Start the "
            f"server with --logprobs-mode {PROCESSED}, or the trainer with --temperature 1"
        )


def require_experts(url: str, answer: dict[str, Any], config: TrainerConfig) -> None:
    """Refuse a server that does not keep the experts of tokens, if the trainer replays them.

    Args:
        url: of a server of ours.
        answer: to its GET /sampling.

    Raises:
        ConfigError: every group of this server would be left out.
    """
    if config.router_replay and "routed_experts" not in answer.get("generate_options", ()):
        raise ConfigError(
            f"--router-replay, but {url} does not keep the experts of tokens, so all of its "
            "groups would be left out. Start it with --enable-return-routed-experts, or the "
            "trainer without --router-replay"
        )
