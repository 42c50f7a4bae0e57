"""A checksum of a set of weights. It changes when any bit of any weight changes its value or its
place.

Each tensor's bytes are read as 32-bit integers x_0, x_1, … (zeros fill up the last one). They are
condensed to two 64-bit sums with wrapping arithmetic. These are sum(x_i) and sum(x_i * w_i), where
w_i is an odd 32-bit number that depends on the position i. Integer sums do not depend on the order
of additions, so a GPU and a CPU agree exactly. They guard against lost, stale, torn and misplaced
weights, not against an adversary. The same pass counts NaN and infinity.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from vllm_patching.protocol.checksum_kernel import SumsKernel

logger = logging.getLogger(__name__)

GOLDEN = 0x9E3779B1
"""2**32 divided by the golden ratio, made odd: neighbouring positions get weights that have nothing
in common."""

_CHUNK, _CPU_CHUNK = 1 << 22, 1 << 18
"""Words that are summed at once; a CPU's stay in its cache, which makes it several times as
fast."""

_Words = TypeVar("_Words", int, torch.Tensor)

# Exponent bits that are all ones in NaN and infinity. First those bits for the element in a word's
# low half (0: a word is one element). Then those for the element in its high half, or for the whole
# word.
EXPONENTS = {
    torch.float32: (0, 0x7F800000),
    torch.bfloat16: (0x7F80, 0x7F800000),
    torch.float16: (0x7C00, 0x7C000000),
}


@dataclass(frozen=True)
class WeightSummary:
    """The result of a pass over the weights.

    Attributes:
        checksum: 32 hexadecimal digits over every tensor's name, shape, dtype and bits.
        not_finite: name of the first tensor that holds NaN or infinity; empty if none does.
    """

    checksum: str
    not_finite: str


@dataclass(frozen=True)
class Row:
    """One tensor of the list that is summed: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Part:
    """Some of a tensor's values, where they lie.

    Attributes:
        row: number of the tensor in the list.
        start: where they begin in the tensor, bytes; a multiple of 4.
        values: contiguous.
    """

    row: int
    start: int
    values: torch.Tensor


class WeightSums:
    """Sums over a fixed list of tensors, computed at each pass.

    On a GPU everything is enqueued on the current stream, one kernel for any number of tensors. So
    a transfer can be checked while it is still going on: `reset`, `add` for each part, `read`. A
    tensor may be added piece by piece, in any order, by one process or by several (`of_parts`,
    `rows`, `summary_of`). The sums are the whole tensor's.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], rounded: torch.dtype | None = None
    ) -> None:
        """
        Args:
            named: pairs of a name and a contiguous tensor of float32, bfloat16 or float16, all on
                one device. Their memory is read again at each pass.
            rounded: sum what float32 tensors will be once they are rounded to this dtype, as copy_
                rounds.
        """
        if all(tensor.dtype is rounded for _, tensor in named):
            rounded = None
        rows = [Row(name, tuple(tensor.shape), rounded or tensor.dtype) for name, tensor in named]
        device = named[0][1].device if named else torch.device("cpu")
        self._begin(
            rows,
            [Part(index, 0, tensor) for index, (_, tensor) in enumerate(named)],
            device,
            rounded,
        )

    @classmethod
    def of_parts(
        cls, rows: Sequence[Row], parts: Sequence[Part], device: torch.device
    ) -> WeightSums:
        """Sums over tensors that are added in parts, which may lie anywhere on a device; `add`
        counts parts then.
        """
        made = cls.__new__(cls)
        made._begin(rows, parts, device, None)
        return made

    def _begin(
        self,
        rows: Sequence[Row],
        parts: Sequence[Part],
        device: torch.device,
        rounded: torch.dtype | None,
    ) -> None:
        self._rounded = rounded
        self._rows = rows
        self._parts = [Part(part.row, part.start, part.values.detach()) for part in parts]
        self._sums = torch.zeros(len(rows), 3, dtype=torch.int64, device=device)
        self._kernel = (
            _gpu_kernel(self._parts, self._sums, rounded) if device.type == "cuda" else None
        )

    def reset(self) -> None:
        """Begin a pass."""
        self._sums.zero_()

    def add(self, first: int, last: int) -> None:
        """Sum the parts first … last - 1 of the list. On a GPU it returns before that is done."""
        if self._kernel is not None:
            self._kernel.launch(first, last)
            return
        for part in self._parts[first:last]:
            self._sums[part.row] += _torch_sums(part.values, self._rounded, part.start)

    def rows(self) -> list[list[int]]:
        """For each tensor of the list the two sums, and the number of words with NaN or infinity;
        waits for them.
        """
        found: list[list[int]] = self._sums.tolist()
        return found

    def read(self) -> WeightSummary:
        """The result of the pass; waits for it."""
        return summary_of(self._rows, self.rows())

    def all(self) -> WeightSummary:
        """A whole pass."""
        self.reset()
        self.add(0, len(self._parts))
        return self.read()


def summary_of(rows: Sequence[Row], *sums: Sequence[Sequence[int]]) -> WeightSummary:
    """Return the summary of a list of tensors.

    Args:
        rows: the list.
        sums: WeightSums.rows() of everyone who has summed parts of it; together every part once.
    """
    digest = hashlib.sha256()
    spoilt = ""
    for row, *found in zip(rows, *sums, strict=True):
        plain, weighted, bad = (_wrapped(sum(column)) for column in zip(*found, strict=True))
        digest.update(f"{row.name}:{tuple(row.shape)}:{row.dtype}={plain},{weighted};".encode())
        spoilt = spoilt or (row.name if bad else "")
    return WeightSummary(digest.hexdigest()[:32], spoilt)


def _wrapped(value: int) -> int:
    """An integer as the 64 bits of an int64 hold it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def weights_checksum(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Checksum of named tensors; the order of the tensors counts.

    For a list that is summed once.
    """
    return WeightSums([(name, tensor.contiguous()) for name, tensor in named]).all().checksum


def _gpu_kernel(
    parts: list[Part], sums: torch.Tensor, rounded: torch.dtype | None
) -> SumsKernel | None:
    """One kernel for all parts, or None (with a warning) where only torch's own operations can sum
    them.
    """
    try:
        from vllm_patching.protocol.checksum_kernel import SumsKernel

        values = [part.values for part in parts]
        masks = [EXPONENTS[rounded or tensor.dtype] for tensor in values]
        return SumsKernel(
            values, masks, sums, rounded, [(part.row, part.start // 4) for part in parts]
        )
    except (ImportError, ValueError) as error:
        logger.warning(
            "the weights are checked with many small operations, which is slow: %s", error
        )
        return None


def _torch_sums(
    tensor: torch.Tensor, rounded: torch.dtype | None = None, start: int = 0
) -> torch.Tensor:
    """[3] int64: plain sum, weighted sum, number of words with NaN or infinity in them, of what
    begins `start` bytes on.
    """
    dtype = rounded or tensor.dtype
    low, high = EXPONENTS[dtype]
    total = torch.zeros(3, dtype=torch.int64, device=tensor.device)
    words = _CPU_CHUNK if tensor.device.type == "cpu" else _CHUNK
    elements = words * 4 // dtype.itemsize
    from_zero = _first_weights(words, tensor.device)
    flat = tensor.contiguous().view(-1)
    for begin in range(0, flat.numel(), elements):
        word = _words(flat[begin : begin + elements].to(dtype))
        first = (start + begin * dtype.itemsize) // 4
        weight = (from_zero[: word.numel()] + _signed((first * GOLDEN) & 0xFFFFFFFF)).bitwise_or_(1)
        total[0] += word.sum()
        total[1] += word.to(torch.int64).mul_(weight).sum()
        bad = (word & high) == high
        if low:
            bad |= (word & low) == low
        total[2] += bad.count_nonzero()
    return total


@lru_cache(maxsize=4)
def _first_weights(words: int, device: torch.device) -> torch.Tensor:
    """[words] int32: position * GOLDEN, as 32 bits hold it; those further on are the same with
    something added.
    """
    product = torch.arange(words, dtype=torch.int64, device=device) * GOLDEN
    return _signed(product & 0xFFFFFFFF).to(torch.int32)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """The bytes of a one-dimensional tensor as int32, filled up with zeros."""
    data = flat.view(torch.uint8)
    missing = -data.numel() % 4
    if missing or data.storage_offset() % 4:
        data = torch.cat([data, data.new_zeros(missing)])
    return data.view(torch.int32)


def _signed(word: _Words) -> _Words:
    """int64 values 0 … 2**32 - 1 as the int32 values of the same bits."""
    return word - ((word >> 31) << 32)
