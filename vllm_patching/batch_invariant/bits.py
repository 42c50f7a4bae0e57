"""Comparisons of results bit for bit, for the self-test."""

from __future__ import annotations

import torch


def describe_difference(one: torch.Tensor, other: torch.Tensor) -> str:
    """Return the first place where two results of equal shape differ in a bit, and both values."""
    different = differing(one, other).flatten(1)
    if not different.any():
        return "but not when it was computed again: the operation does not repeat itself"
    row, column = different.nonzero()[0].tolist()
    values = [x.flatten(1)[row, column].item() for x in (one, other)]
    return f"first at row {row}, column {column}: {values[0]!r} against {values[1]!r}"


def differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return True for each value with a bit that differs."""
    return _bits(one) != _bits(other)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two results of equal shape are equal in every bit."""
    return torch.equal(_bits(one), _bits(other))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def random_rows(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return normal numbers on the device and in the dtype of `like`."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)
