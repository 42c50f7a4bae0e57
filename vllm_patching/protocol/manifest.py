"""The parameters of a vLLM worker, and the buckets in which they are sent. Both sides of the bridge
compare the parameters before a byte is sent, and compute the same buckets from them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vllm_patching.weights.sharding import (
    LearnedShard,
    ShardSpec,
    Slice,
    SourceSlice,
    source_slices,
    sources,
)

ALIGNMENT = 16
"""Bytes. Every slice starts at a multiple of this in the flat buffer, so that it can be viewed as
any dtype."""


@dataclass(frozen=True)
class ManifestEntry:
    """One parameter of one rank: its shard, its dtype (`float32`, `bfloat16`, …) and its device
    (`cpu`, `cuda:0`).
    """

    shard: ShardSpec | LearnedShard
    dtype: str
    device: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return parse_dtype(self.dtype)


@dataclass(frozen=True)
class Manifest:
    """All parameters of one tensor-parallel rank, in the model's order."""

    tp_rank: int
    tp_size: int
    entries: tuple[ManifestEntry, ...]

    def digest(self) -> str:
        """Hex digest of everything that must agree for an update to be possible (devices may
        differ).
        """
        rows = [
            (
                e.shard.name,
                e.shard.shape,
                _sources_to_json(e.shard),
                [asdict(s) for s in e.shard.slices],
                e.dtype,
            )
            for e in self.entries
        ]
        return hashlib.sha256(json.dumps([self.tp_rank, self.tp_size, rows]).encode()).hexdigest()[
            :32
        ]

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `param_mappings` maps each name to shape, full_shape, dtype, device and
        slices. A learned parameter has `sources`, by name, in place of its full_shape.
        """
        return {
            "tp_rank": self.tp_rank,
            "tp_size": self.tp_size,
            "digest": self.digest(),
            "param_mappings": {
                e.shard.name: {
                    "shape": list(e.shard.shape),
                    _SOURCES[type(e.shard)]: _sources_to_json(e.shard),
                    "dtype": e.dtype,
                    "device": e.device,
                    "slices": [asdict(s) for s in e.shard.slices],
                }
                for e in self.entries
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """The inverse of to_json.

        Raises:
            ValueError: a field is missing, or the digest does not belong to the entries.
        """
        try:
            entries = tuple(
                ManifestEntry(_shard_from_json(name, row), row["dtype"], row["device"])
                for name, row in data["param_mappings"].items()
            )
            manifest = cls(int(data["tp_rank"]), int(data["tp_size"]), entries)
            digest = data["digest"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"the manifest cannot be read: {error!r}") from error
        if manifest.digest() != digest:
            raise ValueError(
                f"the manifest of rank {manifest.tp_rank} does not match its digest {digest}"
            )
        return manifest


_SOURCES = {ShardSpec: "full_shape", LearnedShard: "sources"}


def _sources_to_json(shard: ShardSpec | LearnedShard) -> Any:
    if isinstance(shard, LearnedShard):
        return {name: list(shape) for name, shape in shard.sources}
    return list(shard.full_shape)


def _shard_from_json(name: str, row: Mapping[str, Any]) -> ShardSpec | LearnedShard:
    shape = tuple(row["shape"])
    if "sources" not in row:
        slices = tuple(Slice(**piece) for piece in row["slices"])
        return ShardSpec(name, shape, tuple(row["full_shape"]), slices)
    whole_shapes = tuple((source, tuple(size)) for source, size in row["sources"].items())
    learned = tuple(
        SourceSlice(
            piece["source"],
            tuple(piece["shape"]),
            piece["source_offset"],
            tuple(piece["source_strides"]),
            piece["local_start"],
        )
        for piece in row["slices"]
    )
    return LearnedShard(name, shape, whole_shapes, learned)


@dataclass(frozen=True)
class FlatSlice:
    """Where one slice of one parameter lies in a rank's flat byte buffer.

    Attributes:
        name: of the parameter.
        slice: the elements of the trainer's tensor, and their range in the parameter.
        full_shape: of the trainer's tensor.
        learned: the trainer's tensor is a checkpoint tensor, and not its own parameter.
    """

    name: str
    slice: SourceSlice
    full_shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int
    learned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the elements."""
        return self.slice.shape


def flat_layout(manifest: Manifest) -> tuple[list[FlatSlice], int]:
    """Lay the slices of a rank one after another, aligned to 16 bytes.

    Both sides compute this from the same manifest, so a buffer needs no headers. Returns the slices
    in order and the buffer's total size in bytes.
    """
    layout: list[FlatSlice] = []
    offset = 0
    for entry in manifest.entries:
        shard, dtype = entry.shard, entry.torch_dtype
        whole_shapes, learned = dict(sources(shard)), isinstance(shard, LearnedShard)
        for piece in source_slices(shard):
            num_bytes = dtype.itemsize * math.prod(piece.shape)
            full = whole_shapes[piece.source]
            layout.append(FlatSlice(shard.name, piece, full, dtype, offset, num_bytes, learned))
            offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return layout, offset


def flat_views(
    buffer: torch.Tensor, layout: Sequence[FlatSlice]
) -> Iterator[tuple[FlatSlice, torch.Tensor]]:
    """Each slice with its view on a flat uint8 buffer."""
    for item in layout:
        yield (
            item,
            buffer[item.offset : item.offset + item.num_bytes].view(item.dtype).view(item.shape),
        )


def source_view(item: FlatSlice, full: torch.Tensor) -> torch.Tensor:
    """The part of the trainer's full tensor that a slice is taken from.

    Args:
        full: contiguous.
    """
    piece = item.slice
    start = full.storage_offset() + piece.source_offset
    return full.as_strided(piece.shape, piece.source_strides, start)


def local_view(item: FlatSlice, parameter: torch.Tensor) -> torch.Tensor:
    """The part of the rank's parameter that a slice goes to."""
    first, size = item.slice.local_start, math.prod(item.shape)
    return parameter.view(-1)[first : first + size].view(item.shape)


def mismatches(manifest: Manifest, trainer: Mapping[str, tuple[tuple[int, ...], str]]) -> list[str]:
    """List the differences between `manifest` and a trainer's parameters (name -> full shape,
    dtype).

    Returns one sentence for each difference, naming the parameter and both values; empty when every
    parameter of each side has its partner on the other.
    """
    problems = []
    served = {name: (shape, e) for e in manifest.entries for name, shape in sources(e.shard)}
    for name in sorted(served.keys() - trainer.keys()):
        problems.append(f"{name}: vLLM has it, the trainer does not")
    for name in sorted(trainer.keys() - served.keys()):
        problems.append(f"{name}: the trainer has it, vLLM does not")
    for name, (full_shape, entry) in served.items():
        if name not in trainer:
            continue
        shape, dtype = trainer[name]
        if tuple(shape) != full_shape:
            problems.append(f"{name}: shape {tuple(shape)} in the trainer, {full_shape} in vLLM")
        # A learned parameter may have a dtype of its own: what is sent is rounded to it.
        if dtype != entry.dtype and isinstance(entry.shard, ShardSpec):
            problems.append(f"{name}: dtype {dtype} in the trainer, {entry.dtype} in vLLM")
    return problems


def parse_dtype(name: str) -> torch.dtype:
    """`bfloat16` -> torch.bfloat16. Raises ValueError for any other name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


BUCKET_BYTES = 128 << 20
"""A bucket holds no more, unless the least that can be cut off a tensor is larger: both sides must
agree."""


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one slice (of a slice with one dimension: elements).

    Attributes:
        item: number of the slice in the layout.
        first, last: rows first … last - 1 of the slice, counted from its own first one.
        start: where the piece begins in its slice, bytes; a multiple of 16, so that its sums are
            sums of whole words.
        offset: where it begins in a buffer of its bucket, bytes; a multiple of 16.
        num_bytes: of the piece.
    """

    item: int
    first: int
    last: int
    start: int
    offset: int
    num_bytes: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its rows of the slice, given the slice (or anything that has the slice's rows)."""
        return tensor[self.first : self.last]

    def in_buffer(self, buffer: torch.Tensor, item: FlatSlice) -> torch.Tensor:
        """Its place in a flat uint8 buffer of its bucket, in the slice's dtype and shape.

        Args:
            item: the slice.
        """
        data = buffer[self.offset : self.offset + self.num_bytes].view(item.dtype)
        return data.view(self.last - self.first, *item.shape[1:])


@dataclass(frozen=True)
class Bucket:
    """Pieces that are sent together, in the layout's order.

    Attributes:
        num_bytes: of a buffer that holds all of them, each at its offset.
    """

    pieces: tuple[Piece, ...]
    num_bytes: int

    @property
    def payload(self) -> int:
        """Bytes of weights, without what alignment leaves free between them."""
        return sum(piece.num_bytes for piece in self.pieces)


def buckets(layout: Sequence[FlatSlice], limit: int = BUCKET_BYTES) -> list[Bucket]:
    """Cut a layout (manifest.flat_layout) into buckets.

    Args:
        limit: bytes of a bucket. Rows are not cut, and go in groups that begin at a multiple of 16
            bytes. A group that is larger than a bucket is one all the same.
    """
    found: list[Bucket] = []
    pieces: list[Piece] = []
    used = 0

    def end() -> None:
        nonlocal used
        if pieces:
            found.append(Bucket(tuple(pieces), used))
        pieces.clear()
        used = 0

    for index, item in enumerate(layout):
        rows = item.shape[0]
        row_bytes = item.num_bytes // rows
        group = ALIGNMENT // math.gcd(ALIGNMENT, row_bytes)
        row = 0
        while row < rows:
            room = (limit - used) // row_bytes
            count = rows - row if room >= rows - row else room - room % group
            if count <= 0 and used:
                end()
                continue
            count = min(max(count, group), rows - row)
            size = count * row_bytes
            pieces.append(Piece(index, row, row + count, row * row_bytes, used, size))
            used += -(-size // ALIGNMENT) * ALIGNMENT
            row += count
    end()
    return found
