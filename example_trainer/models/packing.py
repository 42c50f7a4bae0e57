"""Spans of tokens laid one behind the other without padding: what the decoder computes on.

A *span* is a run of tokens that the decoder sees once. Usually it is a whole sequence. Where
sequences begin alike, their common tokens are a span of its own, their *parent*, and each continues
it. Its queries attend to the keys of its parent, of its parent's parent and so on, and then to its
own. So a prompt is forwarded once for all its responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64
"""Tokens that are summed at once. A tile never holds tokens of two spans: what a sum's order is
cannot depend on what a span is packed with."""
NO_PARENT = -1


class Tiles(NamedTuple):
    """The tiles of a packing, [tiles] int32 each.

    Keys are numbered so that the keys of a span's own tokens have the tokens' numbers. The keys of
    the spans that it continues have the numbers before them.

    Attributes:
        starts, lengths: first token and number of tokens.
        first_keys: number of the first key that the tile's span sees.
        shifts: this plus the number of a key is its place in `Packing.key_rows`.
        ends: one past the last token that sees the keys of the tile's span.
    """

    starts: Tensor
    lengths: Tensor
    first_keys: Tensor
    shifts: Tensor
    ends: Tensor


class Packing:
    """Where each of several packed spans begins and ends, and which keys it sees.

    Args:
        lengths: tokens of each, in order; all of at least 1.
        device: of the tensors.
        parents: for each span the number of an earlier one that it continues, or NO_PARENT; not
            given: none continues any.

    Attributes:
        lengths, parents: as given.
        tokens: the sum of the lengths.
        max_length: the longest span, in queries.
        seen: keys that the last query of each span sees: the span's own tokens and all that it
            continues.
        longest: the longest sequence, in tokens: a span with all that it continues.
        begins: the first token of each span, then `tokens`.
        cu_seqlens: [spans + 1] int32, the same on the device.
        routed: [tokens, choices], the experts that each layer of a mixture has to choose, see
            RouterReplay; None: it chooses itself.
        shared_by: [tokens], how many sequences have each token; None: each is of one.
    """

    routed: Tensor | None = None
    shared_by: Tensor | None = None

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        parents: Sequence[int] | None = None,
    ) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(
                f"spans of lengths {list(lengths)} cannot be packed; give at least one, and each a token"
            )
        self.lengths = tuple(int(length) for length in lengths)
        self.parents = (
            (NO_PARENT,) * len(self.lengths)
            if parents is None
            else tuple(int(parent) for parent in parents)
        )
        if len(self.parents) != len(self.lengths):
            raise ValueError(f"{len(self.parents)} parents do not fit {len(self.lengths)} spans")
        if any(not NO_PARENT <= parent < number for number, parent in enumerate(self.parents)):
            raise ValueError(
                f"parents {list(self.parents)}: a span continues an earlier one, or none ({NO_PARENT})"
            )
        self.device = torch.device(device)
        self.tokens, self.max_length = sum(self.lengths), max(self.lengths)
        begins = [0]
        for length in self.lengths:
            begins.append(begins[-1] + length)
        self.begins = tuple(begins)
        before: list[int] = []  # tokens in front of each span, in its own sequence
        for parent in self.parents:
            before.append(0 if parent == NO_PARENT else before[parent] + self.lengths[parent])
        self._before = tuple(before)
        self.seen = tuple(
            first + length for first, length in zip(before, self.lengths, strict=True)
        )
        self.longest = max(self.seen)
        self.cu_seqlens = self._sent(torch.tensor(begins, dtype=torch.int32))

    @property
    def shared(self) -> bool:
        """Report if any span continues another."""
        return any(parent != NO_PARENT for parent in self.parents)

    @property
    def repeated(self) -> bool:
        """Report if a token can be of several sequences, which continue its span or are equal."""
        return self.shared or self.shared_by is not None

    @cached_property
    def nested(self) -> bool:
        """Report if the spans that continue a span, directly or not, stand right behind it. So the
        tokens that see its keys have no others between them.
        """
        for number, parent in enumerate(self.parents):
            before = number - 1
            while NO_PARENT < parent < before:
                before = self.parents[before]
            if NO_PARENT < parent != before:
                return False
        return True

    @cached_property
    def positions(self) -> Tensor:
        """[tokens] int64, each token's place in its own sequence."""
        spans = zip(self._before, self.seen, strict=True)
        return self._sent(torch.cat([torch.arange(first, end) for first, end in spans]))

    @cached_property
    def numbers(self) -> Tensor:
        """[tokens] int64, the number of each token's span."""
        tokens = torch.arange(self.tokens, device=self.device, dtype=torch.int32)
        return torch.searchsorted(self.cu_seqlens[1:], tokens, right=True)

    @cached_property
    def key_rows(self) -> Tensor | None:
        """[keys] int64: the tokens whose keys each span sees, span after span, in the order of
        their positions; the last ones are its own. None if no span continues another: each then
        sees its own, as they lie."""
        return self._sent(torch.cat(self.rows_seen)) if self.shared else None

    @cached_property
    def rows_seen(self) -> list[Tensor]:
        """For each span [keys] int64 on the CPU, the tokens whose keys it sees; see `key_rows`."""
        own = [torch.arange(first, end) for first, end in self.spans()]
        rows: list[Tensor] = []
        for number, parent in enumerate(self.parents):
            rows.append(
                own[number] if parent == NO_PARENT else torch.cat((rows[parent], own[number]))
            )
        return rows

    @cached_property
    def cu_keys(self) -> Tensor:
        """[spans + 1] int32: where the keys of each span begin in what `key_rows` chooses."""
        if not self.shared:
            return self.cu_seqlens
        return self._sent(torch.tensor([0, *self.seen]).cumsum(0).to(torch.int32))

    def index_tensors(self) -> list[Tensor]:
        """The tensors that rotation and attention read, made now if they were not before."""
        return [
            tensor
            for tensor in (self.cu_seqlens, self.positions, self.key_rows, self.cu_keys)
            if tensor is not None
        ]

    @cached_property
    def attended_pairs(self) -> int:
        """Pairs of a query and a key that it sees: what attention's arithmetic is proportional to."""
        pairs = zip(self._before, self.lengths, strict=True)
        return sum(length * before + length * (length + 1) // 2 for before, length in pairs)

    @cached_property
    def _tables(self) -> dict[int, Tiles]:
        return {}

    def tiles(self, size: int = TILE) -> Tiles:
        """Tiles of `size` tokens; the last one of a span may be shorter."""
        if size not in self._tables:
            self._tables[size] = self._table(size)
        return self._tables[size]

    def spans(self) -> list[tuple[int, int]]:
        """First token of each span, and one past its last."""
        return list(zip(self.begins[:-1], self.begins[1:], strict=True))

    def _table(self, size: int) -> Tiles:
        seen_until = list(self.begins[1:])
        for number, parent in reversed(list(enumerate(self.parents))):
            if parent != NO_PARENT:
                seen_until[parent] = max(seen_until[parent], seen_until[number])
        rows, keys = [], 0
        for number, (begin, end) in enumerate(self.spans()):
            keys += self.seen[number]
            of_span = begin - self._before[number], keys - end, seen_until[number]
            rows += [(start, min(size, end - start), *of_span) for start in range(begin, end, size)]
        return Tiles(*self._sent(torch.tensor(rows, dtype=torch.int32).t().contiguous()))

    def _sent(self, values: Tensor) -> Tensor:
        """On the device.

        From pinned memory, or the host would wait for everything that a GPU still has to do.
        """
        if self.device.type != "cuda":
            return values.to(self.device)
        return values.pin_memory().to(self.device, non_blocking=True)
