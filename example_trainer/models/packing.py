"""Sequences laid one behind the other without padding, and the tiles in which sums over their tokens are taken."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

TILE = 64
"""Tokens that are summed at once. A tile never holds tokens of two sequences: what a sum's order is cannot depend on what a
sequence is packed with."""

TileTable = tuple[Tensor, Tensor, Tensor, Tensor]
"""For each tile, [tiles] int32: its first token, its length, its sequence's first token, one past its sequence's last."""


class Packing:
    """Where each of several packed sequences begins and ends.

    Args:
        lengths: tokens of each, in order; all of at least 1.
        device: of the tensors.

    Attributes:
        lengths: as given.
        tokens: their sum.
        max_length: the longest.
        positions: [tokens] int64, each token's place in its own sequence.
        cu_seqlens: [sequences + 1] int32, the first token of each, then `tokens`.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"sequences of lengths {list(lengths)} cannot be packed; give at least one, and each a token")
        self.lengths = tuple(int(length) for length in lengths)
        self.device = torch.device(device)
        self.tokens, self.max_length = sum(self.lengths), max(self.lengths)
        begins = [0]
        for length in self.lengths:
            begins.append(begins[-1] + length)
        self.begins = tuple(begins)
        self.cu_seqlens = torch.tensor(begins, dtype=torch.int32).to(self.device)

    @cached_property
    def positions(self) -> Tensor:
        """[tokens] int64."""
        return torch.cat([torch.arange(length) for length in self.lengths]).to(self.device)

    @cached_property
    def _tiles(self) -> TileTable:
        return self._table(TILE)

    @cached_property
    def _halves(self) -> TileTable:
        return self._table(TILE // 2)

    def tiles(self) -> TileTable:
        """Tiles of TILE tokens; the last one of a sequence may be shorter."""
        return self._tiles

    def halves(self) -> TileTable:
        """Tiles of TILE / 2 tokens."""
        return self._halves

    def spans(self) -> list[tuple[int, int]]:
        """First token of each sequence, and one past its last."""
        return list(zip(self.begins[:-1], self.begins[1:], strict=True))

    def _table(self, size: int) -> TileTable:
        rows = [(start, min(size, end - start), begin, end) for begin, end in self.spans() for start in range(begin, end, size)]
        starts, lengths, begins, ends = torch.tensor(rows, dtype=torch.int32).t().contiguous().to(self.device)
        return starts, lengths, begins, ends


def pack(rows: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Packing]:
    """Take the padding out of rows that are padded on the right.

    Args:
        rows: [sequences, length] token ids.
        lengths: of each, without its padding.

    Returns:
        [tokens] ids, and where each sequence lies in them.
    """
    flat = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
    return flat, Packing(lengths, rows.device)
