"""A trainer of one rank per vLLM rank, each holding exactly what vLLM's rank of the same number
holds (arXiv:1909.08053).

All ranks work on the same batch. Parameters, masters and moments have vLLM's local shapes, so that
a parameter can be a view on vLLM's own memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from example_trainer.errors import ModelError
from example_trainer.models.decoder import Decoder
from example_trainer.models.ops import choose_operations
from example_trainer.models.shards import Shards, Split
from vllm_patching.weights.families import Geometry, UnsupportedModel, parameters
from vllm_patching.weights.sharding import ShardSpec, Slice, plan_shards

Kind = Literal["split", "equal", "partial", "shared heads"]


class TensorParallelShards(Shards):
    """vLLM's shards. By what a rank's gradient is, a parameter is one of four kinds:

    split          no other rank holds these elements; the gradient is right as it is
    equal          held whole by every rank, where the gradient comes out the same: norms, biases after a sum
    partial        held whole by every rank, and each sees some of its uses: the norms of query and key heads
    shared heads   qkv_proj with fewer key/value heads than ranks: several ranks hold the same head and see some of its uses
    """

    spread = True

    def __init__(self, geometry: Geometry, split: Split) -> None:
        try:
            plans = [plan_shards(geometry, rank, split.size) for rank in range(split.size)]
        except UnsupportedModel as error:
            raise ModelError(
                f"{error}; start another number of trainer ranks, the same as vLLM's tensor-parallel degree"
            ) from error
        self.split = split
        self.layout = f"{split.size} tensor-parallel ranks"
        self._specs: list[dict[str, ShardSpec]] = [
            {spec.name: spec for spec in plan} for plan in plans
        ]
        self._owned = {name: self._owned_slices(name) for name in self._specs[0]}
        self.kinds: dict[str, Kind] = {
            name: self._kind(name, parameter.partial)
            for name, parameter in parameters(geometry).items()
        }

    def spec(self, name: str) -> ShardSpec:
        """This rank's share of a parameter."""
        return self._specs[self.split.rank][name]

    def whole_shape(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        return self.spec(name).full_shape

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.spec(name).full_shape

    def take(self, name: str, whole: Tensor, block: int = 1) -> Tensor:
        spec = self.spec(name)
        local = whole.new_zeros(_in_blocks(spec.shape, block))
        for piece in spec.slices:
            piece = _piece_in_blocks(piece, len(spec.shape), block)
            _local(local, piece).copy_(_source(whole, piece))
        return local

    def whole(self, name: str, local: Tensor) -> Tensor:
        if self._is_whole(name):
            return local
        return self.joined(name, self.split.gather(local.contiguous()))

    def local_shape(self, name: str, rank: int, block: int = 1) -> tuple[int, ...]:
        return _in_blocks(self._specs[rank][name].shape, block)

    def joined(self, name: str, parts: Sequence[Tensor], block: int = 1) -> Tensor:
        if self._is_whole(name):
            return parts[0]
        shape = self.spec(name).full_shape
        whole = parts[0].new_empty(_in_blocks(shape, block))
        for rank, part in enumerate(parts):
            for piece in self._specs[rank][name].slices:
                piece = _piece_in_blocks(piece, len(shape), block)
                _source(whole, piece).copy_(_local(part, piece))
        return whole

    def _is_whole(self, name: str) -> bool:
        return self.kinds[name] in ("equal", "partial")

    def owned(self, name: str, local: Tensor) -> Sequence[Tensor]:
        return [_local(local, piece) for piece in self._owned[name]]

    def ranges(self, name: str, local: Tensor) -> Sequence[tuple[int, Tensor]]:
        spec = self.spec(name)
        if any(piece.dim for piece in spec.slices):
            # Columns of a matrix are not contiguous in it.
            whole = self.whole(name, local)
            return [(0, whole)] if self.split.rank == 0 else []
        width = math.prod(spec.full_shape[1:])
        return [(piece.source_start * width, _local(local, piece)) for piece in self._owned[name]]

    def total(self, values: Tensor) -> Tensor:
        return self.split.total(values)

    def complete(self, gradients: Mapping[str, Tensor]) -> None:
        """See Shards.complete.

        Afterwards, what several ranks hold has the same gradient on all of them, bit for bit.
        """
        small = [name for name in gradients if self._is_whole(name)]
        if small:
            counted = [self.kinds[n] == "partial" or self.split.rank == 0 for n in small]
            mine = [gradients[n] * count for n, count in zip(small, counted, strict=True)]
            total = self.split.total(torch.cat([gradient.reshape(-1) for gradient in mine]))
            for name, part in zip(
                small, total.split([gradients[n].numel() for n in small]), strict=True
            ):
                gradients[name].copy_(part.view_as(gradients[name]))
        for name, gradient in gradients.items():
            if self.kinds[name] == "shared heads":
                spec = self.spec(name)
                heads = spec.slices[1:]  # the first are the rank's own query heads
                whole = gradient.new_zeros(spec.full_shape)
                for piece in heads:
                    _source(whole, piece).copy_(_local(gradient, piece))
                first = self._specs[0][name].slices[1].source_start
                self.split.total(whole[first:])
                for piece in heads:
                    _local(gradient, piece).copy_(_source(whole, piece))

    def _owned_slices(self, name: str) -> list[Slice]:
        """The slices of this rank that no lower rank holds as well."""
        lower = {
            (piece.dim, piece.source_start)
            for specs in self._specs[: self.split.rank]
            for piece in specs[name].slices
        }
        return [
            piece
            for piece in self.spec(name).slices
            if (piece.dim, piece.source_start) not in lower
        ]

    def _kind(self, name: str, partial: bool) -> Kind:
        starts = [
            tuple((piece.dim, piece.source_start) for piece in specs[name].slices)
            for specs in self._specs
        ]
        if self.split.size == 1:
            return "split"
        if len(set(starts)) == 1:
            return "partial" if partial else "equal"
        pieces = [piece for row in starts for piece in row]
        if len(set(pieces)) == len(pieces):
            return "split"
        return "shared heads"


def split_decoder(
    geometry: Geometry,
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    size: int,
    group: dist.ProcessGroup | None,
    deterministic: bool = False,
) -> Decoder:
    """A decoder with this rank's part of every layer, uninitialised.

    Args:
        deterministic: it has the operations of vLLM's bits, and sums over ranks are taken in the
            order of the ranks.

    Raises:
        ModelError: its heads or widths cannot be split over `size` ranks, or a part of the model
            has no such operations.
    """
    split = Split(rank, size, group, ordered=deterministic)
    shards = TensorParallelShards(geometry, split)
    ops = choose_operations(device, dtype, deterministic)
    model = Decoder(geometry, dtype, device, split, ops)
    model.shards = shards
    return model


def _in_blocks(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    """The shape of a tensor with one element for each block of a row."""
    return (*shape[:-1], shape[-1] // block)


def _piece_in_blocks(piece: Slice, dims: int, block: int) -> Slice:
    """The same range of such a tensor: only ranges of the last dimension, of whole blocks, change."""
    if piece.dim != dims - 1:
        return piece
    starts = {
        "source_start": piece.source_start // block,
        "local_start": piece.local_start // block,
    }
    return replace(piece, length=piece.length // block, **starts)


def _source(whole: Tensor, piece: Slice) -> Tensor:
    return whole.narrow(piece.dim, piece.source_start, piece.length)


def _local(local: Tensor, piece: Slice) -> Tensor:
    return local.narrow(piece.dim, piece.local_start, piece.length)
