"""vLLM's sampler of top-p and top-k on a machine without a CUDA compiler."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "VLLM_USE_FLASHINFER_SAMPLER"
DEFAULT_CUDA = Path("/usr/local/cuda")


def sample_without_compiler(
    environment: MutableMapping[str, str], default_cuda: Path = DEFAULT_CUDA
) -> bool:
    """Have vLLM sample by itself where FlashInfer could not compile its sampler.

    vLLM chooses FlashInfer's sampler without a look for the compiler. The server then ends when it
    first samples with top-p or top-k, in some versions while it starts. A value that the
    environment already has is kept. Call before the engine starts, on a machine with NVIDIA GPUs.

    Args:
        environment: gets the variable.
        default_cuda: the last place in which FlashInfer looks.

    Returns:
        True if the variable was set here.
    """
    if VARIABLE in environment or _has_compiler(environment, default_cuda):
        return False
    environment[VARIABLE] = "0"
    return True


def _has_compiler(environment: MutableMapping[str, str], default_cuda: Path) -> bool:
    """Look where FlashInfer does. Its package of compiled kernels needs no compiler."""
    if (
        "FLASHINFER_NVCC" in environment
        or importlib.util.find_spec("flashinfer_jit_cache") is not None
    ):
        return True
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home is None and shutil.which("nvcc", path=environment.get("PATH")) is not None:
        return True
    return (Path(home or default_cuda) / "bin" / "nvcc").is_file()
