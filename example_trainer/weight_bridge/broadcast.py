"""Two copies of the weights: the trainer sends its own to every rank of the server, NCCL between GPUs, Gloo between CPUs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from example_trainer.weight_bridge.base import BridgeError, SyncReport, WeightBridge
from example_trainer.weight_bridge.phases import timed
from example_trainer.weight_bridge.server import BridgeServer, check_layout, manifests_of, served_dtype
from vllm_patching.checksum import weights_checksum
from vllm_patching.distributed_utils import (
    TRAINER_RANK,
    BridgeGroups,
    Rendezvous,
    RendezvousError,
    host_store,
    rendezvous_address,
)
from vllm_patching.manifest import FlatSlice, flat_layout, flat_views, source_view
from vllm_patching.weight_updater import BUCKET_BYTES

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class BroadcastBridge(WeightBridge):
    """Sends each rank the shards that it holds, packed into one flat buffer per rank and cut into buckets."""

    def __init__(self, server: BridgeServer) -> None:
        self._server = server
        self._model: torch.nn.Module | None = None
        self._groups: BridgeGroups | None = None
        self._layouts: list[tuple[list[FlatSlice], int]] = []
        self._epoch = 0

    def serving_dtype(self) -> torch.dtype | None:
        return served_dtype(self._server.wait_for_info())

    def connect(self, model: torch.nn.Module) -> None:
        info = self._server.wait_for_info()
        self.params_mapped, self.params_total = check_layout(info, model)
        device = next(model.parameters()).device
        if device.type != info["device"]:
            raise BridgeError(
                f"vLLM's weights are on {info['device']}, the trainer's on {device.type}; "
                f"start the trainer with --device {info['device']}"
            )
        self._model = model
        self._layouts = [flat_layout(manifest) for manifest in manifests_of(info)]
        host, port = _translate(rendezvous_address)
        store = _translate(lambda: host_store(host, port, self._server.timeout))
        answer = self._server.init("broadcast", model, host, port)
        self._epoch = answer["epoch"]
        rendezvous = Rendezvous(
            host, port, self._epoch, TRAINER_RANK, answer["world_size"], answer["data_backend"], self._server.timeout
        )
        self._groups = self._meet(rendezvous, store, device)

    def sync(self, version: int, write_weights: Callable[[], None]) -> SyncReport:
        """See WeightBridge.sync. The model's weights are this process's own, so they are written before the server pauses."""
        if self._model is None or self._groups is None:
            raise BridgeError("connect() must come before sync()")
        seconds: dict[str, float] = {}
        step = {"epoch": self._epoch, "version": version}
        with timed(seconds, "write"):
            write_weights()
        with timed(seconds, "pack"):
            packed = [self._pack(layout, size) for layout, size in self._layouts]
        with timed(seconds, "prepare"):
            self._server.post("prepare", step)
        with timed(seconds, "pause"):
            self._server.post("pause", step)
        with timed(seconds, "transfer"):
            self._send(version, [buffer for buffer, _ in packed])
        with timed(seconds, "commit"):
            self._server.post("commit", {**step, "checksums": [checksum for _, checksum in packed]})
        with timed(seconds, "resume"):
            self._server.post("resume", step)
        moved = sum(buffer.numel() for buffer, _ in packed)
        return SyncReport(version=version, checksum=packed[0][1], bytes_moved=moved, seconds=seconds)

    def close(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.close()
        self._server.close()

    def _pack(self, layout: list[FlatSlice], size: int) -> tuple[torch.Tensor, str]:
        assert self._model is not None
        parameters = dict(self._model.named_parameters())
        device = next(iter(parameters.values())).device
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        views = list(flat_views(buffer, layout))
        with torch.no_grad():
            for item, view in views:
                view.copy_(source_view(item, parameters[item.name]))
        return buffer, weights_checksum((item.name, view) for item, view in views)

    def _send(self, version: int, buffers: list[torch.Tensor]) -> None:
        assert self._groups is not None
        for tp_rank, buffer in enumerate(buffers):
            try:
                for start in range(0, buffer.numel(), BUCKET_BYTES):
                    self._groups.send(buffer[start : start + BUCKET_BYTES], 1 + tp_rank)
            except RuntimeError as error:
                why = self._server.worker_error() or "the server reports no error"
                self._server.abort(self._epoch, f"sending version {version} failed")
                raise BridgeError(
                    f"sending version {version} to vLLM rank {tp_rank} failed: {str(error).splitlines()[0]} ({why}); "
                    "the server keeps its old version; start the trainer again with --resume auto"
                ) from error

    def _meet(self, rendezvous: Rendezvous, store: torch.distributed.TCPStore, device: torch.device) -> BridgeGroups:
        """Form the groups in a thread, so that a worker's failure is reported at once and not after the deadline."""
        result: list[BridgeGroups | BaseException] = []

        def form() -> None:
            try:
                result.append(BridgeGroups(rendezvous, store, device))
            except Exception as error:  # noqa: BLE001 - handed to the waiting thread
                result.append(error)

        thread = threading.Thread(target=form, name="bridge rendezvous", daemon=True)
        thread.start()
        deadline = time.monotonic() + self._server.timeout + 5
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(1.0)
        outcome = result[0] if result else None
        if isinstance(outcome, BridgeGroups):
            return outcome
        raise BridgeError(
            f"vLLM's weight updater threads did not join epoch {rendezvous.epoch} at {rendezvous.host}:{rendezvous.port} "
            f"within {self._server.timeout:g} s ({outcome or 'still waiting'}; "
            f"server: {self._server.worker_error() or 'no error'}). "
            "Look for `Weight updater thread started` and for errors in the server's log."
        )


def _translate(step: Callable[[], _T]) -> _T:
    try:
        return step()
    except RendezvousError as error:
        raise BridgeError(str(error)) from error
