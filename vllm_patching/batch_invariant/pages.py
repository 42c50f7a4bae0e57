"""Packed keys and values laid out as vLLM's cache holds them, so that attention runs the same
kernel with the same tiles.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch

PAGE = 16
"""Tokens in a page of the cache (vLLM's --block-size)."""


@dataclass(frozen=True)
class PagePlan:
    """Where each token of a packed batch goes.

    Attributes:
        lengths: [sequences] int32.
        block_table: [sequences, pages of the longest] int32: a sequence's pages, one after the
            other.
        page, offset: [tokens] int64, of each token.
        pages: how many there are, at most.
    """

    lengths: torch.Tensor
    block_table: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor
    pages: int

    def lay_out(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tokens, kv_heads, dim] as two views [pages, PAGE, kv_heads, dim] strided
        as vLLM's cache.
        """
        kv_heads, dim = k.shape[1:]
        # Zeros, because what is left over in the last page of a sequence is multiplied by a weight
        # of zero.
        cache = k.new_zeros(self.pages, kv_heads, PAGE, 2 * dim)
        places = cache.transpose(1, 2)
        if k.is_cuda:
            kernels = importlib.import_module("vllm_patching.batch_invariant.kernels")
            kernels.lay_out(k, v, cache, self.page, self.offset)
        else:
            places[self.page, self.offset] = torch.cat((k, v), dim=-1)
        keys, values = places.split(dim, dim=-1)
        return keys, values


_last: tuple[torch.Tensor, int, int, int, PagePlan] | None = None


def page_plan(cu_seqlens: torch.Tensor, tokens: int, max_seqlen: int) -> PagePlan:
    """The plan of a batch; all layers share one. Waits for nothing on the device.

    Args:
        cu_seqlens: [sequences + 1] int32, ends in `tokens`.
        tokens: of the batch.
        max_seqlen: of the longest sequence.
    """
    global _last
    if cu_seqlens.is_inference():  # has no version, so a change of its contents would not be seen
        return make_page_plan(cu_seqlens, tokens, max_seqlen)
    # The tensor is held, so that no other can take its place in memory and be taken for it.
    if (
        _last is not None
        and _last[0] is cu_seqlens
        and _last[1:4] == (cu_seqlens._version, tokens, max_seqlen)
    ):
        return _last[4]
    plan = make_page_plan(cu_seqlens, tokens, max_seqlen)
    _last = (cu_seqlens, cu_seqlens._version, tokens, max_seqlen, plan)
    return plan


def make_page_plan(cu_seqlens: torch.Tensor, tokens: int, max_seqlen: int) -> PagePlan:
    """See page_plan."""
    device = cu_seqlens.device
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    pages_of = (lengths + PAGE - 1) // PAGE
    first = torch.cumsum(pages_of, 0) - pages_of
    pages = tokens // PAGE + lengths.shape[0]
    columns = torch.arange((max_seqlen + PAGE - 1) // PAGE, device=device)
    block_table = (first.unsqueeze(1) + columns).clamp_(max=max(pages - 1, 0)).to(torch.int32)
    token = torch.arange(tokens, device=device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), token, right=True)
    position = token - cu_seqlens[sequence]
    return PagePlan(
        lengths.to(torch.int32).contiguous(),
        block_table.contiguous(),
        first[sequence] + position // PAGE,
        position % PAGE,
        pages,
    )
