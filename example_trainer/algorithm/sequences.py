"""Sums and means over the tokens of each sequence of a bin. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_lengths(sequence: Tensor, sequences: int) -> Tensor:
    """[sequences] int64: how many tokens each has.

    Args:
        sequence: [n] int64, ascending: which sequence each token is of.
        sequences: how many there are.
    """
    return torch.zeros(sequences, dtype=torch.int64, device=sequence.device).index_add_(0, sequence, torch.ones_like(sequence))


def sequence_mean(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """For each token the mean of its sequence, with gradient.

    Sums are taken in float64, each sequence's by itself and in its tokens' order: neither what else lies in the bin nor when
    which thread of a GPU comes first changes a bit.

    Args:
        values: [n] float32 or float64.
        sequence: [n] int64, ascending: which sequence each token is of. The tokens of a sequence lie together.
        sequences: how many there are; each has a token.

    Returns:
        [n] of the values' dtype.
    """
    if not len(values):
        return values
    lengths = sequence_lengths(sequence, sequences)
    sums = torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True)
    return (sums / lengths)[sequence].to(values.dtype)
