"""The sums of `checksum` on a GPU: one kernel launch for any number of tensors. Needs Triton, which comes with CUDA builds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 8192
"""Words that one program sums."""


# first_block would otherwise be compiled in as one of several kinds of number, and each kind costs a compilation.
@triton.jit(do_not_specialize=["first_block"])
def _sum_words(  # type: ignore[no-untyped-def]
    first_block, block_tensor, block_start, pointers, words, masks, out, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    block = first_block + tl.program_id(0)
    tensor = tl.load(block_tensor + block)
    start = tl.load(block_start + block)
    count = tl.load(words + tensor)
    low = tl.load(masks + 2 * tensor)
    high = tl.load(masks + 2 * tensor + 1)
    base = tl.load(pointers + tensor).to(tl.pointer_type(tl.int32))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    position = start + tl.arange(0, BLOCK)
    word = tl.load(base + position, mask=position < count, other=0)
    weight = (position * -1640531535) | 1  # GOLDEN as int32
    wide = word.to(tl.int64)
    bad = ((word & high) == high).to(tl.int32) + (((word & low) == low) & (low != 0)).to(tl.int32)
    tl.atomic_add(out + 3 * tensor, tl.sum(wide))
    tl.atomic_add(out + 3 * tensor + 1, tl.sum(wide * weight.to(tl.int64)))
    found = tl.sum(bad)
    if found > 0:
        tl.atomic_add(out + 3 * tensor + 2, found.to(tl.int64))


class SumsKernel:
    """Adds the sums of tensors to rows of a result, for tensors that stay where they are."""

    def __init__(self, tensors: Sequence[torch.Tensor], masks: Sequence[tuple[int, int]], out: torch.Tensor) -> None:
        """
        Args:
            tensors: contiguous CUDA tensors of one device, each of fewer than 2**31 words.
            masks: per tensor, the exponent bits of `checksum.EXPONENTS`.
            out: [len(tensors), 3] int64; row i gets the sums of tensor i added.

        Raises:
            ValueError: a tensor is not made of whole 32-bit words at a multiple of 4 bytes, or is too large.
        """
        counts = []
        for tensor in tensors:
            num_bytes = tensor.numel() * tensor.element_size()
            if num_bytes % 4 or tensor.data_ptr() % 4 or num_bytes // 4 >= 2**31 or not tensor.is_contiguous():
                raise ValueError(f"a tensor of shape {tuple(tensor.shape)} {tensor.dtype} cannot be summed in 32-bit words")
            counts.append(num_bytes // 4)
        device = out.device
        self._tensors = tensors  # the table holds bare addresses: keep what they point to
        self._out = out
        self._aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        self._pointers = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)
        self._words = torch.tensor(counts, dtype=torch.int32, device=device)
        self._masks = torch.tensor(masks, dtype=torch.int32, device=device).view(-1)
        blocks = [(index, start) for index, count in enumerate(counts) for start in range(0, count, _BLOCK)]
        self._block_tensor = torch.tensor([index for index, _ in blocks], dtype=torch.int32, device=device)
        self._block_start = torch.tensor([start for _, start in blocks], dtype=torch.int32, device=device)
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
                self._out,
                BLOCK=_BLOCK,
                ALIGNED=self._aligned,
                num_warps=8,
            )
