"""The sums of `checksum` on a GPU: one kernel launch for any number of tensors. Needs Triton, which
comes with CUDA builds.

A word holds one element of float32 or two of a 16-bit dtype. Tensors of float32 can be summed as
what they will be when they are rounded to such a dtype. The rounded values exist in registers only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 8192
"""Words that one program sums."""
_ROUNDED = {None: "", torch.bfloat16: "bf16", torch.float16: "f16"}


# first_block would otherwise be compiled in as one of several kinds of number, and each kind costs
# a compilation.
@triton.jit(do_not_specialize=["first_block"])
def _sum_words(  # type: ignore[no-untyped-def]
    first_block, block_tensor, block_start, pointers, words, masks, rows, starts, out,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    block = first_block + tl.program_id(0)
    tensor = tl.load(block_tensor + block)
    start = tl.multiple_of(tl.load(block_start + block), BLOCK)
    count = tl.load(words + tensor)
    low = tl.load(masks + 2 * tensor)
    high = tl.load(masks + 2 * tensor + 1)
    position = start + tl.arange(0, BLOCK)
    if ROUNDED == "":
        base = tl.load(pointers + tensor).to(tl.pointer_type(tl.int32))
        if ALIGNED:
            base = tl.multiple_of(base, 16)
        # Whole blocks, which are nearly all, are read without a mask, and so in vectors.
        if start + BLOCK <= count:
            word = tl.load(base + position)
        else:
            word = tl.load(base + position, mask=position < count, other=0)
    else:
        wide_base = tl.load(pointers + tensor).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            wide_base = tl.multiple_of(wide_base, 16)
        # A tensor of almost 2**31 words has more elements than a 32-bit number can count.
        pair = 2 * position.to(tl.int64)[:, None] + tl.arange(0, 2)[None, :]
        if start + BLOCK <= count:
            elements = tl.load(wide_base + pair)
        else:
            elements = tl.load(wide_base + pair, mask=(position < count)[:, None], other=0.0)
        if ROUNDED == "bf16":
            # To the nearest, ties to even, in integers: the conversion of Triton's interpreter cuts
            # off instead.
            bits = elements.to(tl.int32, bitcast=True)
            halves = tl.where(
                elements == elements, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0
            )
        else:
            halves = elements.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        first, second = tl.split(halves)
        word = (first & 0xFFFF) | (second << 16)
    # A part's place in its tensor counts, and its tensor's row. int32 arithmetic wraps as the sums
    # of `checksum` do.
    weight = ((position + tl.load(starts + tensor)) * -1640531535) | 1  # GOLDEN as int32
    row = tl.load(rows + tensor)
    wide = word.to(tl.int64)
    bad = ((word & high) == high).to(tl.int32) + (((word & low) == low) & (low != 0)).to(tl.int32)
    tl.atomic_add(out + 3 * row, tl.sum(wide))
    tl.atomic_add(out + 3 * row + 1, tl.sum(wide * weight.to(tl.int64)))
    found = tl.sum(bad)
    if found > 0:
        tl.atomic_add(out + 3 * row + 2, found.to(tl.int64))


def _words_of(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the number of 32-bit words of a tensor in this dtype. Raises ValueError if there is
    none, or if they are too many.
    """
    num_bytes = tensor.numel() * dtype.itemsize
    aligned = not (num_bytes % 4 or tensor.data_ptr() % 4)
    if not aligned or num_bytes // 4 >= 2**31 or not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} {tensor.dtype} cannot be summed in 32-bit words"
        )
    return num_bytes // 4


class SumsKernel:
    """Adds the sums of tensors to rows of a result, for tensors that stay where they are."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        masks: Sequence[tuple[int, int]],
        out: torch.Tensor,
        rounded: torch.dtype | None = None,
        places: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """
        Args:
            tensors: contiguous CUDA tensors of one device, each of fewer than 2**31 words.
            masks: per tensor, the exponent bits of `checksum.EXPONENTS`.
            out: [rows, 3] int64; row i gets the sums of tensor i added.
            rounded: bfloat16 or float16: the tensors are float32, and summed as rounded to that.
            places: for each tensor, if it is a part of one, that one's row in `out` and how many of
                its words come before.

        Raises:
            ValueError: a tensor is not made of whole 32-bit words at a multiple of 4 bytes, or is
                too large.
        """
        if rounded is not None and any(tensor.dtype is not torch.float32 for tensor in tensors):
            raise ValueError(f"only float32 can be summed as if rounded to {rounded}")
        self._rounded = _ROUNDED[rounded]
        counts = [_words_of(tensor, rounded or tensor.dtype) for tensor in tensors]
        device = out.device
        self._tensors = tensors  # the table holds bare addresses: keep what they point to
        self._out = out
        self._aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        self._pointers = torch.tensor(
            [t.data_ptr() for t in tensors], dtype=torch.int64, device=device
        )
        self._words = torch.tensor(counts, dtype=torch.int32, device=device)
        places = places or [(index, 0) for index in range(len(tensors))]
        self._rows = torch.tensor([row for row, _ in places], dtype=torch.int32, device=device)
        self._starts = torch.tensor(
            [start for _, start in places], dtype=torch.int32, device=device
        )
        self._masks = torch.tensor(masks, dtype=torch.int32, device=device).view(-1)
        blocks = [
            (index, start)
            for index, count in enumerate(counts)
            for start in range(0, count, _BLOCK)
        ]
        self._block_tensor = torch.tensor(
            [index for index, _ in blocks], dtype=torch.int32, device=device
        )
        self._block_start = torch.tensor(
            [start for _, start in blocks], dtype=torch.int32, device=device
        )
        # First block of each tensor, so that a range of tensors is a range of blocks.
        self._first_block = [0]
        for count in counts:
            self._first_block.append(self._first_block[-1] + -(-count // _BLOCK))

    def launch(self, first: int, last: int) -> None:
        """Enqueue the sums of tensors first … last - 1 on the current stream."""
        begin, end = self._first_block[first], self._first_block[last]
        if begin == end:
            return
        with torch.cuda.device(self._out.device):
            _sum_words[(end - begin,)](
                begin,
                self._block_tensor,
                self._block_start,
                self._pointers,
                self._words,
                self._masks,
                self._rows,
                self._starts,
                self._out,
                BLOCK=_BLOCK,
                ALIGNED=self._aligned,
                ROUNDED=self._rounded,
                num_warps=8,
            )
