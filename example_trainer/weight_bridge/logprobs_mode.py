"""Are the logprobs that vLLM hands out those that --temperature says they are?

A rollout's logprobs are divided into the trainer's own, token by token, so both must be of the same distribution. By default
vLLM's are those of the model itself, whatever temperature it samples at (`--logprobs-mode raw_logprobs`): only --temperature 1
computes the same. Started with `--logprobs-mode processed_logprobs` it hands out those of the distribution that it samples
from; --temperature must then be what the environments sample at, which the trainer cannot see.
"""

from __future__ import annotations

import logging

import httpx

from example_trainer.api_keys import revealed
from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.http_client import direct_client
from example_trainer.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
_SECONDS = 5.0


def check_logprobs(config: TrainerConfig, ranks: Ranks) -> None:
    """Ask every vLLM server which logprobs it hands out. Collective. Call it when the servers are there.

    A server that cannot be asked (another program, or none where the options name one) is taken to hand out what
    --temperature says, which is logged if that is not 1.

    Raises:
        ConfigError: a server's logprobs are not of the distribution that the trainer computes; says what to change.
    """
    ranks.on_main("asking vLLM for its logprobs", lambda: _check(config), len(config.vllm_addresses) * _SECONDS + ranks.timeout)


def _check(config: TrainerConfig) -> None:
    for host, port in config.vllm_addresses:
        url = f"http://{host}:{port}"
        mode = _mode_of(url, revealed(config.vllm_api_key))
        if mode is not None:
            require_fitting(url, mode, config.temperature)
        elif config.temperature != 1.0:
            logger.warning(
                "%s cannot be asked which logprobs it hands out; they are taken to be of temperature %g (--temperature). If it "
                "is a vLLM without --logprobs-mode processed_logprobs they are not, and training goes in a wrong direction",
                url, config.temperature,
            )  # fmt: skip


def require_fitting(url: str, mode: str, temperature: float) -> None:
    """Refuse a mode of vLLM's that does not go with --temperature.

    Raises:
        ConfigError: it does not.
    """
    if mode not in (RAW, PROCESSED):
        raise ConfigError(f"{url} hands out {mode}, which are no logprobs; start it with --logprobs-mode {RAW} or {PROCESSED}")
    if mode == RAW and temperature != 1.0:
        raise ConfigError(
            f"--temperature {temperature:g}, but the logprobs of {url} are those before any temperature ({RAW}), so that "
            "training would go in a wrong direction; start the server with --logprobs-mode "
            f"{PROCESSED}, or the trainer with --temperature 1"
        )


def _mode_of(url: str, api_key: str | None) -> str | None:
    """The server's mode; None if it does not say."""
    try:
        with direct_client(url, _SECONDS, api_key) as client:
            response = client.get("/sampling")
        answer = response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError) as error:
        logger.debug("%s/sampling: %s", url, error)
        return None
    mode = answer.get("logprobs_mode") if isinstance(answer, dict) else None
    return mode if isinstance(mode, str) else None
