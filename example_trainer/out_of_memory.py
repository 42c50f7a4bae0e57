"""Errors of PyTorch and its libraries for want of memory."""

from __future__ import annotations

import torch

_SIGNS = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is one of them."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        sign in str(error) for sign in _SIGNS
    )
