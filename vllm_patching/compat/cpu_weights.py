"""Weights of vLLM's CPU build."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vllm_patching.compat.versions import UnsupportedVllm, seam_missing

if TYPE_CHECKING:
    import torch


def keep_cpu_weights_plain() -> None:
    """Make vLLM's CPU linear layers multiply with the parameter itself.

    By default they pack a private copy of the weight after loading and leave the parameter empty,
    or stale when it is tied, so that nothing written to the parameter would ever be used. Call
    before the model is built; does nothing elsewhere.
    """
    import torch

    utils = importlib.import_module("vllm.model_executor.layers.utils")

    def use_the_parameter(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise UnsupportedVllm(
            seam_missing("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm")
        )
    utils.dispatch_cpu_unquantized_gemm = use_the_parameter  # type: ignore[attr-defined]
