"""One copy of the weights: the trainer's parameters are views on the memory that vLLM reads."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from example_trainer.parallel.gather import full_parameters
from example_trainer.weight_bridge.base import BridgeError, SyncReport, WeightBridge
from example_trainer.weight_bridge.phases import timed
from example_trainer.weight_bridge.server import BridgeServer, Shapes, check_layout, manifests_of, served_dtype, shapes_of
from vllm_patching.checksum import WeightSums
from vllm_patching.manifest import flat_layout, local_view
from vllm_patching.shared_memory import SharedMemoryError, open_handles

logger = logging.getLogger(__name__)


class SingleCopyBridge(WeightBridge):
    """The optimizer writes into vLLM's own storage, while the server is paused.

    A server that is killed and started again is found; the parameters become views on the new server's memory.
    """

    def __init__(self, server: BridgeServer) -> None:
        self._server = server
        self._model: torch.nn.Module | None = None
        self._shapes: Shapes = {}
        self._sums: WeightSums | None = None
        self._cuda = False
        self._epoch = 0
        self._version = 0

    def serving_dtype(self) -> torch.dtype | None:
        return served_dtype(self._server.wait_for_info())

    def connect(self, model: torch.nn.Module) -> None:
        self._model = model
        self._shapes = shapes_of(full_parameters(model))
        self._attach()

    def sync(self, version: int, write_weights: Callable[[], None]) -> SyncReport:
        """See WeightBridge.sync. `write_weights` runs while the server is paused: nothing samples from half-written weights."""
        self._version = version
        try:
            return self._update(version, write_weights)
        except BridgeError as error:
            if not self._server.wait_for_restart(f"[Bridge] {error}; looking whether the server was restarted"):
                raise
            logger.warning("[Bridge] %s was restarted: joining it again to give it version %d", self._server.url, version)
        self._attach()
        return self._update(version, write_weights)

    def keep_serving(self, write_weights: Callable[[], None]) -> None:
        """See WeightBridge.keep_serving."""
        if self._server.has_restarted():
            logger.warning("[Bridge] %s was restarted: giving it version %d", self._server.url, self._version)
            self._attach()
            self._update(self._version, write_weights)

    def close(self) -> None:
        self._server.close()

    def _attach(self) -> None:
        """Make the parameters views on the server's memory. What they held before is not carried over."""
        assert self._model is not None
        info = self._server.wait_for_info()
        if info["tp_degree"] != 1:
            raise BridgeError(
                f"single copy needs one trainer rank for each of vLLM's {info['tp_degree']} ranks, and this trainer is one "
                "process; start vLLM with --tensor-parallel-size 1, or train with --use-shared-memory (broadcast)"
            )
        self.params_mapped, self.params_total = check_layout(info, self._shapes), len(self._shapes)
        layout, _ = flat_layout(manifests_of(info)[0])
        try:
            shared = open_handles(_read_handles(info, self._server.url))
        except SharedMemoryError as error:
            raise BridgeError(str(error)) from error
        self._epoch = self._server.init("single_copy", self._shapes)["epoch"]
        parameters = dict(self._model.named_parameters())
        for item in layout:
            # At degree 1 a parameter that is made of several slices (qkv_proj) is still one contiguous range of rows.
            parameters[item.name].data = shared[item.name].narrow(0, 0, parameters[item.name].shape[0])
        self._sums = WeightSums([(item.name, local_view(item, shared[item.name])) for item in layout])
        self._sums.all()  # compiles the kernel now, and not while the server waits
        self._cuda = next(iter(shared.values())).is_cuda
        logger.info("[Bridge] ✓ Single copy: the trainer's %d parameters are vLLM's own memory", self.params_mapped)

    def _update(self, version: int, write_weights: Callable[[], None]) -> SyncReport:
        if self._sums is None:
            raise BridgeError("connect() must come before sync()")
        seconds: dict[str, float] = {}
        step: dict[str, Any] = {"epoch": self._epoch, "version": version}
        with timed(seconds, "prepare"):
            self._server.post("prepare", step)
        with timed(seconds, "pause"):
            self._server.post("pause", step)
        first_byte = time.perf_counter()
        with timed(seconds, "write"):
            try:
                write_weights()
                if self._cuda:
                    torch.cuda.synchronize()
            except Exception as error:
                self._server.abort(self._epoch, f"writing version {version} failed: {error}")
                raise
        with timed(seconds, "checksum"):
            checksum = self._sums.all().checksum
        with timed(seconds, "commit"):
            answer = self._server.post("commit", {**step, "checksums": [checksum], "resume": True})
        return SyncReport(
            version=version,
            checksum=checksum,
            bytes_moved=0,
            seconds=seconds,
            first_byte_to_verified=time.perf_counter() - first_byte - answer["seconds"]["resume"],
            server_seconds=answer["seconds"],
        )


def _read_handles(info: dict[str, Any], url: str) -> dict[str, Any]:
    """The storage handles from the server's config file, which only this user on this machine can read."""
    path = Path(info["config_path"])
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BridgeError(
            f"cannot read {path}, where {url} (host {info['hostname']}) keeps the handles of its weights: {error}. "
            "Single copy needs the trainer on the server's machine and under its user; use --use-shared-memory otherwise."
        ) from error
    handles: dict[str, Any] = config["ranks"][0]["handles"]
    return handles
