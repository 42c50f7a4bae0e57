"""Writing safetensors files one tensor at a time, so that what is written need never be in memory
together.

The format: 8 bytes with the header's length, then a JSON header with the place of each tensor's
bytes. The bytes follow, row-major and little-endian, one tensor after the other
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int64: "I64",
}
_AT_ONCE = 64 << 20
"""Bytes that are given to the operating system in one call."""
_SAVED_AT_ONCE = 1 << 30
"""Bytes after which they are put on the disk, lest all of it waits for the end, where there is no
progress to be seen."""

Entries = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""dtype and shape of each tensor by name, in the order in which they lie in the file."""


def make_header(entries: Entries, metadata: Mapping[str, str] | None = None) -> bytes:
    """The JSON header, filled up with spaces to a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in entries.items():
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def write_file(
    path: Path, header: bytes, tensors: Iterable[Tensor], moved: Callable[[], None] = lambda: None
) -> None:
    """Write a header and the bytes of tensors on any device.

    Args:
        moved: called again and again while there is progress.

    Raises:
        OSError: the disk is full or not writable.
    """
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        unsaved = 0
        for tensor in tensors:
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), _AT_ONCE):
                unsaved += file.write(data[start : start + _AT_ONCE])
                if unsaved >= _SAVED_AT_ONCE:
                    file.flush()
                    os.fdatasync(file.fileno())
                    unsaved = 0
                moved()


def write_safetensors(
    path: Path,
    entries: Entries,
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
    moved: Callable[[], None] = lambda: None,
) -> None:
    """Write named tensors.

    Args:
        tensors: exactly the entries, in their order.
        metadata: of the file, for its readers.
        moved: see write_file.

    Raises:
        OSError: the disk is full or not writable.
        ValueError: `tensors` does not hold what `entries` promises.
    """

    def checked() -> Iterable[Tensor]:
        for (name, tensor), (expected, (dtype, shape)) in zip(
            tensors, entries.items(), strict=True
        ):
            if (name, tuple(tensor.shape), tensor.dtype) != (expected, shape, dtype):
                raise ValueError(
                    f"{path}: {expected} {shape} {dtype} was to come, not {name} {tuple(tensor.shape)} {tensor.dtype}"
                )
            yield tensor

    write_file(path, make_header(entries, metadata), checked(), moved)
