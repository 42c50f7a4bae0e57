"""The interface between the training loop and whatever carries its weights to the inference server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from example_trainer.errors import BridgeError, TrainerError
from example_trainer.weight_bridge.server_gpus import ServerGpus
from vllm_patching.protocol.manifest import Manifest
from vllm_patching.weights.families import Geometry

Weights = Mapping[str, torch.Tensor]
"""The trainer's parameters by name, in vLLM's layout for tensor-parallel degree 1 (merged qkv_proj
and gate_up_proj)."""


class LeaseLost(BridgeError):
    """The trainer was late: the server has given the update up, or its lease has run out.

    The update can be repeated.
    """


class OneServerRefused(TrainerError):
    """A check refuses this server; training may go on with others."""


@dataclass(frozen=True)
class SyncReport:
    """The result of one update of the inference server's weights.

    Attributes:
        version: the weight version that the server serves now.
        checksum: hex digest over every parameter, equal on both sides; empty if the bridge does not
            carry weights.
        bytes_moved: payload bytes sent (0 for a single copy).
        seconds: wall-clock seconds by phase, in the order in which the phases ran.
        first_byte_to_verified: seconds from before the first byte was sent (or written) to the
            answer that every rank holds and has checked the new weights. If there are several
            servers, all have to answer.
        server_seconds: the server's own view by phase; `halted` is how long it did not generate. If
            there are several, the slowest one's.
        fleet: how many servers there are (`size`), and how many are good, quarantined, away and
            joining; empty if the bridge does not count them.
    """

    version: int
    checksum: str
    bytes_moved: int
    seconds: dict[str, float] = field(default_factory=dict)
    first_byte_to_verified: float = 0.0
    server_seconds: dict[str, float] = field(default_factory=dict)
    fleet: dict[str, int] = field(default_factory=dict)


class WeightBridge(ABC):
    """Carries weights to the inference server. Used by one thread, in the order connect, sync…,
    close.

    Example:
        bridge.connect(model)                        # layouts compared, single copy: parameters become views
        bridge.sync(0, write_weights=lambda: None)   # the server generates nothing older than this
        ...
        report = bridge.sync(step, optimizer.write_weights, optimizer.masters)

    In a trainer of several ranks every method is collective: all ranks call it in the same order.
    """

    params_mapped: int = 0
    """Number of the model's parameters that the bridge delivers. Equal to params_total once
    connected."""
    params_total: int = 0
    may_lack: frozenset[str] = frozenset()
    """Tensors that are not trained: a server without them gets the others."""
    joins: int = 0
    """Number of joins. It grows when a server was restarted, which may then run with other options.
    The same number on every rank."""
    turn_figures: Mapping[str, float] = MappingProxyType({})
    """Figures of the last turn; see turns. Empty if there are no turns."""
    lent_bytes: int = 0
    """GPU memory that is free in a turn and at no other time. Known after `serving_dtype`."""
    server_share: float | None = None
    """--gpu-memory-utilization of a running vLLM server on this rank's GPU. Known after
    `serving_dtype`; None without such a server, or if another flag decides how much memory it
    takes.
    """
    converts: bool = False
    """The trainer's model may have another dtype than the server's: weights are rounded to the
    latter."""
    handing_over: str = "sync"
    """The name of `sync` in a timeline."""

    @abstractmethod
    def serving_dtype(self) -> torch.dtype | None:
        """Return the dtype in which the server holds its weights; None if it has none of its own.
        The trainer's model has it too, except with a bridge that converts.

        Asked before the model is loaded. Raises BridgeError if the server cannot be reached within
        the deadline.
        """

    def layouts(self) -> tuple[tuple[Manifest, ...], ...]:
        """Return the manifests of the ranks of each kind of server that weights are sent to. Empty
        if none are sent.

        The memory plan counts the buffers for it. Asked after `serving_dtype`, before the model is
        loaded.
        """
        return ()

    def packs(self, device: torch.device) -> bool:
        """Return whether a model on this device has whole buckets packed, for some servers at
        least.

        Asked when `layouts` is.
        """
        return False

    def require_shapes(self, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """Refuse a model that is not the server's. Called after `serving_dtype`, before the model
        is loaded.

        Args:
            shapes: whole shape and dtype name of each parameter that the model will have, by name.

        Raises:
            BridgeError: names the parameters that differ and both values.
        """
        return None

    @abstractmethod
    def connect(self, model: torch.nn.Module) -> None:
        """Join the server and check that both sides hold exactly the same parameters.

        A single-copy bridge replaces the data of the model's parameters by views on the server's
        memory here.

        Raises:
            BridgeError: the server is not there, is not sharing its weights, or a parameter differs
                in name, shape or dtype.
        """

    @abstractmethod
    def sync(
        self, version: int, write_weights: Callable[[], None], masters: Weights | None = None
    ) -> SyncReport:
        """Make the server serve `version`.

        Args:
            version: the number of optimizer steps behind these weights; larger than any before it.
            write_weights: writes the new values into the parameters of the model given to
                `connect`. The bridge calls it when nothing samples from the memory it writes to;
                again if the update has to be repeated.
            masters: what `write_weights` copies, by parameter (this rank's part, float32 or the
                parameters' dtype), if it is there before it is written. A single copy sums it up
                then, while the server still generates. It may lie on another device than the
                parameters, as an optimizer in host memory does: then nothing is summed before.

        Raises:
            BridgeError: the update failed; the server serves the old version or reports itself
                unhealthy.
        """

    def turn(self, write_weights: Callable[[], None]) -> AbstractContextManager[None]:
        """Take the trainer's turn for the block that computes gradients, and for the `sync` behind
        it. A server that takes turns on one GPU gives up the memory of its keys and values for that
        time.

        Args:
            write_weights: as for `keep_serving`.
        """
        return nullcontext()

    def require(self, check: Callable[[str, dict[str, Any]], None]) -> None:
        """Refuse servers that do not pass a check from now on.

        Args:
            check: takes a server's address and its answer to /bridge/info; raises TrainerError, or
                OneServerRefused to go on with the others. Called by a thread of rank 0.
        """
        return None

    def require_kernels(
        self, kernels: Mapping[str, str], check: Callable[[str, dict[str, Any]], None]
    ) -> None:
        """Refuse vLLM servers that run other kernels than the trainer from now on.

        Args:
            kernels: of the trainer, for a server that checks others itself.
            check: see `require`.
        """
        self.require(check)

    def server_urls(self) -> list[str]:
        """Return the servers that weights go to now, on rank 0; empty if the options name them."""
        return []

    def server_restarted(self) -> bool:
        """Return whether `keep_serving` has something to do.

        Asked now and then while training waits; not collective: rank 0 alone.
        """
        return False

    def server_trouble(self) -> str:
        """Name the servers that cannot be sampled from, each with its reason; empty if none is
        known. On rank 0, within a few seconds, by any thread.
        """
        return ""

    def place_server(self, device: torch.device, geometry: Geometry) -> ServerGpus | None:
        """Choose the GPUs of a server that the bridge will start; None if it starts none, or one
        without GPUs.

        Args:
            device: the trainer's.
            geometry: the model's.

        Raises:
            ConfigError: the options ask for GPUs that the server cannot have.
        """
        return None

    def add_server_flags(self, flags: tuple[str, ...]) -> None:
        """Start that server with further flags of `vllm serve`. Called before `connect`."""
        return None

    def restarts_at(self, version: int) -> bool:
        """Return whether `sync` will start a server on the checkpoint of `version`, which must then
        be on the disk.
        """
        return False

    def keep_serving(self, write_weights: Callable[[], None]) -> None:
        """Give every server that was restarted since it was joined the present weights.

        Without this it would serve none or old ones, and training would wait for its rollouts for
        ever.

        Raises:
            BridgeError: it is there again, and cannot be brought up to date.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Leave the server, which goes on serving the last version. Safe to call twice."""


class NoBridge(WeightBridge):
    """Delivers nothing: the server keeps the weights it started with."""

    def serving_dtype(self) -> torch.dtype | None:
        return None

    def connect(self, model: torch.nn.Module) -> None:
        self.params_total = sum(1 for _ in model.named_parameters())

    def sync(
        self, version: int, write_weights: Callable[[], None], masters: Weights | None = None
    ) -> SyncReport:
        write_weights()
        return SyncReport(version=version, checksum="", bytes_moved=0)

    def close(self) -> None:
        return None
