"""The decoder's operations, one table for each kind of arithmetic."""

from __future__ import annotations

import importlib
from typing import Literal, cast

import torch

from example_trainer.models.ops.table import Operations

__all__ = ["Operations", "choose_operations", "choose_table"]


def choose_table(
    device: torch.device, dtype: torch.dtype, deterministic: bool = False
) -> Literal["reference", "fast", "invariant"]:
    """The name of the table that `choose_operations` gives."""
    if deterministic:
        return "invariant"
    return "fast" if device.type == "cuda" and dtype == torch.bfloat16 else "reference"


def choose_operations(
    device: torch.device, dtype: torch.dtype, deterministic: bool = False
) -> Operations:
    """The table that a model computes with.

    Args:
        device, dtype: of its parameters.
        deterministic: whether its bits are to be vLLM's.
    """
    name = choose_table(device, dtype, deterministic)
    # Only when chosen: some of them import kernels that this machine may not have.
    return cast(Operations, importlib.import_module(f"{__name__}.{name}"))
