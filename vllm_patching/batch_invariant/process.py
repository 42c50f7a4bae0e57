"""Deterministic mode in a process of one's own, without a server of this project around it."""

from __future__ import annotations

import os

from vllm_patching.batch_invariant.patches import apply_patches
from vllm_patching.batch_invariant.settings import (
    ENVIRONMENT,
    SettingsError,
    enable_settings,
    nccl_variables,
    restore_nccl,
)
from vllm_patching.compat.batch_invariant import start_batch_invariance

MODE_VARIABLE = "VLLM_BATCH_INVARIANT"

_replaced: list[str] | None = None


def enter_mode() -> list[str]:
    """Switch vLLM's batch-invariant mode on, then put this project's operations in the place of
    vLLM's.

    vLLM's mode also changes variables of NCCL and cuBLAS. NCCL's are put back, because they choose
    other protocols than a trainer's; cuBLAS's get the values that both sides of this project pin.

    Returns:
        the replaced functions, as dotted names. A second call changes nothing and returns the same.

    Raises:
        SettingsError: the GPU is in use already with other settings, or vLLM was imported with the
            mode switched off.
        UnsupportedVllm: vLLM is missing, or a seam is not where the supported versions have it.
    """
    global _replaced
    if _replaced is not None:
        return _replaced
    enable_settings()
    nccl = nccl_variables()
    os.environ[MODE_VARIABLE] = "1"
    active = start_batch_invariance()
    restore_nccl(nccl)
    os.environ.update(ENVIRONMENT)
    enable_settings()
    if not active:
        raise SettingsError(
            f"vLLM was imported before init_batch_invariance() and read {MODE_VARIABLE} as off: call it first, or "
            f"`export {MODE_VARIABLE}=1` before the start"
        )
    _replaced = apply_patches()
    return _replaced
