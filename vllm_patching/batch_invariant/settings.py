"""Settings of torch and cuBLAS under which a product's sums have one order, the same in vLLM's
workers and in the trainer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Workspaces too small to split a sum over. Read by torch once, at the first product of a
process."""


class SettingsError(RuntimeError):
    """The settings cannot take effect any more in this process."""


def enable_settings() -> dict[str, str]:
    """Pin the settings for the rest of this process.

    Returns:
        what was pinned, name -> value.

    Raises:
        SettingsError: CUDA is in use already while the environment had other values.
    """
    _pin_environment()
    matmul = torch.backends.cuda.matmul
    # (reduced precision, split-K): the second is what matters; the first keeps partial sums in
    # float32.
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    matmul.fp32_precision = "ieee"
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = "ieee"  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        torch.backends.cuda.preferred_blas_library("cublaslt")
    return pinned()


def pinned() -> dict[str, str]:
    """The settings as this process has them now."""
    matmul = torch.backends.cuda.matmul
    return {
        **{name: os.environ.get(name, "unset") for name in ENVIRONMENT},
        "bf16_reduced_precision": str(matmul.allow_bf16_reduced_precision_reduction),
        "bf16_split_k": str(matmul.allow_bf16_reduced_precision_reduction_split_k),
        "fp16_reduced_precision": str(matmul.allow_fp16_reduced_precision_reduction),
        "fp16_split_k": str(matmul.allow_fp16_reduced_precision_reduction_split_k),
        "fp32_precision": str(matmul.fp32_precision),
        "blas": str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower(),
    }


@contextmanager
def settings() -> Iterator[dict[str, str]]:
    """Pin the settings for a block; the torch flags are put back behind it, the environment stays.

    Yields:
        what was pinned, name -> value.
    """
    saved = _flags()
    try:
        yield enable_settings()
    finally:
        _restore(saved)


def nccl_variables() -> dict[str, str]:
    """Return NCCL's variables in the environment."""
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def restore_nccl(variables: dict[str, str]) -> None:
    """Make `variables` NCCL's only variables in the environment, which it reads when its first
    group is formed.
    """
    for name in nccl_variables().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _flags() -> dict[str, Any]:
    matmul = torch.backends.cuda.matmul
    return {
        "bf16": (
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction_split_k,
        ),
        "fp16": (
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction_split_k,
        ),
        "matmul": matmul.fp32_precision,
        "conv": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "rnn": torch.backends.cudnn.rnn.fp32_precision,  # type: ignore[attr-defined]
        "blas": torch.backends.cuda.preferred_blas_library(),
    }


def _restore(saved: dict[str, Any]) -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = saved["bf16"]
    matmul.allow_fp16_reduced_precision_reduction = saved["fp16"]
    matmul.fp32_precision = saved["matmul"]
    torch.backends.cudnn.conv.fp32_precision = saved["conv"]  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = saved["rnn"]  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        torch.backends.cuda.preferred_blas_library(saved["blas"])


def _pin_environment() -> None:
    for name, value in ENVIRONMENT.items():
        current = os.environ.get(name)
        if current == value:
            continue
        if torch.cuda.is_initialized():
            raise SettingsError(
                f"{name} is {current or 'unset'} and CUDA is in use already, so {value} would "
                f"come too late. Type `export {name}={value}` before the start, or enable "
                "deterministic mode before anything touches the GPU"
            )
        os.environ[name] = value
