"""How a rank's weights are cut to be sent: pieces of slices, in buckets of bounded size. Pure
arithmetic.

Both sides compute the same buckets from the same manifest, so that nothing but weights goes over
the wire. A large tensor goes in several pieces, each a range of its rows, so a bucket is bounded
whatever the model; it is small enough that two of them are little memory, and large enough that a
link is at its full speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_patching.protocol.manifest import ALIGNMENT, FlatSlice

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
            those of whole words.
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
        limit: bytes of a bucket. Rows are not cut, and go in groups of which each begins at a
            multiple of 16 bytes; a group that is larger than a bucket is one all the same.
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
