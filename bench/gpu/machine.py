"""Hardware and versions behind the figures, without any name of the machine or path on it.

python -m bench.gpu.machine    what results files of the installed vLLM end with, such as _vllm033
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch


def describe() -> dict[str, Any]:
    """GPUs, driver and versions of what took part."""
    machine: dict[str, Any] = {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "vllm": _vllm_version(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
    }
    if machine["gpus"]:
        machine |= {
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "mps": any(
                (process.info["name"] or "").startswith("nvidia-cuda-mps")
                for process in psutil.process_iter(["name"])
            ),
        }
    return machine


def _vllm_version() -> str:
    """Read from its file: importing vLLM takes many seconds that a server's start beside this would
    lose.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return "not installed"
    file = Path(spec.origin).with_name("_version.py")
    found = re.search(
        r"""^(?:__version__|version)\b.*=\s*["']([^"']+)["']""", file.read_text(), re.MULTILINE
    )
    return found[1] if found else "unknown"


def version_ending() -> str:
    """Return the ending of a results file's name, which distinguishes versions of vLLM."""
    numbers = _vllm_version().split(".")
    if len(numbers) < 2:
        return "_without_vllm"
    return f"_vllm{numbers[0]}{numbers[1].zfill(2)}"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return answer.stdout.strip().splitlines()[0]


if __name__ == "__main__":
    print(version_ending())
