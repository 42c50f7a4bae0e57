"""The highest memory of GPUs and of processes, from samples about once a second."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from shutil import which
from typing import Any

import psutil

from bench.gpu.processes import BenchError

SAMPLE_SECONDS = 1.0
GIB = 2**30
FREE_GIB = 2.0
"""In use on a GPU without processes, at most: what the driver keeps."""
ROLES = {"trainer": "grpo.py", "vllm": "VLLM::", "vllm server": "vllm_api_server.py"}
"""Role -> a word of its processes' command lines."""


class MemoryPeaks:
    """Sampled peaks; memory that is allocated and freed between two samples is missed."""

    def __init__(self) -> None:
        self._next = 0.0
        self._gpus: dict[str, float] = {}
        self._roles: dict[str, int] = {}
        self._host = 0
        self._before = psutil.virtual_memory().used

    def sample(self, processes: Mapping[int, str]) -> None:
        """Take a sample, unless the last one is younger than SAMPLE_SECONDS.

        Args:
            processes: process id -> command line.
        """
        if time.monotonic() < self._next:
            return
        for gpu, used in gpu_memory().items():
            self._gpus[gpu] = max(used, self._gpus.get(gpu, 0.0))
        self._host = max(self._host, psutil.virtual_memory().used - self._before)
        resident = dict.fromkeys(ROLES, 0)
        for pid, line in processes.items():
            for role, word in ROLES.items():
                if word in line:
                    with suppress(psutil.NoSuchProcess):
                        resident[role] += psutil.Process(pid).memory_info().rss
        for role, used in resident.items():
            self._roles[role] = max(used, self._roles.get(role, 0))
        self._next = time.monotonic() + SAMPLE_SECONDS

    def found(self, trainer_gpus: str, vllm_gpus: str) -> dict[str, Any]:
        """Peaks in GiB: of each GPU, the largest of the trainer's and of vLLM's GPUs, and host
        memory that came into use. The last is resident memory by role (pages that processes share
        count for each of them).
        """
        most = {name: [self._gpus[g] for g in gpus.split(",") if g in self._gpus] for name, gpus in
                (("trainer_gpu_gib", trainer_gpus), ("vllm_gpu_gib", vllm_gpus))}  # fmt: skip
        return {
            "gpus_gib": {gpu: round(used, 2) for gpu, used in self._gpus.items()},
            **{name: round(max(used), 2) if used else None for name, used in most.items()},
            "host_gib": round(self._host / GIB, 2),
            "resident_gib": {role: round(used / GIB, 2) for role, used in self._roles.items()},
        }


def gpu_memory() -> dict[str, float]:
    """Return the memory in use on each GPU in GiB, by its number; empty without nvidia-smi."""
    if which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    return {
        gpu.strip(): float(used) / 1024
        for gpu, used in (row.split(",") for row in rows if "," in row)
    }


def wait_until_free(seconds: float) -> dict[str, Any]:
    """Wait until no GPU has more than FREE_GIB in use; return the seconds it took and what is in
    use.

    Raises:
        BenchError: a GPU still has more in use at the deadline.
    """
    began = time.monotonic()
    while (used := gpu_memory()) and max(used.values()) > FREE_GIB:
        if time.monotonic() - began > seconds:
            raise BenchError(
                f"{seconds:g} s after everything was killed these GPUs still have GiB in use: {used}"
            )
        time.sleep(0.2)
    return {"seconds_until_gpus_were_free": round(time.monotonic() - began, 2), "gpus_gib": used}
