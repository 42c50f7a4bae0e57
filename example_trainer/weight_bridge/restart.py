"""Weights by way of the disk: a checkpoint every N steps, and a vLLM server that is restarted on
each.

This bridge is slow, because vLLM takes tens of seconds to load. It needs nothing inside vLLM, so it
works with other servers.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from example_trainer.api_keys import revealed
from example_trainer.config import TrainerConfig
from example_trainer.errors import BridgeError, ConfigError
from example_trainer.prerequisites import require_vllm
from example_trainer.process import StopSignal
from example_trainer.weight_bridge.base import SyncReport, WeightBridge, Weights
from example_trainer.weight_bridge.owned_server import (
    OWN_COMMAND,
    STOP_SECONDS,
    OwnedServer,
    Served,
    ServerDied,
)
from example_trainer.weight_bridge.server import timed
from example_trainer.weight_bridge.server_gpus import (
    ServerFlags,
    ServerGpus,
    choose_server_gpus,
    seen_gpus,
)
from vllm_patching.weights.families import Geometry

logger = logging.getLogger(__name__)

REVIVALS = 3
"""Number of times that a server that died by itself is started again before the next restart that
was planned."""
LOG_NAME = "vllm.log"
CLOSE_SECONDS = STOP_SECONDS + 30.0
"""For the watch to end: it sleeps half a second at a time, asks a server twice, or stops one."""
_WATCH_SECONDS = 0.5
_STARTS_VLLM = re.compile(r"(?:^|[\s/])vllm serve\b|\bvllm\.entrypoints\b|\bvllm_api_server\.py\b")


class RestartBridge(WeightBridge):
    """Starts a server, restarts it on checkpoints, and ends it.

    A thread watches the server while the trainer waits for rollouts or trains. If the server dies,
    the thread starts it again on the checkpoint that it had, and ends the training through `stop`
    if that fails.

    Args:
        config: --vllm-restart-interval and the options of the server.
        stop: ends the waiting for a server that loads.
        weight_epoch: of this trainer's weights; the server gets it together with their version.
    """

    def __init__(self, config: TrainerConfig, stop: StopSignal, weight_epoch: int = 0) -> None:
        self._config, self._stop, self._weight_epoch = config, stop, weight_epoch
        self._server = OwnedServer(
            config.vllm_command or OWN_COMMAND,
            config.vllm_args,
            config.model_name,
            config.vllm_host,
            config.vllm_port,
            config.log_dir / LOG_NAME,
            config.vllm_gpus,
            revealed(config.vllm_api_key),
            config.vllm_start_timeout,
        )
        self._first_model = config.model_name
        self._shares_gpu = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._failure: BridgeError | None = None
        self._revivals = 0
        self._watch: threading.Thread | None = None

    def serving_dtype(self) -> torch.dtype | None:
        """None: the server takes the dtype of the checkpoint.

        A command that cannot be used is refused here.
        """
        if self._config.vllm_command is None:
            require_vllm()
        self._server.require_free_port()
        self._server.command(Served(self._first_model, 0))
        return None

    def place_server(self, device: torch.device, geometry: Geometry) -> ServerGpus | None:
        """See WeightBridge.place_server."""
        asked = self._config.vllm_gpus
        if device.type != "cuda":
            if asked is None:
                return None
            raise ConfigError(
                f"--vllm-gpus {asked} needs a trainer on a GPU, and this one computes on {device}: leave --vllm-gpus out, so "
                "that vLLM runs on the CPU too"
            )
        size = ServerFlags.of(self._config.vllm_args).size
        place = choose_server_gpus(
            asked, seen_gpus(torch.cuda.device_count()), device.index or 0, geometry, size
        )
        self._server.use_gpus(place.listed)
        self._shares_gpu = place.beside_trainer
        return place

    def add_server_flags(self, flags: tuple[str, ...]) -> None:
        """See WeightBridge.add_server_flags.

        A --vllm-command that is not vLLM's gets none, which is logged.
        """
        command = self._config.vllm_command
        if command is None or _STARTS_VLLM.search(command):
            self._server.computed_flags = flags
        elif flags:
            logger.warning(
                "[Bridge] --vllm-command does not start vLLM, so its server gets no %s. Give "
                "flags of the same meaning in --vllm-args if it does not fit beside the trainer",
                " ".join(flags),
            )  # fmt: skip

    def connect(self, model: torch.nn.Module) -> None:
        """See WeightBridge.connect.

        The server is started by the first `sync`, which knows the version.
        """
        self._first_model = str(getattr(model, "source", None) or self._config.model_name)
        self.params_total = self.params_mapped = sum(1 for _ in model.named_parameters())

    def restarts_at(self, version: int) -> bool:
        """See WeightBridge.restarts_at."""
        return self._config.restarts_vllm_at(version)

    def sync(
        self, version: int, write_weights: Callable[[], None], masters: Weights | None = None
    ) -> SyncReport:
        """Restart the server if a restart is due at `version`; the weights in
        `save_path/step_<version>` must then be there.

        Returns:
            A report with the version that the server serves, which between restarts is an older
            one.

        Raises:
            BridgeError: the server does not run, or not in time.
            StopRequested: a signal came while it was loading.
        """
        write_weights()
        seconds: dict[str, float] = {}
        if self._server.served is None:
            self._restart(Served(self._first_model, version, self._weight_epoch), seconds)
            self._watch = threading.Thread(target=self._look_after, name="vLLM watch", daemon=True)
            self._watch.start()
        elif self.restarts_at(version):
            checkpoint = (self._config.save_path / f"step_{version}").resolve()
            self._restart(Served(str(checkpoint), version, self._weight_epoch), seconds)
        if self._failure is not None:
            raise self._failure
        served = self._server.served
        assert served is not None
        return SyncReport(version=served.version, checksum="", bytes_moved=0, seconds=seconds)

    def _restart(self, served: Served, seconds: dict[str, float]) -> None:
        with self._exclusively():
            with timed(seconds, "stop"):
                self._server.stop()
            if self._shares_gpu:
                # vLLM compares its share with the memory that is free when it starts
                torch.cuda.empty_cache()
            with timed(seconds, "start"):
                self._server.start(served)
                self._server.wait_until_ready(self._stop.wait)
            self._revivals = 0
        logger.info(
            "[Bridge] vLLM serves weight version %d after %.1f s",
            served.version,
            sum(seconds.values()),
        )

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        while not self._lock.acquire(timeout=_WATCH_SECONDS):
            # the watch is starting a server, which may take as long as any start
            self._stop.check()
        try:
            yield
        finally:
            self._lock.release()

    def _look_after(self) -> None:
        while not self._closing.wait(_WATCH_SECONDS):
            with self._lock:
                error: BridgeError | None = self._server.died()
                if error is None or self._closing.is_set():
                    continue
                try:
                    self._revive(error)
                except _Closing:
                    return
                except ServerDied:
                    continue  # the next round counts it
                except BridgeError as failure:
                    self._failure = failure
                    self._stop.fail(failure)
                    return

    def _revive(self, error: BridgeError) -> None:
        if self._revivals >= REVIVALS:
            raise BridgeError(
                f"gave up after starting the vLLM server again {REVIVALS} times: {error}"
            )
        self._revivals += 1
        logger.warning("[Bridge] %s; starting it again (%d of %d)", error, self._revivals, REVIVALS)
        served = self._server.served
        assert served is not None
        self._server.stop()
        self._server.start(served)
        seconds = self._server.wait_until_ready(self._pause_until_closing)
        logger.info(
            "[Bridge] vLLM serves weight version %d again after %.1f s", served.version, seconds
        )

    def _pause_until_closing(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise _Closing

    def close(self) -> None:
        """Stop the server. Safe to call twice."""
        self._closing.set()
        if self._watch is not None:
            self._watch.join(CLOSE_SECONDS)
            if self._watch.is_alive():
                logger.error(
                    "[Bridge] the watch over the vLLM server at %s has not ended within %g s: "
                    "look at its log %s. The rest of the server ends with this process",
                    self._server.url, CLOSE_SECONDS, self._config.log_dir / LOG_NAME,
                )  # fmt: skip
        self._server.close()


class _Closing(Exception):
    """The bridge is being closed while its watch waits for a server."""
