"""Sums and means over the tokens of each sequence of a bin. Pure functions of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sequence_lengths(sequence: Tensor, sequences: int) -> Tensor:
    """[sequences] int64: how many tokens each has.

    Args:
        sequence: [n] int64, ascending: which sequence each token is of.
        sequences: how many there are.
    """
    return torch.zeros(sequences, dtype=torch.int64, device=sequence.device).index_add_(
        0, sequence, torch.ones_like(sequence)
    )


def sequence_mean(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """For each token the mean of its sequence, with gradient.

    Sums are taken in float64, each sequence's by itself and in its tokens' order: neither what else
    lies in the bin nor when which thread of a GPU comes first changes a bit.

    Args:
        values: [n] float32 or float64.
        sequence: [n] int64, ascending: which sequence each token is of. The tokens of a sequence
            lie together.
        sequences: how many there are; each has a token.

    Returns:
        [n] of the values' dtype.
    """
    if not len(values):
        return values
    mean: Tensor = _Mean.apply(values, sequence, sequence_lengths(sequence, sequences))
    return mean


class _Mean(torch.autograd.Function):
    """Its gradient is the mean of the gradients, by the same sums: to put a mean in the place of
    each value is a symmetric map.

    Autograd's own way back through the index adds the gradients at equal indices one after the
    other on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(sequence, lengths)
        sums = torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True)
        return (sums / lengths)[sequence].to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        sequence, lengths = ctx.saved_tensors
        return _Mean.apply(gradients[0], sequence, lengths), None, None
