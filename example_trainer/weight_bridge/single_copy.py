"""One copy of the weights: the trainer's parameters are views on the memory that vLLM reads."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from example_trainer.weight_bridge.base import BridgeError, SyncReport, WeightBridge
from example_trainer.weight_bridge.phases import timed
from example_trainer.weight_bridge.server import BridgeServer, check_layout, manifests_of, served_dtype
from vllm_patching.checksum import weights_checksum
from vllm_patching.manifest import FlatSlice, flat_layout, local_view
from vllm_patching.shared_memory import SharedMemoryError, open_handles

logger = logging.getLogger(__name__)


class SingleCopyBridge(WeightBridge):
    """The optimizer writes into vLLM's own storage, while the server is paused."""

    def __init__(self, server: BridgeServer) -> None:
        self._server = server
        self._shared: dict[str, torch.Tensor] = {}
        self._layout: list[FlatSlice] = []
        self._epoch = 0

    def serving_dtype(self) -> torch.dtype | None:
        return served_dtype(self._server.wait_for_info())

    def connect(self, model: torch.nn.Module) -> None:
        info = self._server.wait_for_info()
        if info["tp_degree"] != 1:
            raise BridgeError(
                f"single copy needs one trainer rank for each of vLLM's {info['tp_degree']} ranks, and this trainer is one "
                "process; start vLLM with --tensor-parallel-size 1, or train with --use-shared-memory (broadcast)"
            )
        self.params_mapped, self.params_total = check_layout(info, model)
        self._layout, _ = flat_layout(manifests_of(info)[0])
        try:
            self._shared = open_handles(_read_handles(info, self._server.url))
        except SharedMemoryError as error:
            raise BridgeError(str(error)) from error
        answer = self._server.init("single_copy", model, "localhost", 1)
        self._epoch = answer["epoch"]
        parameters = dict(model.named_parameters())
        for item in self._layout:
            # At degree 1 a parameter that is made of several slices (qkv_proj) is still one contiguous range of rows.
            full = self._shared[item.name]
            parameters[item.name].data = full.narrow(0, 0, parameters[item.name].shape[0])
        logger.info("[Bridge] ✓ Single copy: the trainer's %d parameters are vLLM's own memory", self.params_mapped)

    def sync(self, version: int, write_weights: Callable[[], None]) -> SyncReport:
        """See WeightBridge.sync. `write_weights` runs while the server is paused: nothing samples from half-written weights."""
        if not self._shared:
            raise BridgeError("connect() must come before sync()")
        seconds: dict[str, float] = {}
        step: dict[str, Any] = {"epoch": self._epoch, "version": version}
        with timed(seconds, "prepare"):
            self._server.post("prepare", step)
        with timed(seconds, "pause"):
            self._server.post("pause", step)
        with timed(seconds, "write"):
            try:
                write_weights()
                if next(iter(self._shared.values())).is_cuda:
                    torch.cuda.synchronize()
            except Exception as error:
                self._server.abort(self._epoch, f"writing version {version} failed: {error}")
                raise
        with timed(seconds, "checksum"):
            checksum = weights_checksum((item.name, local_view(item, self._shared[item.name])) for item in self._layout)
        with timed(seconds, "commit"):
            self._server.post("commit", {**step, "checksums": [checksum]})
        with timed(seconds, "resume"):
            self._server.post("resume", step)
        return SyncReport(version=version, checksum=checksum, bytes_moved=0, seconds=seconds)

    def close(self) -> None:
        self._server.close()


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
