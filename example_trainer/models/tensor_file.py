"""Writing a safetensors file one tensor at a time, so that what is written need never be in memory together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """Write a safetensors file: 8 bytes with the header's length, a JSON header, then the tensors' bytes in order.

    Args:
        shapes: of every tensor, by name, in the order in which they are written.
        tensors: exactly these, in this order, on any device.
        dtype: of all of them.

    Raises:
        OSError: the disk is full or not writable.
        ValueError: `tensors` does not hold what `shapes` promises.
    """
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, tensor), (expected, shape) in zip(tensors, shapes.items(), strict=True):
            if (name, tuple(tensor.shape), tensor.dtype) != (expected, shape, dtype):
                raise ValueError(
                    f"{path}: {expected} {shape} {dtype} was to come, not {name} {tuple(tensor.shape)} {tensor.dtype}"
                )
            file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
