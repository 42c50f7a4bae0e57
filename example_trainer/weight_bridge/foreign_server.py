"""Mode none beside a vLLM server that the trainer did not start: the server keeps its weights, and
the log repeats how old they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from example_trainer.api_keys import revealed
from example_trainer.child_processes.ports import is_free
from example_trainer.config import TrainerConfig
from example_trainer.errors import BridgeError
from example_trainer.vllm_client import QUICK_SECONDS, VLLMClient
from example_trainer.weight_bridge.base import NoBridge, SyncReport, Weights

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_LOG_EVERY_SECONDS = 15.0
_MODELS = "/v1/models"
_ANSWERS_OF_A_SERVER = (200, 401, 403)
"""HTTP statuses of a vLLM server's list of models; the last two ask for an API key."""
_ANSWERS_WHILE_LOADING = (None, 503)


def server_answers(config: TrainerConfig, pause: Callable[[float], None]) -> bool:
    """Return whether a server that this trainer did not start answers at --vllm-port of this
    machine.

    A server that has bound the port and still loads is waited for.

    Args:
        pause: sleeps, and may raise to end the waiting.

    Raises:
        BridgeError: the port is taken by a program that is not a vLLM server, or that does not
            answer in time.
    """
    port, url = config.vllm_port, f"http://{config.vllm_host}:{config.vllm_port}"
    client = VLLMClient(url, QUICK_SECONDS, revealed(config.vllm_api_key))
    began, next_log = time.monotonic(), time.monotonic() + 1
    try:
        while not is_free(port):
            status = client.status(_MODELS)
            if status in _ANSWERS_OF_A_SERVER:
                return True
            waited = time.monotonic() - began
            loading = status in _ANSWERS_WHILE_LOADING
            if not loading or waited > config.vllm_start_timeout:
                late = (
                    f"was not ready within {config.vllm_start_timeout:g} s (--vllm-start-timeout)"
                )
                seen = late if loading else f"answers {_MODELS} with {status}"
                raise BridgeError(
                    f"--vllm-port {port} is taken by a process that this trainer did not start and that {seen}: stop it "
                    "(`ss -ltnp` shows it), or give another --vllm-port"
                )
            if time.monotonic() >= next_log:
                logger.info(
                    "[Bridge] Port %d is taken: waiting for the vLLM server there to answer (%.0f s)",
                    port,
                    waited,
                )
                next_log += _LOG_EVERY_SECONDS
            pause(_POLL_SECONDS)
        return False
    finally:
        client.close()


class ForeignServerBridge(NoBridge):
    """Delivers nothing, and warns at every step at which a server of the trainer's own would be
    restarted.

    Args:
        config: names the server.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._url = f"http://{config.vllm_host}:{config.vllm_port}"
        self._client = VLLMClient(self._url, QUICK_SECONDS, revealed(config.vllm_api_key))
        self._begun: int | None = None

    def server_trouble(self) -> str:
        return self._client.why_not_serving()

    def connect(self, model: torch.nn.Module) -> None:
        """See WeightBridge.connect. Warns that the server's weights will not follow."""
        super().connect(model)
        limit = self._config.max_staleness
        dropped = (
            ""
            if limit is None
            else f". With --max-staleness {limit} its rollouts are dropped once it is further behind"
        )
        logger.warning(
            "[Bridge] This trainer did not start the vLLM server at %s, and will not restart it. "
            "Its weights stay as they are while training goes on%s. Stop that server if this "
            "trainer is to start its own and restart it every %d steps",
            self._url, dropped, self._config.restart_interval,
        )  # fmt: skip

    def sync(
        self, version: int, write_weights: Callable[[], None], masters: Weights | None = None
    ) -> SyncReport:
        """See WeightBridge.sync.

        The report has the version that the server serves, if it has one, else the first version.
        """
        write_weights()
        if self._begun is None:
            self._begun = version
        served = self._begun
        if version != self._begun and version % self._config.restart_interval == 0:
            served = self._warn(version)
        return SyncReport(version=served, checksum="", bytes_moved=0)

    def _warn(self, version: int) -> int:
        """Log how far the server is behind. Returns the version that it serves."""
        assert self._begun is not None
        known = (self._client.look("/weights") or {}).get("weight_version")
        served = known if isinstance(known, int) else self._begun
        answers = self._client.status(_MODELS) in _ANSWERS_OF_A_SERVER
        logger.warning(
            "[Bridge] The weights of the vLLM server at %s are %s%d steps behind the trainer's%s. "
            "This trainer did not start that server and does not restart it. Stop it and start "
            "the trainer again with --resume auto for a server that follows",
            self._url, "" if known is not None else "at least ", version - served,
            "" if answers else ", and it does not answer now",
        )  # fmt: skip
        return served

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        self._client.close()
