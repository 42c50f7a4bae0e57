"""Layers split over tensor-parallel ranks: what goes over the wire in a forward and in a backward
pass.

The f and g of Megatron-LM (arXiv:1909.08053, section 3). Between two layers every rank holds the
same hidden states, and the same gradient of them; within a layer it holds a part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vllm_patching.weights.sharding import vocabulary_range


class Split:
    """This rank's place in a split layer. `Split()` is the whole layer.

    Attributes:
        rank: 0 to size - 1.
        size: over how many ranks layers are split; vLLM's tensor-parallel degree.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank, self.size, self.group = rank, size, group

    def enter(self, x: Tensor) -> Tensor:
        """f: what every rank holds goes into its part of a layer; the parts' gradients add up."""
        entered: Tensor = x if self.size == 1 else _Enter.apply(x, self.group)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """g: the sum of the parts' outputs, on every rank; each part gets the sum's gradient."""
        left: Tensor = x if self.size == 1 else _Leave.apply(x, self.group)
        return left

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place, without gradient."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def maximum(self, x: Tensor) -> Tensor:
        """The largest over ranks, in place, without gradient."""
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's contiguous tensor of one common shape, by rank."""
        if self.size == 1:
            return [x]
        rows = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(rows, x, group=self.group)
        return rows

    def vocabulary_range(self, vocab_size: int) -> tuple[int, int]:
        """The token ids whose rows this rank holds: first, and one past the last.

        The rows after them are padding.
        """
        first, end, _ = vocabulary_range(vocab_size, self.rank, self.size)
        return first, end


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
