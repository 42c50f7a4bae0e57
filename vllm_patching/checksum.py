"""One number for a set of weights that changes when any bit of any weight changes its value or its place.

Each tensor's bytes are read as 16- or 32-bit integers x_0, x_1, … and condensed to two 64-bit sums (wrapping arithmetic):
sum(x_i) and sum(x_i * w_i) with odd weights w_i that depend on the position. Integer sums do not depend on the order of
additions, so a GPU and a CPU agree exactly. It guards against lost, stale, torn and misplaced weights, not against an
adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

_CHUNK = 1 << 22
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer: odd, well mixed bits


def weights_checksum(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Checksum of named tensors; the order of the tensors counts.

    Args:
        named: pairs of a name and a tensor of any shape, dtype of 2 or 4 bytes, on any device.

    Returns:
        32 hexadecimal digits.
    """
    names: list[str] = []
    sums: list[torch.Tensor] = []
    for name, tensor in named:
        names.append(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}")
        sums.append(_sums(tensor))
    digest = hashlib.sha256()
    # One transfer for all tensors: on a GPU each .tolist() would wait for the device.
    values = torch.stack(sums).tolist() if sums else []
    for name, (plain, weighted) in zip(names, values, strict=True):
        digest.update(f"{name}={plain},{weighted};".encode())
    return digest.hexdigest()[:32]


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        position = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=words.device)
        total[0] += chunk.sum()
        total[1] += (chunk * ((position * _GOLDEN) | 1)).sum()
    return total
