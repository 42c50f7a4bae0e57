"""The decoder's operations, one table for each kind of arithmetic."""

from __future__ import annotations

import importlib
from typing import cast

import torch

from example_trainer.models.ops.table import Operations

__all__ = ["Operations", "choose_operations"]


def choose_operations(device: torch.device, dtype: torch.dtype, deterministic: bool = False) -> Operations:
    """The table that a model computes with.

    Args:
        device, dtype: of its parameters.
        deterministic: whether its bits are to be vLLM's.
    """
    fast = device.type == "cuda" and dtype == torch.bfloat16
    name = "invariant" if deterministic else "fast" if fast else "reference"
    # Only when chosen: some of them import kernels that this machine may not have.
    return cast(Operations, importlib.import_module(f"{__name__}.{name}"))
