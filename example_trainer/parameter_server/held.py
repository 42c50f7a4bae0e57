"""Weights in memory, twice: what arrives lies beside what is handed out, and takes its place when
it is verified.

Each shard (a process) holds rows of every parameter, in equal chunks as FSDP2 cuts them. To the
trainer it is one of vLLM's ranks; what is sent on is a model that is spread over ranks.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from example_trainer.errors import TrainerError
from example_trainer.models.shards import Shards, rows_of
from vllm_patching.protocol.checksum import WeightSums
from vllm_patching.protocol.manifest import (
    FlatSlice,
    Manifest,
    ManifestEntry,
    dtype_name,
    flat_layout,
    flat_views,
)
from vllm_patching.protocol.messages import BridgeWorker, Check, Room, Setup
from vllm_patching.transport.shared_memory import gpu_uuid
from vllm_patching.weights.families import Geometry
from vllm_patching.weights.sharding import ShardSpec, Slice, plan_shards, sources
from vllm_patching.worker.receiving import Target, WeightReceiver, WeightUpdater

logger = logging.getLogger(__name__)

COPIES = 2


class HeldMemoryShortage(TrainerError):
    """The copies do not fit. The message names bytes needed and free."""


def held_manifest(
    geometry: Geometry, dtype: torch.dtype, device: torch.device, rank: int = 0, size: int = 1
) -> Manifest:
    """Return the manifest of shard `rank` of `size`: its rows of every parameter. A parameter with
    fewer rows than shards has none on some.
    """
    entries = []
    for spec in plan_shards(geometry, 0, 1):
        first, count = rows_of(spec.full_shape[0], rank, size)
        slices = (Slice(0, first, 0, count),) if count else ()
        held = ShardSpec(spec.name, (count, *spec.full_shape[1:]), spec.full_shape, slices)
        entries.append(ManifestEntry(held, dtype_name(dtype), str(device)))
    return Manifest(rank, size, tuple(entries))


class HeldCopy:
    """One copy of a shard.

    Attributes:
        tensors: what is held of each parameter, by name; views of one buffer.
        version: of the weights; None if they are not whole.
        weight_epoch: of the trainer that made them.
        checksum: of them, from the trainer, equal to the one on arrival.
    """

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        """Takes the memory now, all of it."""
        layout, num_bytes = flat_layout(manifest)
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(0)
        self.slices = [(item.name, view) for item, view in flat_views(self._buffer, layout)]
        there = dict(self.slices)
        self.tensors = {
            entry.shard.name: there.get(
                entry.shard.name,
                torch.empty(entry.shard.shape, dtype=entry.torch_dtype, device=device),
            )
            for entry in manifest.entries
        }
        self.version: int | None = None
        self.weight_epoch = 0
        self.checksum = ""
        self._sums = WeightSums(self.slices)

    def is_sound(self) -> bool:
        """Return whether it still holds what came: a pass over all of it."""
        return self._sums.all().checksum == self.checksum


class _CopyUpdater(WeightUpdater):
    """Receives into a copy that the caller names."""

    def __init__(
        self, rank: int, layout: Sequence[FlatSlice], num_bytes: int, copies: Sequence[HeldCopy]
    ) -> None:
        super().__init__(rank, layout, num_bytes, copies[0].slices, logger)
        self._places = [
            (list(copy.slices), Target(layout, self._buckets, [t for _, t in copy.slices]))
            for copy in copies
        ]

    def receive_into(self, number: int, version: int) -> None:
        """As `receive`, into copy `number`."""
        self._targets, self._target = self._places[number]
        self.receive(version)

    def aim(self, direct: bool) -> None:
        """Both places are there."""


class HeldWeights(WeightReceiver):
    """One shard: what vLLM's worker extension is to the bridge, around the copies.

    Methods are called one after the other.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        """
        Raises:
            HeldMemoryShortage: the memory cannot be had.
        """
        self.manifest = held_manifest(geometry, dtype, device, rank, size)
        layout, num_bytes = flat_layout(self.manifest)
        try:
            self.copies = [HeldCopy(self.manifest, device) for _ in range(COPIES)]
        except RuntimeError as error:
            raise HeldMemoryShortage(
                f"shard {rank} of {size}: {COPIES} copies of {num_bytes / 1e9:.2f} GB cannot be had on {device}: "
                f"{str(error).splitlines()[0]}; give more --shards, or another --device"
            ) from error
        self._newest: int | None = None
        self._pinned: int | None = None
        self._receiving = 0
        self.orders: queue.SimpleQueue[tuple[int, int, bool]] = queue.SimpleQueue()
        """Orders of rank 0, which all shards hand out: weight epoch, version, and whether to
        everyone."""
        updater = _CopyUpdater(rank, layout, num_bytes, self.copies)
        self.lockstep_open(self.manifest, self.copies[0].tensors, 0, logger, updater)

    # ---- what the bridge asks of a rank ----

    def lockstep_setup(self, share_storage: bool) -> Setup:
        """See the worker extension; nothing is shared, and nothing is there yet."""
        return {
            "manifest": self.manifest.to_json(),
            "handles": None,
            "gpu_uuid": gpu_uuid(self._lockstep_device),
            "checksum": "",
        }

    def lockstep_room(self) -> Room:
        """The second copy is there already."""
        return {"needed": 0, "free": None}

    def lockstep_receive(self, version: int) -> None:
        """Receive beside what is handed out: into the copy that is neither being sent nor the
        newest. While an older one is being sent, the newest gives way: its successor is coming, and
        the sender is not waited for.
        """
        kept = self._pinned
        if kept is None:
            kept = self._newest
        self._receiving = 0
        if kept is not None:
            self._receiving = 1 - kept
            if self._newest == self._receiving:
                self._newest = kept
                if self.copies[kept].version is None:
                    self._newest = None
        self.copies[self._receiving].version = None
        self._lockstep_updater.receive_into(self._receiving, version)  # type: ignore[attr-defined]

    def lockstep_commit(self) -> Check:
        """Return the checksum that was computed on arrival; nothing has to be copied."""
        status = self._lockstep_updater.status
        return {
            "tp_rank": self._lockstep_rank,
            "checksum": status.checksum,
            "not_finite": status.not_finite,
        }

    def lockstep_check(self) -> Check:
        """Return the checksum of the newest weights."""
        checksum = self.held_newest()["checksum"]
        return {"tp_rank": self._lockstep_rank, "checksum": checksum, "not_finite": ""}

    # ---- what is handed out ----

    def held_accept(self, weight_epoch: int) -> None:
        """Make the received weights the newest: every shard has what the trainer sent."""
        status, copy = self._lockstep_updater.status, self.copies[self._receiving]
        copy.version, copy.weight_epoch, copy.checksum = (
            status.version,
            weight_epoch,
            status.checksum,
        )
        self._newest = self._receiving

    def held_newest(self) -> dict[str, Any]:
        """The newest weights that are whole: `version`, None if there are none, `weight_epoch` and
        `checksum`.
        """
        who = {"tp_rank": self._lockstep_rank}
        if self._newest is None:
            return {**who, "version": None, "weight_epoch": 0, "checksum": ""}
        copy = self.copies[self._newest]
        return {
            **who,
            "version": copy.version,
            "weight_epoch": copy.weight_epoch,
            "checksum": copy.checksum,
        }

    def held_pin(self) -> dict[str, Any]:
        """Keep the newest weights as they are until `held_unpin`.

        Answers their version, None if there are none.
        """
        self._pinned = self._newest
        return self.held_newest()

    def held_order(self, epoch: int, version: int, everyone: bool) -> None:
        """Have the main thread of this shard hand out what is pinned, together with the others'."""
        if self._lockstep_rank:  # rank 0's main thread has decided it
            self.orders.put((epoch, version, everyone))

    def held_unpin(self) -> None:
        """Let the pinned copy be overwritten."""
        self._pinned = None

    @property
    def pinned(self) -> HeldCopy:
        """The copy that is kept."""
        assert self._pinned is not None, "nothing is pinned"
        return self.copies[self._pinned]


class RowShards(Shards):
    """Rows of each parameter in equal chunks, as plain tensors."""

    spread = True

    def __init__(self, manifest: Manifest) -> None:
        self._shapes = {
            name: shape for entry in manifest.entries for name, shape in sources(entry.shard)
        }

    def whole_shape(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        return self._shapes[name]


def module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module without a forward pass, whose parameters have these names and values."""
    model = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        place = model
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        place.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    return model


def held_model(held: HeldWeights) -> nn.Module:
    """Return the module that is sent; `show` points it at a copy."""
    model = module_of(held.copies[0].tensors)
    model.shards = RowShards(held.manifest)  # type: ignore[assignment]
    return model


def show(model: nn.Module, copy: HeldCopy) -> None:
    """Point the model's parameters at a copy."""
    for name, parameter in model.named_parameters():
        parameter.data = copy.tensors[name]


if TYPE_CHECKING:

    def _checked(weights: HeldWeights) -> BridgeWorker:
        return weights
