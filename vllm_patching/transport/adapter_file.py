"""Reading a LoRA adapter in PEFT's format, with every check that needs no model: what passes here
can be served.

The tensors of adapter_model.safetensors are read in one piece. So a file of any number of tensors
costs one read and one copy to a GPU.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_patching.protocol.checksum import WeightSummary, WeightSums
from vllm_patching.weights.families import Geometry, parameters

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PREFIX = "base_model.model."
_LARGEST_HEADER = 100_000_000  # bytes, as in the safetensors format
_PLAIN = {
    "use_dora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "modules_to_save": None,
}
"""Switches of adapter_config.json and the value that each must have: others mean weights that are
not served here."""


class AdapterError(ValueError):
    """The folder has no adapter for this model. The message gives the reason in one line."""


@dataclass(frozen=True)
class Matrix:
    """One tensor of the file: `matrix` is lora_A or lora_B, `start` its first byte in the data."""

    projection: str
    matrix: str
    start: int
    shape: tuple[int, int]


@dataclass(frozen=True)
class AdapterFile:
    """The adapter in a folder.

    Attributes:
        folder: absolute.
        rank, scale: B A x is multiplied by scale.
        dtype: of all tensors.
        matrices: by projection, A before B.
        header: the bytes that describe the tensors.
        num_bytes: of the data behind the header.
    """

    folder: Path
    rank: int
    scale: float
    dtype: torch.dtype
    matrices: tuple[Matrix, ...]
    header: bytes
    num_bytes: int

    def read_into(self, buffer: torch.Tensor) -> None:
        """Read the data.

        Args:
            buffer: [num_bytes] uint8 on the CPU.

        Raises:
            AdapterError: the file has changed or cannot be read.
        """
        path = self.folder / WEIGHTS_FILE
        try:
            with path.open("rb", buffering=0) as file:
                start = file.read(8 + len(self.header))
                if start != struct.pack("<Q", len(self.header)) + self.header:
                    raise AdapterError(f"{path} was changed while it was read")
                view, done = buffer.numpy().data, 0
                while done < self.num_bytes:
                    count = file.readinto(view[done:])
                    if not count:
                        raise AdapterError(f"{path} ends after {done} of {self.num_bytes} bytes")
                    done += count
        except OSError as error:
            raise AdapterError(f"cannot read {path}: {error.strerror or error}") from error

    def tensors(self, data: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        """Views by projection and matrix on `data`, the file's data as one flat tensor of any
        dtype.
        """
        views: dict[str, dict[str, torch.Tensor]] = {}
        for item in self.matrices:
            first = item.start // self.dtype.itemsize
            flat = data[first : first + math.prod(item.shape)]
            views.setdefault(item.projection, {})[item.matrix] = flat.view(item.shape)
        return views

    def summary(self, data: torch.Tensor) -> WeightSummary:
        """Return the checksum over the header and the data, as the file's writer computes it, and
        whether all values are finite.
        """
        return adapter_summary(self.header, data)


def adapter_summary(header: bytes, data: torch.Tensor) -> WeightSummary:
    """One pass over a safetensors file: over its header, and its data as one flat tensor, wherever
    that tensor is.
    """
    return WeightSums([(hashlib.sha256(header).hexdigest(), data)]).all()


def expected_shapes(geometry: Geometry) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every projection of a model, by its Hugging Face name."""
    return {
        tensor.module: (tensor.shape[1], tensor.shape[0])
        for parameter in parameters(geometry).values()
        if parameter.adapted
        for tensor in parameter.tensors
    }


def open_adapter(folder: Path, geometry: Geometry, max_rank: int) -> AdapterFile:
    """Read the description of an adapter and compare it with the model.

    Args:
        folder: absolute, with adapter_config.json and adapter_model.safetensors.
        max_rank: the largest rank that the server was started for.

    Raises:
        AdapterError: a file is missing or unreadable; or the rank is too large. Or a tensor has no
            place in the model, is of another shape, or lacks its partner. Or a feature is used that
            is not served.
    """
    rank, scale = _read_config(folder / CONFIG_FILE, max_rank)
    header, described, num_bytes = _read_header(folder / WEIGHTS_FILE)
    dtypes = {item.dtype for item in described.values()}
    if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
        raise AdapterError(
            f"{folder}: the tensors are of {', '.join(sorted(dtypes)) or 'no'} dtype; give one of F32, BF16, F16"
        )
    dtype = _DTYPES[dtypes.pop()]
    shapes = expected_shapes(geometry)
    matrices = []
    for name, item in described.items():
        projection, matrix = _split(name, folder)
        if projection not in shapes:
            raise AdapterError(
                f"{folder}: {name} has no place in the served model of {geometry.num_layers} layers"
            )
        inputs, outputs = shapes[projection]
        wanted = (rank, inputs) if matrix == "lora_A" else (outputs, rank)
        start, stop = item.start, item.stop
        if item.shape != wanted or stop - start != math.prod(wanted) * dtype.itemsize:
            raise AdapterError(
                f"{folder}: {name} has shape {list(item.shape)}, the served model wants {list(wanted)}"
            )
        if start % dtype.itemsize or not 0 <= start < stop <= num_bytes:
            raise AdapterError(
                f"{folder}: {name} lies at bytes {start} to {stop} of {num_bytes}; the file is damaged"
            )
        matrices.append(Matrix(projection, matrix, start, wanted))
    matrices.sort(key=lambda item: (item.projection, item.matrix))
    _check_pairs(matrices, folder)
    return AdapterFile(folder, rank, scale, dtype, tuple(matrices), header, num_bytes)


def _read_config(path: Path, max_rank: int) -> tuple[int, float]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        if not math.isfinite(alpha):
            raise ValueError(f"lora_alpha is {alpha}")
    except OSError as error:
        raise AdapterError(
            f"cannot read {path}: {error.strerror or error}; give a folder that this server can read"
        ) from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise AdapterError(
            f"{path} is not PEFT's adapter_config.json of a LoRA adapter ({error!r})"
        ) from error
    if config.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"{path}: peft_type {config['peft_type']!r} is not LORA")
    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, None, [], False):
            raise AdapterError(f"{path}: {key} {config[key]!r} is not supported, only {plain!r}")
    for key in ("rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise AdapterError(
                f"{path}: {key} is not supported; give every projection the same rank and alpha"
            )
    if not 1 <= rank <= max_rank:
        raise AdapterError(
            f"{path}: rank {rank} does not fit this server, which was started with --max-lora-rank {max_rank}; "
            "start it with a larger one"
        )
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


class _Described(NamedTuple):
    """A tensor as the header describes it; bytes count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _read_header(path: Path) -> tuple[bytes, Mapping[str, _Described], int]:
    """Return the header's bytes, its tensors, and the number of bytes that follow."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, _LARGEST_HEADER):
                raise AdapterError(
                    f"{path} is not a safetensors file, or was cut short: it has {size} bytes"
                )
            header = file.read(length)
        described = {
            name: _Described(
                str(item["dtype"]), tuple(item["shape"]), *map(int, item["data_offsets"])
            )
            for name, item in json.loads(header).items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise AdapterError(f"cannot read {path}: {error.strerror or error}") from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"{path} is not a safetensors file: {error!r}") from error
    num_bytes = size - 8 - length
    end = max((item.stop for item in described.values()), default=0)
    if end != num_bytes:
        raise AdapterError(f"{path} holds {num_bytes} bytes of data, its header describes {end}")
    return header, described, num_bytes


def _split(name: str, folder: Path) -> tuple[str, str]:
    projection, _, matrix = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
    if (
        not name.startswith(_PREFIX)
        or not name.endswith(".weight")
        or matrix not in ("lora_A", "lora_B")
    ):
        raise AdapterError(
            f"{folder}: {name} is not PEFT's name of a LoRA matrix ({_PREFIX}….lora_A.weight)"
        )
    return projection, matrix


def _check_pairs(matrices: list[Matrix], folder: Path) -> None:
    of_projection: dict[str, set[str]] = {}
    for item in matrices:
        of_projection.setdefault(item.projection, set()).add(item.matrix)
    for projection, present in of_projection.items():
        if len(present) != 2:
            raise AdapterError(f"{folder}: {projection} has {present.pop()} and not its partner")
