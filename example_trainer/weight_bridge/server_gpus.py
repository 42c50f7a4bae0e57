"""The GPUs of a vLLM server that the trainer starts, and its tensor-parallel degree."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from example_trainer.child_processes.vllm_flags import Degrees, degrees, flag_value
from example_trainer.errors import ConfigError
from vllm_patching.weights.families import Geometry
from vllm_patching.weights.sharding import undividable

_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,memory.total,memory.used",
    "--format=csv,noheader,nounits",
)
_QUERY_SECONDS = 30.0


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU of this machine, in bytes."""

    free: int
    total: int


@dataclass(frozen=True)
class ServerGpus:
    """Where a server runs.

    Attributes:
        gpus: as in CUDA_VISIBLE_DEVICES, one for each of its ranks.
        tensor_parallel: ranks that share the weights.
        trainer: the trainer's GPU.
        degree_is_given: the user's flags hold the degree.
    """

    gpus: tuple[str, ...]
    tensor_parallel: int
    trainer: str
    degree_is_given: bool = False

    @property
    def beside_trainer(self) -> bool:
        """Return whether the server shares the trainer's GPU."""
        return self.trainer in self.gpus

    @property
    def listed(self) -> str:
        """`0,1`"""
        return ",".join(self.gpus)


def usable_degrees(geometry: Geometry, most: int) -> list[int]:
    """The powers of two up to `most` by which vLLM can divide a model."""
    powers = (1 << exponent for exponent in range(most.bit_length()))
    return [degree for degree in powers if not undividable(geometry, degree)]


def choose_server_gpus(
    asked: str | None,
    seen: Sequence[str],
    trainer: int,
    geometry: Geometry,
    size: Degrees | None = None,
) -> ServerGpus:
    """Choose the GPUs of a server.

    With --vllm-gpus: these. Without: the GPUs that the trainer sees and does not use, as many as
    the model can be divided by. If it sees no other, the trainer's own GPU.

    Args:
        asked: --vllm-gpus.
        seen: the GPUs that the trainer sees, as in CUDA_VISIBLE_DEVICES.
        trainer: the index of the trainer's GPU among them.
        geometry: the model's.
        size: the degrees among --vllm-args.

    Raises:
        ConfigError: the server cannot have these GPUs.
    """
    size = size or Degrees()
    mine = seen[trainer]
    if asked is not None:
        gpus = tuple(str(int(gpu)) for gpu in asked.split(","))
        if len(set(gpus)) != len(gpus):
            raise ConfigError(f"--vllm-gpus {asked} names a GPU twice: name each once")
        return _on(gpus, _degree_of_all(asked, gpus, geometry, size), size, mine)
    others = [gpu for gpu in seen if gpu != mine]
    degree = size.tensor or max(usable_degrees(geometry, max(1, len(others) // size.data)))
    count = degree * size.data
    if count <= len(others):
        return _on(tuple(others[:count]), degree, size, mine)
    if count > len(seen):
        raise ConfigError(
            f"--vllm-args ask for a vLLM server of {count} GPUs, and this trainer sees "
            f"{len(seen)} ({','.join(seen)}). Lower the degrees in --vllm-args, name GPUs with "
            "--vllm-gpus, or show more in CUDA_VISIBLE_DEVICES"
        )
    return _on(tuple([*others, mine][:count]), degree, size, mine)


def _on(gpus: tuple[str, ...], degree: int, size: Degrees, mine: str) -> ServerGpus:
    return ServerGpus(gpus, degree, mine, size.tensor is not None)


def _degree_of_all(asked: str, gpus: Sequence[str], geometry: Geometry, size: Degrees) -> int:
    """The degree with which a server takes all of these GPUs."""
    if size.tensor is not None:
        if size.tensor * size.data != len(gpus):
            raise ConfigError(
                f"--vllm-gpus {asked}: {len(gpus)} GPUs, and the degrees in --vllm-args need {size.tensor * size.data}: "
                "name as many"
            )
        return size.tensor
    degree, rest = divmod(len(gpus), size.data)
    usable = usable_degrees(geometry, max(1, degree))
    if rest or degree not in usable:
        counts = ", ".join(str(one * size.data) for one in usable_degrees(geometry, 64))
        raise ConfigError(
            f"--vllm-gpus {asked}: {len(gpus)} GPUs, and a server of this model "
            f"({geometry.num_heads} heads, {geometry.num_kv_heads} key heads) can have {counts}. "
            "Name as many, or give --tensor-parallel-size in --vllm-args"
        )
    return degree


def seen_gpus(count: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that a process sees, as in CUDA_VISIBLE_DEVICES; `count` is torch's."""
    named = [
        part.strip()
        for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if part.strip()
    ]
    return named[:count] if len(named) >= count else [str(index) for index in range(count)]


def memory_of_gpus() -> dict[str, GpuMemory]:
    """The memory of this machine's GPUs, by index and by UUID; empty where nvidia-smi gives none."""
    try:
        listed = subprocess.run(
            _QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return read_memory(listed)


def read_memory(listed: str) -> dict[str, GpuMemory]:
    """Parse nvidia-smi's lines of index, UUID, MiB in all and MiB used.

    Lines without numbers are left out.
    """
    found = {}
    for line in listed.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[2].isdigit() and cells[3].isdigit():
            total, used = int(cells[2]) << 20, int(cells[3]) << 20
            found[cells[0]] = found[cells[1]] = GpuMemory(total - used, total)
    return found


@dataclass(frozen=True)
class ServerFlags:
    """The flags in --vllm-args by which a server's memory is planned.

    Attributes:
        size: its degrees.
        max_model_len: longest sequence; None for the model's.
        utilization: --gpu-memory-utilization; None if it is not given.
    """

    size: Degrees
    max_model_len: int | None
    utilization: float | None

    @classmethod
    def of(cls, arguments: str) -> ServerFlags:
        """Read them.

        Raises:
            ConfigError: a value is not a number.
        """
        try:
            words = shlex.split(arguments)
            length = flag_value(words, "--max-model-len")
            share = flag_value(words, "--gpu-memory-utilization", "--device-memory-utilization")
            # vLLM takes 32k and the like, and -1 or auto for what fits; what is not a plain number
            # is not planned with.
            whole = int(length) if length is not None and length.isdigit() else None
            return cls(degrees(words), whole, None if share is None else float(share))
        except ValueError as error:
            raise ConfigError(f"--vllm-args {arguments!r} cannot be used: {error}") from error
